# SPDX-License-Identifier: Apache-2.0
"""The lines of ip_config.txt, and ports; what controller and agents say; what is found of a job's processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch import leftovers, messages
from dgl_hybrid.launch import machines as machines_module
from dgl_hybrid.launch.agent import _line, listening_ports, part_environment
from dgl_hybrid.launch.machines import (
    Machine,
    find_free_ports,
    find_interface,
    ip_config_text,
    is_local_address,
    local_machines,
    read_ip_config,
    why_port_unusable,
    write_ip_config,
)
from tests.launch.jobs import is_alive


def test_ip_config_is_read_as_dgl_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "ip_config.txt"
    file.write_text("10.0.0.1 30100\n10.0.0.2\n")
    machines = read_ip_config(file, 2)
    assert machines == (
        Machine(machine_id=0, address="10.0.0.1", port=30100),
        Machine(machine_id=1, address="10.0.0.2", port=30050),
    )
    assert str(machines[1]) == "machine 1 (10.0.0.2)"
    file.write_text(ip_config_text(machines))
    assert read_ip_config(file, 2) == machines


def test_generated_machines_do_not_share_ports(tmp_path: Path) -> None:
    machines = local_machines(20, 50)
    ports = [port for machine in machines for port in range(machine.port, machine.port + 50)]
    assert len(set(ports)) == 1000
    assert len(read_ip_config(write_ip_config(tmp_path / "i.txt", 3, num_servers=2), 3)) == 3


def test_ports_in_use_are_seen_and_not_given_away() -> None:
    first = find_free_ports("127.0.0.1", 3)
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= first <= high
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", first))
        assert first not in listening_ports()
        sock.listen()
        assert first in listening_ports()
        assert why_port_unusable("127.0.0.1", first) == f"port {first} of 127.0.0.1 is already in use"
    assert why_port_unusable("127.0.0.1", first) is None
    with pytest.raises(LaunchError, match="no 100000 free ports in a row were found"):
        find_free_ports("127.0.0.1", 100_000)


def test_addresses() -> None:
    assert is_local_address("127.0.0.1")
    assert is_local_address("localhost")
    assert not is_local_address("192.0.2.1")  # kept for documentation: nobody's
    assert why_port_unusable("192.0.2.1", 30050) == "192.0.2.1 is not an address of this host"
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.1") is None


def test_addresses_beside_an_interfaces_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it count that an address can be bound: with `ip_nonlocal_bind` every one can."""
    here = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "eth0": [
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1"),
            *(SimpleNamespace(family=socket.AF_INET, address=address) for address in ("10.0.0.5", "10.0.0.6")),
        ],
    }
    monkeypatch.setattr(machines_module.psutil, "net_if_addrs", lambda: here)
    monkeypatch.setattr(machines_module, "why_port_unusable", lambda address, port: None)
    assert [find_interface(f"10.0.0.{last}") for last in (5, 6, 7)] == ["eth0", "eth0", None]
    assert is_local_address("10.0.0.6")
    assert not is_local_address("10.0.0.7")
    assert find_interface("127.0.1.1") == "lo"


def test_of_a_progress_bar_there_is_what_it_ended_with() -> None:
    """Hundreds of its states were one line, and the error before them was not shown."""
    part: Any = SimpleNamespace(name="trainer 0")
    states = {b"\r  1%\r  2%\r100%\r": "100%", b"plain\r": "plain", b"": "", b"a\xff": "a\ufffd"}
    for written, expected in states.items():
        assert _line(part, written, is_error=False).text == expected


def test_an_environment_without_what_others_left() -> None:
    inherited = {"PATH": "/bin", "RANK": "3", "TORCHELASTIC_RUN_ID": "x", "DGL_ROLE": "server", "HOME": "/h"}
    assert part_environment(inherited, {"RANK": "0", "HOME": "/g"}) == {"PATH": "/bin", "HOME": "/g", "RANK": "0"}


def test_messages_arrive_as_they_were_sent() -> None:
    sent = [
        messages.Line(part="trainer 0", is_error=True, text="two\nlines \x1e and ü"),
        messages.Exited(part="server 1", code=-9),
        messages.Cleaned(),
        messages.StartPart(name="trainer 0", environment={"A": "b"}),
    ]
    stream = b"Welcome\r\n" + b"".join(map(messages.encode, sent))
    splitter = messages.LineSplitter()
    lines = [line for at in range(len(stream)) for line in splitter.feed(stream[at : at + 1])]
    assert splitter.flush() == []
    assert [messages.decode(line) for line in lines] == [None, *sent]


def test_lines_without_end_are_cut_and_flushed() -> None:
    splitter = messages.LineSplitter(max_length=4)
    assert splitter.feed(b"ab\ncd") == [b"ab"]
    assert splitter.feed(b"efg") == [b"cdefg"]
    assert splitter.feed(b"h") == []
    assert splitter.flush() == [b"h"]


def start_child(prefix: str, code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DGL_HYBRID_SHM_PREFIX": prefix}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_only_a_machines_own_processes_are_found(tmp_path: Path) -> None:
    """One whose prefix begins like ours is another's; ours are found wherever they went, and all is removed."""
    ours, others = f"dgh_test_{os.getpid()}_1_", f"dgh_test_{os.getpid()}_11_"
    code = (
        "import multiprocessing, os, subprocess, time\n"
        "semaphore = multiprocessing.get_context('spawn').Semaphore()\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    mine, stranger = (
        start_child(ours, code),
        start_child(others, "print('ready', flush=True)\nimport time; time.sleep(600)"),
    )
    try:
        found = leftovers.find_processes(ours)
        assert mine.pid in found
        assert len(found) == 3, "the sleeper in a session of its own, and the tracker of semaphores"
        assert stranger.pid not in found
        semaphores = leftovers.find_shared_memory(found)
        assert len(semaphores) == 1
        kept, removed = leftovers.SHM_FOLDER / f"{others}x", leftovers.SHM_FOLDER / f"{ours}x"
        pool = leftovers.SHM_FOLDER / f"sem.{ours}x"
        folder = leftovers.temporary_folder(ours)
        folder.mkdir()
        for path in (kept, removed, pool, folder / "x"):
            path.touch()
        begun_s = time.monotonic()
        leftovers.remove_everything(ours, set())
        mine.wait()
        assert time.monotonic() - begun_s < 10
        assert leftovers.find_processes(ours) == []
        assert [path for path in (removed, pool, folder) if path.exists()] == []
        assert not (leftovers.SHM_FOLDER / next(iter(semaphores))).exists()
        assert is_alive(stranger.pid)
        assert kept.exists()
        kept.unlink()
    finally:
        for process in (mine, stranger):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize("is_tracker", [False, True])
def test_nothing_is_called_removed_that_still_ends(is_tracker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes a process's environment, by which it is found, before its ports and files."""
    ours = f"dgh_test_{os.getpid()}_2_"
    mine = start_child(ours, "print('ready', flush=True)\nimport time; time.sleep(600)")
    looked: list[int] = []

    def find(shm_prefix: str) -> list[int]:
        looked.append(len(looked))
        if len(looked) == 5:
            mine.kill()
        return [mine.pid] if len(looked) <= 2 else []

    monkeypatch.setattr(leftovers, "find_processes", find)
    monkeypatch.setattr(leftovers, "is_resource_tracker", lambda process: is_tracker)
    monkeypatch.setattr(leftovers, "send_signal", lambda processes, number: None)
    try:
        leftovers.remove_everything(ours, set())
        assert not is_alive(mine.pid)
        assert len(looked) >= 5
    finally:
        mine.kill()
        mine.wait()
        assert mine.stdout is not None
        mine.stdout.close()


def test_the_beginning_of_a_message_is_noise() -> None:
    """Of an agent that was killed while it wrote: the loss of it is to be told, not the fault in its last line."""
    whole = messages.encode(messages.Exited(part="server 1", code=-9))
    assert messages.decode(whole) is not None
    assert messages.decode(whole[:-8]) is None


def test_a_message_may_follow_what_a_login_shell_has_said() -> None:
    message = messages.Exited(part="server 1", code=-9)
    assert messages.decode(b"Last login: today, " + messages.encode(message)) == message
