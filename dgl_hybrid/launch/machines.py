# SPDX-License-Identifier: Apache-2.0
"""The machines of a DistDGL job: the lines of `ip_config.txt`, and ports for jobs that need none written down.

A *machine* is one line, hence one partition; several may share a host.
"""

from __future__ import annotations

import ipaddress
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from dgl_hybrid.errors import LaunchError

LOOPBACK_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 30050
"""What DGL takes when a line names no port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One line of `ip_config.txt`."""

    machine_id: int
    """The line's number from 0; DGL's machine k serves partition k."""
    address: str
    port: int
    """Of its first server; the next ones take the ports that follow."""

    def __str__(self) -> str:
        return f"machine {self.machine_id} ({self.address})"


def read_ip_config(path: Path, num_parts: int) -> tuple[Machine, ...]:
    """Reads the file that DGL reads: an IPv4 address and perhaps a port on each line.

    Raises:
        LaunchError: It cannot be read, a line is not of that form, or there is not one for each partition.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"ip_config {path} cannot be read: {reason}") from error
    machines = []
    for machine_id, line in enumerate(lines):
        words = line.split()
        if len(words) not in (1, 2) or (len(words) == 2 and not _is_port(words[1])):
            raise LaunchError(
                f"{path}, line {machine_id + 1}: expected an address and perhaps a port (got {line!r}). "
                "DGL reads every line as a machine: empty ones and comments are not allowed."
            )
        if not _is_address(words[0]):
            raise LaunchError(
                f"{path}, line {machine_id + 1}: expected an IPv4 address such as 10.0.0.1 (got {words[0]!r}). DGL's "
                "servers listen on no others, and look up no names."
            )
        port = int(words[1]) if len(words) == 2 else DEFAULT_PORT
        machines.append(Machine(machine_id=machine_id, address=words[0], port=port))
    if len(machines) != num_parts:
        raise LaunchError(
            f"{path} names {len(machines)} machines, but the graph has {num_parts} partitions. "
            "Write one line per partition, or partition the graph anew."
        )
    return tuple(machines)


def local_machines(num_machines: int, num_servers: int) -> tuple[Machine, ...]:
    """Returns machines of this host on loopback, each with `num_servers` free ports in a row."""
    taken: set[int] = set()
    machines = []
    for machine_id in range(num_machines):
        port = find_free_ports(LOOPBACK_ADDRESS, num_servers, avoid=taken)
        taken.update(range(port, port + num_servers))
        machines.append(Machine(machine_id=machine_id, address=LOOPBACK_ADDRESS, port=port))
    return tuple(machines)


def ip_config_text(machines: tuple[Machine, ...]) -> str:
    """Returns what `ip_config.txt` says about these machines."""
    return "".join(f"{machine.address} {machine.port}\n" for machine in machines)


def write_ip_config(path: Path, num_machines: int, *, num_servers: int = 1) -> Path:
    """Writes an `ip_config.txt` for machines that all are this host, with ports that are free now."""
    path.write_text(ip_config_text(local_machines(num_machines, num_servers)), encoding="utf-8")
    return path


def find_free_ports(address: str, count: int = 1, *, avoid: set[int] | frozenset[int] = frozenset()) -> int:
    """Returns the first of `count` ports in a row that are free on a local address.

    They lie outside the range from which the kernel serves outgoing connections: a port that is free now is used
    seconds later only, when a process has imported DGL.

    Raises:
        LaunchError: None were found.
    """
    low, high = _ports_to_choose_from()
    for _ in range(200 if count <= high - low else 0):
        port = random.randint(low, high - count)
        ports = range(port, port + count)
        if not avoid.intersection(ports) and all(why_port_unusable(address, one) is None for one in ports):
            return port
    raise LaunchError(f"no {count} free ports in a row were found on {address} between {low} and {high}")


def why_port_unusable(address: str, port: int) -> str | None:
    """Returns why a server could not listen there, None if it could."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return f"{address} cannot be resolved: {error.strerror}"
    with socket.socket(family, kind, protocol) as sock:
        # As servers do it: connections of an earlier run that linger in TIME_WAIT are no obstacle.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
            sock.listen(1)
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                return f"port {port} of {address} is already in use"
            if error.errno == 99:  # EADDRNOTAVAIL
                return f"{address} is not an address of this host"
            return f"port {port} of {address} cannot be used: {error.strerror}"
    return None


def is_local_address(address: str) -> bool:
    """Tells whether an address is this host's. Not by binding, which some hosts let succeed for any address."""
    return find_interface(address) is not None


def find_interface(address: str) -> str | None:
    """Returns the network interface of this host that has an address, None if none has. Of use to gloo, which guesses
    one by the host's name, often wrongly.
    """
    try:
        wanted = socket.gethostbyname(address)
    except OSError:
        return None
    if wanted.startswith("127."):
        wanted = LOOPBACK_ADDRESS  # the others of that network are nowhere written down
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == wanted for one in addresses):
            return str(name)
    return None


def _is_address(word: str) -> bool:
    try:
        ipaddress.IPv4Address(word)
    except ValueError:
        return False
    return True


def _is_port(word: str) -> bool:
    return word.isdecimal() and 0 < int(word) < 2**16


def _ports_to_choose_from() -> tuple[int, int]:
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = 32768
    return (15000, first_ephemeral) if first_ephemeral > 20000 else (15000, 2**16)
