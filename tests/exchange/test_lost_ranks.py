# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed: its peers learn it at once, and nothing of what they shared stays on the host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.emulated_network import EmulatedNetwork, why_unavailable
from dgl_hybrid.exchange import transport
from tests.exchange.lost_ranks import LOST_AT, WORLD_SIZE

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def leftovers(folder: Path) -> list[str]:
    """Sockets that the ranks had, and files of shared memory; other jobs on this host may have their own."""
    addresses = [path.name.removeprefix("address_").replace("_", "/") for path in folder.glob("address_*")]
    assert len(addresses) == WORLD_SIZE
    listed = Path("/proc/net/unix").read_text().replace("_", "/")
    files = [name for name in os.listdir("/dev/shm") if "dgl_hybrid_outbox" in name]
    return [address for address in addresses if address in listed] + files


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_that_does_not_answer_keeps_no_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0's host stands still, its peers waited for it once more, to be told that it is late."""
    server = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        monkeypatch.setattr(transport.dist.distributed_c10d, "_get_default_store", lambda: store)
        waiting = object.__new__(transport.CollectiveTransport)
        waiting.rank, waiting.world_size, waiting.elsewhere = 1, 2, {}
        assert waiting.find_late_ranks("a name", "an exchange") == [0]
        server.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(transport, "_STORE_TIMEOUT_S", 0.5)
        start_s = time.monotonic()
        assert waiting.find_late_ranks("another", "an exchange") == []
        assert time.monotonic() - start_s < 60.0, "it would have been for ever"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    "way",
    [
        *("amid an exchange", "while it grows its memory", "with the store"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("amid the probe", "between exchanges", "with a child")),
    ],
)
def test_peers_of_a_killed_rank_are_told_at_once(way: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.exchange.lost_ranks", str(rank), str(tmp_path), way],
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        if (tmp_path / "child").exists():
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    victim = 0 if way == "with the store" else 1
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(WORLD_SIZE)]
    ended_s = float((tmp_path / "end").read_text())
    for rank in {0, 1, 2} - {victim}:
        answer = json.loads((tmp_path / f"rank{rank}").read_text())
        # Who had been told of this exchange before, finishes it and learns it in the next.
        calls = [LOST_AT, LOST_AT + 1] if way == "amid an exchange" else [LOST_AT]
        lost = [f"exchange {call} (layer 2, forward) did not complete" for call in calls]
        if way == "amid the probe":
            lost = ["the probe did not complete"]
        if way == "with the store":
            lost = [f"gather did not complete on rank {rank} of {WORLD_SIZE}: rank 0 did not take part."]
        assert any(words in answer["said"] for words in lost)
        assert f"rank {victim}" in answer["said"]
        assert "has ended" in answer["said"] or way == "with the store"
        assert answer["at_s"] - ended_s < 10.0 + (transport._STORE_TIMEOUT_S if way == "with the store" else 0.0)
    deadline = time.monotonic() + 5
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)  # what a killed process had is closed soon, not at once
    assert not leftovers(tmp_path)


CHOOSE = """
import sys, torch.distributed as dist
from dgl_hybrid.exchange.connect import create_communicator
rank, world_size = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/rendezvous", rank=rank, world_size=world_size)
communicator = create_communicator()
received = communicator.exchange_counts([rank * world_size + peer for peer in range(world_size)])
print(communicator.backend, *received)
dist.barrier()
"""


@pytest.mark.parametrize(("ranks_per_host", "backend"), [(1, "gloo"), (2, "mixed")])
def test_hosts_of_an_emulated_network_do_not_share_memory(ranks_per_host: int, backend: str, tmp_path: Path) -> None:
    """They are one host in all but their network, which a benchmark of networks is about; several ranks of one do."""
    world_size = 2 * ranks_per_host
    why = why_unavailable()
    if why is not None:
        pytest.skip(f"network namespaces: {why}")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(EmulatedNetwork(num_hosts=2))
        ranks = [
            subprocess.Popen(
                [*network.hosts[rank // ranks_per_host].prefix, sys.executable, "-c", CHOOSE, *arguments],
                cwd=ROOT,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
            for arguments in [[str(rank), str(tmp_path), str(world_size)]]
        ]
        for process in ranks:
            stack.callback(process.kill)
        answers = [process.communicate(timeout=600)[0].split() for process in ranks]
    sent = [[str(sender * world_size + rank) for sender in range(world_size)] for rank in range(world_size)]
    assert answers == [[backend, *counts] for counts in sent]
