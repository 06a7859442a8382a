# SPDX-License-Identifier: Apache-2.0
"""The kernel `record` of `fake_driver.cpp`, which writes down what it is given."""

from __future__ import annotations

import ctypes


class Record(ctypes.Structure):
    """Its grid, its block and its parameters."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("pointer", ctypes.c_void_p),
        ("null", ctypes.c_void_p),
        ("i", ctypes.c_int),
        ("l", ctypes.c_longlong),
        ("u", ctypes.c_ulonglong),
        ("f", ctypes.c_float),
    )
