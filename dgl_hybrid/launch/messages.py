# SPDX-License-Identifier: Apache-2.0
"""What the controller of a DistDGL job and its agents say to each other: a JSON line per message, by pipe or ssh."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

MARK = b"\x1e"
"""Begins every message: what login shells print into the same stream does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """To an agent, first: what will run on its machine. It answers `Ready` or `Refused`."""

    machine_id: int
    address: str
    server_ports: dict[str, int]
    """Of each server of this machine, by name."""
    foreign_ports: list[int]
    """Of other machines' servers at this address: nothing else may take them."""
    shm_prefix: str
    """Begins the names of the machine's shared memory; its processes are known by it as well."""
    python: str
    needs_plugin: bool
    """Whether scripts are to run with the plugin, so that the interpreter must load it."""
    needs_fixes: bool
    """Whether the interpreter must load what mends DGL, as another machine of the job is on this host (fix 0011), and
    the script is not known to do so."""
    num_samplers: int
    command: list[str]
    workspace: str
    part_config: str
    ip_config: str | None
    """The file that parts read; None: the agent writes one where they find it."""
    ip_config_text: str
    """What that file has, or is to have, on every host."""
    grace_s: float
    """Between SIGTERM and SIGKILL."""
    silence_timeout_s: float | None
    """The agent ends its parts when it has heard nothing for so long; None: it sees when the controller is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPart:
    """To an agent: start a server or trainer. It answers with `Line`, `Listening`, `Exited`."""

    name: str
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """To an agent: the controller is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """To an agent: end what still runs and clean up. It answers `Cleaned` and ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """From an agent: its parts can be started."""

    cores: int
    host: str
    """Equal for machines that share a host."""
    free_port: int
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that this machine's parts need."""
    partition: str | None = None
    """Digest of the partition's manifest, which has the checksums of all its files; None: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """From an agent: what is wrong here."""

    problems: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """From an agent: a part wrote a line."""

    part: str
    is_error: bool
    """To stderr."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """From an agent: a server has opened its port."""

    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """From an agent: a part has ended. Its lines came before."""

    part: str
    code: int
    """Negative: by that signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """From an agent, last: nothing is left."""


Message = Prepare | StartPart | Ping | End | Ready | Refused | Line | Listening | Exited | Cleaned
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Prepare, StartPart, Ping, End, Ready, Refused, Line, Listening, Exited, Cleaned)
}


def encode(message: Message) -> bytes:
    """Returns the line to send."""
    return MARK + json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Reads a line; None if it is not a message, or but the beginning of one: who wrote it was killed meanwhile.

    What a login shell has said without ending its line may stand before it.
    """
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        kind, fields = json.loads(text)
    except ValueError:
        return None
    return _KINDS[kind](**fields)


class LineSplitter:
    """Cuts a stream of bytes into lines."""

    def __init__(self, max_length: int | None = None) -> None:
        self._rest = b""
        self._max_length = max_length

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, without their ends; one that grows too long is cut."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._max_length is not None and len(self._rest) > self._max_length:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def flush(self) -> list[bytes]:
        """Returns the last line if it had no end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
