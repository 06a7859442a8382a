# SPDX-License-Identifier: Apache-2.0
"""Several hosts on this one: network namespaces joined by a switch, every link limited to a rate.

    with EmulatedNetwork(num_hosts=2) as network:
        network.shape(200_000_000)
        network.measure_bits_per_s()
        subprocess.run([*network.hosts[0].prefix, "python", "script.py"])

Each host has one interface, `eth0`, joined by a veth pair to a bridge in a namespace of its own. `tc … tbf` limits what
leaves a host on its `eth0` and what leaves the switch towards it, so that a link is full duplex and a host which
several others send to gets no more than its rate. No delay is added (kernels of virtual machines often lack `netem`).

No namespace has a name and nothing is added to the namespace of this process: each lives as long as the process that
holds it, and that one ends when its stdin closes, hence with this process whatever ends it, SIGKILL included. Needs
root, iproute2 and util-linux. Shared memory, files and processes of the hosts are those of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
QUEUE_MS = 20
"""What a link's queue may hold before packets are dropped: a switch's buffer."""
_BURST_MS, _SMALLEST_BURST_BYTES = 2, 65536
"""A packet of up to 64 KiB (segmentation offload) must fit into the burst."""
_TEST_PORT, _TEST_BYTES_SHARE = 5201, 1.5
"""A bandwidth test sends what the rate allows in so many seconds."""


class NetworkError(RuntimeError):
    """The namespaces could not be made or shaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedHost:
    """One network namespace."""

    index: int
    pid: int
    """Of the process that holds it."""

    @property
    def address(self) -> str:
        return host_address(self.index)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs the command that follows it on this host."""
        return enter_command(self.pid)


def why_unavailable() -> str | None:
    """Returns why namespaces cannot be made here, None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    try:
        with EmulatedNetwork(num_hosts=1) as network:
            network.shape(1_000_000_000)
    except NetworkError as error:
        return str(error)
    return None


# -------------------------------------------------------------------- commands


def host_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def enter_command(pid: int) -> tuple[str, ...]:
    """Runs what follows it in the network namespace of a process."""
    return ("nsenter", "-t", str(pid), "-n", "--")


def join_commands(switch_pid: int, host_pids: Sequence[int]) -> list[tuple[str, ...]]:
    """Returns the commands that lay a cable from each host to the switch and bring everything up."""
    switch = enter_command(switch_pid)
    commands = [
        (*switch, "ip", "link", "add", "bridge", "type", "bridge"),
        (*switch, "ip", "link", "set", "bridge", "up"),
    ]
    for index, pid in enumerate(host_pids):
        port, host = f"port{index}", enter_command(pid)
        commands += [
            (*switch, *f"ip link add {port} type veth peer name {INTERFACE} netns {pid}".split()),
            (*switch, *f"ip link set {port} master bridge up".split()),
            (*host, "ip", "link", "set", "lo", "up"),
            (*host, *f"ip addr add {host_address(index)}/24 dev {INTERFACE}".split()),
            (*host, *f"ip link set {INTERFACE} up".split()),
        ]
    return commands


def shape_commands(switch_pid: int, host_pids: Sequence[int], bits_per_s: int | None) -> list[tuple[str, ...]]:
    """Returns the commands that limit both directions of every link; None: without limit."""
    commands = []
    for index, pid in enumerate(host_pids):
        for place, device in ((pid, INTERFACE), (switch_pid, f"port{index}")):
            if bits_per_s is None:
                words = f"tc qdisc replace dev {device} root pfifo limit 10000"
            else:
                burst = max(_SMALLEST_BURST_BYTES, bits_per_s * _BURST_MS // 8000)
                words = (
                    f"tc qdisc replace dev {device} root tbf rate {bits_per_s}bit burst {burst} latency {QUEUE_MS}ms"
                )
            commands.append((*enter_command(place), *words.split()))
    return commands


# -------------------------------------------------------------------- the network


class EmulatedNetwork:
    """Hosts and the switch between them, from `__enter__` to `__exit__`."""

    def __init__(self, *, num_hosts: int) -> None:
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"num_hosts must be in 1..250 (got {num_hosts})")
        self._num_hosts = num_hosts
        self._holders: list[subprocess.Popen[bytes]] = []
        self.hosts: tuple[EmulatedHost, ...] = ()

    def __enter__(self) -> EmulatedNetwork:
        try:
            for _ in range(1 + self._num_hosts):
                self._holders.append(_start_holder())
            pids = [holder.pid for holder in self._holders[1:]]
            _run(join_commands(self._holders[0].pid, pids))
        except BaseException:
            self._end()
            raise
        self.hosts = tuple(EmulatedHost(index=index, pid=pid) for index, pid in enumerate(pids))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(timeout=5)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
            assert holder.stderr is not None
            holder.stderr.close()
        self._holders.clear()
        self.hosts = ()

    def shape(self, bits_per_s: int | None) -> None:
        """Limits every link, both ways; None takes the limits away. Connections stay."""
        switch, *hosts = (holder.pid for holder in self._holders)
        _run(shape_commands(switch, hosts, bits_per_s))

    def measure_bits_per_s(self, sender: int = 0, receiver: int = 1, *, expected_bits_per_s: int = 10**9) -> float:
        """Sends over TCP from one host to another for about a second and returns the rate at which it arrived."""
        to, program = self.hosts[receiver], [sys.executable, str(Path(__file__).resolve())]
        num_bytes = int(expected_bits_per_s / 8 * _TEST_BYTES_SHARE)
        receiving = subprocess.Popen(
            [*to.prefix, *program, "receive", to.address, str(num_bytes)], stdout=subprocess.PIPE, text=True
        )
        try:
            sent = subprocess.run(
                [*self.hosts[sender].prefix, *program, "send", to.address, str(num_bytes)], check=False, timeout=120
            )
            answer = receiving.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired as error:
            raise NetworkError(f"the bandwidth test from host {sender} to host {receiver} did not end") from error
        finally:
            receiving.kill()
            receiving.communicate()
        if sent.returncode or receiving.returncode:
            raise NetworkError(f"the bandwidth test from host {sender} to host {receiver} failed")
        return float(answer)


def _start_holder() -> subprocess.Popen[bytes]:
    """Starts a process in a new network namespace that ends when this process closes its stdin or ends."""
    own = os.readlink("/proc/self/ns/net")
    holder = subprocess.Popen(
        ["unshare", "--net", "--", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which still has to end what runs inside
    )
    deadline = time.monotonic() + 10
    while holder.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
                return holder
        time.sleep(0.01)
    holder.kill()
    _, said = holder.communicate()
    raise NetworkError(f"no network namespace could be made: {said.decode(errors='replace').strip() or 'no answer'}")


def _run(commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")


# -------------------------------------------------------------------- the bandwidth test, run inside the namespaces


def _receive(address: str, num_bytes: int) -> float:
    """Returns bits per second from the first byte's arrival to the last one's."""
    with socket.create_server((address, _TEST_PORT)) as server:
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            buffer = bytearray(2**18)
            first = connection.recv_into(buffer)
            start, received = time.perf_counter(), 0
            while first and received + first < num_bytes:
                count = connection.recv_into(buffer)
                if not count:
                    raise NetworkError("the sender left")
                received += count
            return received * 8 / (time.perf_counter() - start)


def _send(address: str, num_bytes: int) -> None:
    with _connected(address) as connection:
        block = bytes(2**18)
        for start in range(0, num_bytes, len(block)):
            connection.sendall(block[: num_bytes - start])


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((address, _TEST_PORT), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            with connection:
                yield connection
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("receive", "send"))
    parser.add_argument("address")
    parser.add_argument("num_bytes", type=int)
    args = parser.parse_args()
    if args.role == "send":
        _send(args.address, args.num_bytes)
    else:
        print(_receive(args.address, args.num_bytes))
