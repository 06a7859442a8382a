# SPDX-License-Identifier: Apache-2.0
"""Giving back memory that this process holds for nothing."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.utils.weak import WeakIdKeyDictionary

from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.ops.cpu.memory import ask_for_huge_heap, unmap_code_in
from dgl_hybrid.ops.cpu.resting_rows import leave_on_disk, take_back_if_read
from dgl_hybrid.training.resident_memory import current_rss_bytes

_PLANNING_LIBRARIES = ("ortools",)
"""Whose code epochs do not run."""

_FAULT_RATE = 1e9
"""Resident bytes a second that come back after they were given back: 0.7 GB took 0.6 s (a virtual machine of two
cores, whose host takes what the guest frees, too)."""
_FAULT_SHARE = 0.05
"""Of the time since memory was freed that this may take."""


class FreeMemory:
    """Memory that is to go back to the system, at once or when so long has passed that it costs little: what is free,
    and raw rows of which layers read only what was made of them.

    What planning and building have freed is what the first epoch takes. Given back between them, the first epoch of a
    products-like graph took 1.0 s, six times that of the others, instead of 0.4.

    Args:
        at_once: Whether memory is scarcer than time; asked each time.
    """

    def __init__(self, *, at_once: Callable[[], bool]) -> None:
        self._at_once = at_once
        self._is_thorough = False
        self._waits_since: float | None = None
        self._waits_to_be_asked = False
        self._kept: Sequence[StaticResults] = ()
        self._rows_left: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """On disk, and not known yet to be read by nobody: until the end of the next epoch."""

    def watch(self, kept: Sequence[StaticResults]) -> None:
        """From now on these results are what layers read in place of the rows they were made of."""
        self._kept = kept

    def leave(self, *, thoroughly: bool, is_little: bool = False) -> None:
        """Notes that more was freed than will be taken.

        Args:
            thoroughly: That of `give_back_memory`.
            is_little: Goes back only when somebody asks for it.
        """
        if is_little:
            self._waits_to_be_asked = True
            self._is_thorough = self._is_thorough or thoroughly
            return
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        self._is_thorough = self._is_thorough or thoroughly
        if self._at_once():
            self.give_back()

    def give_back_if_cheap(self) -> None:
        """Gives back what has waited long enough."""
        if self._waits_since is not None:
            passed_s = time.monotonic() - self._waits_since
            if current_rss_bytes() / _FAULT_RATE <= _FAULT_SHARE * passed_s:
                self.give_back()

    def give_back(self) -> None:
        """Gives back what waits, if anything does."""
        if self._waits_since is not None or self._waits_to_be_asked:
            self.leave_rows_on_disk()
            give_back_memory(thoroughly=self._is_thorough)
        self._waits_since, self._waits_to_be_asked, self._is_thorough = None, False, False

    def leave_rows_on_disk(self) -> None:
        """Takes rows out of memory of which only results are read. They stay the tensors that they are."""
        for results in self._kept:
            for rows in results.resting_operands():
                if leave_on_disk(rows):
                    self._rows_left[rows] = None

    def take_back_rows(self) -> None:
        """After an epoch: puts rows back that something else in the model reads, a layer that skips others maybe."""
        for rows in list(self._rows_left):
            take_back_if_read(rows)
        self._rows_left.clear()


def give_back_memory(*, thoroughly: bool = True) -> None:
    """Hands free memory back to the system.

    Planning and building take several times what stays of them. A C library that is told to keep freed memory (which
    saves the page faults of every epoch, see `exchange/buffers.py`) would hold all of that for good, and scatter what
    epochs need over it. Costs a few tenths of a second, and the next epoch the faults of what it really uses.

    Args:
        thoroughly: End what only cycles of references keep alive, and take the code of libraries that only planning
            runs out of memory, too: most of that time.
    """
    if thoroughly:
        gc.collect()  # planning leaves cycles, and a layer of the user's may
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of glibc
        trim(0)
    ask_for_huge_heap()
    for name in _PLANNING_LIBRARIES if thoroughly else ():
        if (path := getattr(sys.modules.get(name), "__file__", None)) is not None:
            unmap_code_in(Path(path).parent)
