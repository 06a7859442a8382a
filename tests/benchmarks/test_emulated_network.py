# SPDX-License-Identifier: Apache-2.0
"""The emulated network's commands; where namespaces can be made, that traffic is limited and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.emulated_network import (
    EmulatedNetwork,
    enter_command,
    host_address,
    join_commands,
    shape_commands,
    why_unavailable,
)

ROOT = Path(__file__).resolve().parents[2]


def test_every_host_is_joined_to_the_switch() -> None:
    commands = [" ".join(command) for command in join_commands(50, [61, 62, 63])]
    assert commands[0] == "nsenter -t 50 -n -- ip link add bridge type bridge"
    for index, pid in enumerate((61, 62, 63)):
        assert f"nsenter -t 50 -n -- ip link add port{index} type veth peer name eth0 netns {pid}" in commands
        assert f"nsenter -t 50 -n -- ip link set port{index} master bridge up" in commands
        assert f"nsenter -t {pid} -n -- ip addr add {host_address(index)}/24 dev eth0" in commands
        assert f"nsenter -t {pid} -n -- ip link set eth0 up" in commands
    assert len({host_address(index) for index in range(250)}) == 250
    # Nothing is done in the namespace of this process.
    assert all(command.startswith("nsenter -t ") for command in commands)


def test_both_directions_of_every_link_are_limited() -> None:
    commands = shape_commands(50, [61, 62], 200_000_000)
    assert [(command[: len(enter_command(0))], command[9]) for command in commands] == [
        (enter_command(61), "eth0"),
        (enter_command(50), "port0"),
        (enter_command(62), "eth0"),
        (enter_command(50), "port1"),
    ]
    assert {" ".join(command[10:]) for command in commands} == {"root tbf rate 200000000bit burst 65536 latency 20ms"}
    # A faster link needs a longer burst, since timers fire no faster.
    (fast, _) = shape_commands(50, [61], 1_000_000_000)
    assert " ".join(fast[10:]) == "root tbf rate 1000000000bit burst 250000 latency 20ms"
    assert all("tbf" not in command for command in shape_commands(50, [61, 62], None))


def test_number_of_hosts_is_checked() -> None:
    with pytest.raises(ValueError, match=r"1\.\.250 \(got 0\)"):
        EmulatedNetwork(num_hosts=0)


@pytest.fixture
def _needs_namespaces() -> None:
    why = why_unavailable()
    if why is not None:
        pytest.skip(f"network namespaces: {why}")


@pytest.mark.usefixtures("_needs_namespaces")
def test_links_carry_no_more_than_their_rate() -> None:
    with EmulatedNetwork(num_hosts=2) as network:
        network.shape(20_000_000)
        slow = network.measure_bits_per_s(expected_bits_per_s=20_000_000)
        assert 2_000_000 < slow < 21_000_000
        network.shape(None)
        # Ten times the former limit: even a busy machine carries that.
        assert network.measure_bits_per_s(expected_bits_per_s=200_000_000) > 2 * slow


@pytest.mark.usefixtures("_needs_namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_namespaces_end_with_their_maker(number: signal.Signals) -> None:
    program = (
        "import time; from benchmarks.emulated_network import EmulatedNetwork\n"
        "with EmulatedNetwork(num_hosts=2) as n: print(*(h.pid for h in n.hosts), flush=True); time.sleep(60)"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert maker.stdout is not None
    holders = [int(word) for word in maker.stdout.readline().split()]
    assert len(holders) == 2
    maker.send_signal(number)
    maker.wait(timeout=300)
    maker.stdout.close()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in holders):
        assert time.monotonic() < deadline, "holders of namespaces were left"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and os.path.exists(f"/proc/{pid}/ns/net")
