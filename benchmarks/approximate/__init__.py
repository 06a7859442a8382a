# SPDX-License-Identifier: Apache-2.0
"""Approximate exchanges: bytes, time and accuracy."""
