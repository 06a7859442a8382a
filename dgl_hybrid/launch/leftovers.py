# SPDX-License-Identifier: Apache-2.0
"""Finds and removes what the parts of a DistDGL job leave on a host: processes, shared memory, temporary files.

Processes are known by a variable of their environment, which everything they start inherits: samplers whose trainer was
killed, and what has left its process group, are found too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

SHM_VARIABLE = "DGL_HYBRID_SHM_PREFIX"
SHM_FOLDER = Path("/dev/shm")
KILL_TIMEOUT_S = 8.0
TRACKER_GRACE_S = 2.0
_MULTIPROCESSING = ("sem.mp-", "torch_")
_MAPPED_SHM = re.compile(rb" (\d+) +/dev/shm/")
_TURN_S = 0.02
LONGEST_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Of a folder in which `multiprocessing` makes its sockets, whose addresses have 107 bytes at most. In a longer one
samplers lose what they send, and trainers wait for it for half an hour."""


def temporary_folder(shm_prefix: str) -> Path:
    """Returns the folder for temporary files of the machine with this prefix, on this host."""
    return Path(tempfile.gettempdir(), f"{shm_prefix}files")


def find_processes(shm_prefix: str) -> list[int]:
    """Returns the processes of the machine with this prefix, zombies left out."""
    wanted = f"\0{SHM_VARIABLE}={shm_prefix}\0".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted in b"\0" + Path("/proc", entry, "environ").read_bytes() + b"\0":
                    found.append(int(entry))
    return found


def send_signal(processes: list[int], number: signal.Signals) -> None:
    """Sends a signal to those that still are there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def find_shared_memory(processes: list[int]) -> set[str]:
    """Returns the names of semaphores and tensors that `multiprocessing` gave these processes; seen while they live."""
    inodes: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path("/proc", str(process), "maps").read_bytes()
            inodes.update(map(int, _MAPPED_SHM.findall(maps)))
    names: set[str] = set()
    for entry in os.scandir(SHM_FOLDER):
        with contextlib.suppress(OSError):
            # By inode: a semaphore is made under another name, which its maker's map goes on to show.
            if entry.name.startswith(_MULTIPROCESSING) and entry.inode() in inodes:
                names.add(entry.name)
    return names


def remove_everything(shm_prefix: str, shared_memory: set[str]) -> None:
    """Kills all processes of a machine, then removes their shared memory and the folder of temporary files.

    Args:
        shm_prefix: Of the machine.
        shared_memory: Names from `find_shared_memory` of processes that may be gone by now.
    """
    names = set(shared_memory)
    # `multiprocessing` has a process of its own that removes semaphores once their users are gone: it goes last.
    give_up = time.monotonic() + KILL_TIMEOUT_S
    killed: set[int] = set()
    while time.monotonic() < give_up:  # a process may be inside a system call that does not return
        others = [process for process in find_processes(shm_prefix) if not is_resource_tracker(process)]
        if not others and not any(map(_is_ending, killed)):
            break
        names |= find_shared_memory(others)
        send_signal(others, signal.SIGKILL)
        killed.update(others)
        time.sleep(_TURN_S)
    deadline = time.monotonic() + TRACKER_GRACE_S
    seen: set[int] = set()
    while (trackers := find_processes(shm_prefix)) or any(map(_is_ending, seen)):
        seen.update(trackers)
        if time.monotonic() > deadline:
            send_signal(trackers, signal.SIGKILL)
        if time.monotonic() > deadline + TRACKER_GRACE_S:
            break
        time.sleep(_TURN_S)
    for pattern in (f"{shm_prefix}*", f"sem.{shm_prefix}*"):
        names.update(path.name for path in SHM_FOLDER.glob(pattern))
    for name in names:
        (SHM_FOLDER / name).unlink(missing_ok=True)
    shutil.rmtree(temporary_folder(shm_prefix), ignore_errors=True)


def _is_ending(process: int) -> bool:
    """Tells whether a process that ends still holds its ports and files: its environment goes before them."""
    try:
        state = Path("/proc", str(process), "stat").read_text("ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def is_resource_tracker(process: int) -> bool:
    """Tells whether a process is the one that `multiprocessing` starts to remove what its users leave."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path("/proc", str(process), "cmdline").read_bytes()
    return False
