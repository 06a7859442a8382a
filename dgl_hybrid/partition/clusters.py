# SPDX-License-Identifier: Apache-2.0
"""Cuts a graph into clusters by METIS, in a process of its own.

METIS (Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", 1998; through
PyMetis) works for up to minutes without letting go of Python's lock, so that neither Ctrl-C nor the thread that looks
whether a rank's launcher is still there would get through. It takes over SIGTERM meanwhile, prints to stdout, and
leaves freed memory in pieces. What goes wrong in it ends its process alone (unless a container ends with it).

Run from its path, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]


_PR_SET_PDEATHSIG = 1


class ClusterError(RuntimeError):
    """Why there are no clusters."""


def cut_into_clusters(indptr: Numbers, indices: Numbers, num_clusters: int, timeout_s: float) -> Numbers:
    """Returns the cluster of each vertex, of about equally many vertices each; the same for the same graph.

    Args:
        indptr: (N + 1,) of adjacency lists.
        indices: (E,) neighbours; every edge in both directions, no loops.
        num_clusters: 2 to N.
        timeout_s: For METIS.

    Raises:
        ClusterError: METIS is not installed, failed, or took longer than `timeout_s`.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise ClusterError("there is no Python to start METIS with")
    head = np.array([len(indptr) - 1, len(indices), num_clusters], dtype=np.int64)
    try:
        numbers = (part.astype(np.int32, copy=False).tobytes() for part in (indptr, indices))
        # -P: the modules beside this one are not to be found by their names.
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=b"".join((head.tobytes(), *numbers)),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, ValueError, MemoryError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{type(error).__name__}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ClusterError(f"METIS ended with exit status {done.returncode}: {said[-1] if said else 'it said nothing'}")
    found = np.frombuffer(done.stdout, dtype=np.int32) if len(done.stdout) % 4 == 0 else np.empty(0, dtype=np.int32)
    if len(found) != head[0] or found.min() < 0 or found.max() >= num_clusters:
        raise ClusterError(f"METIS returned {len(done.stdout)} bytes that are no clusters of {head[0]} vertices")
    return found


def _serve() -> None:
    """Reads a graph from stdin and writes its clusters to stdout."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out this process goes, not a rank
    result = os.dup(1)
    os.dup2(2, 1)  # for what METIS prints
    import pymetis

    # Not up to the end of the pipe, which a process may hold open that the rank forked meanwhile.
    num_rows, num_edges, num_clusters = (int(number) for number in _read(3, np.dtype(np.int64)))
    numbers = _read(num_rows + 1 + num_edges, np.dtype(np.int32))
    adjacency = pymetis.CSRAdjacency(numbers[: num_rows + 1], numbers[num_rows + 1 :])
    options = pymetis.Options(seed=1, niter=1)  # ten rounds of refinement, its default, gain nothing here
    found = pymetis.part_graph(num_clusters, adjacency, options=options, recursive=False)
    with os.fdopen(result, "wb") as stream:
        stream.write(np.asarray(found.vertex_part, dtype=np.int32).tobytes())


def _read(count: int, dtype: np.dtype[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
    sent = sys.stdin.buffer.read(count * dtype.itemsize)
    if len(sent) != count * dtype.itemsize:
        raise EOFError(f"expected {count} numbers (got {len(sent)} bytes)")
    return np.frombuffer(sent, dtype=dtype)


if __name__ == "__main__":
    _serve()
