# SPDX-License-Identifier: Apache-2.0
"""An unchanged DistDGL script that never heard of dgl_hybrid runs under current PyTorch: server, trainer, sampler."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import dgl
import pytest
import torch

SCRIPT = Path(__file__).with_name("distdgl_script.py")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize("num_samplers", [0, 1])
def test_unchanged_script_trains(tmp_path: Path, num_samplers: int) -> None:
    """The server and the sampler (a spawned process) need DGL mended as much as the trainer does."""
    torch.manual_seed(0)
    graph = dgl.rand_graph(64, 400)
    graph.ndata["feat"] = torch.randn(64, 4)
    graph.ndata["label"] = torch.arange(64) % 3
    graph.ndata["train_mask"] = torch.arange(64) < 48
    dgl.distributed.partition_graph(graph, "tiny", 1, str(tmp_path))
    ip_config = tmp_path / "ip_config.txt"
    ip_config.write_text(f"127.0.0.1 {free_port()}\n")
    environment = os.environ | {
        "DGL_DIST_MODE": "distributed",
        "DGL_NUM_SERVER": "1",
        "DGL_NUM_CLIENT": str(1 + num_samplers),
        "DGL_NUM_SAMPLER": str(num_samplers),
        "DGL_IP_CONFIG": str(ip_config),
        "DGL_CONF_PATH": str(tmp_path / "tiny.json"),
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_SERVER_ID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        # Dated calls of DGL's Python side show here. Not plain `error`: warnings from C++ have no module to mend.
        "PYTHONWARNINGS": "error::FutureWarning,error::ResourceWarning",
    }
    command = [sys.executable, str(SCRIPT), str(ip_config), str(tmp_path / "tiny.json")]
    outputs = {role: tmp_path / f"{role}.txt" for role in ("server", "client")}
    processes = {}
    try:
        for role, output in outputs.items():
            with output.open("w") as file:
                processes[role] = subprocess.Popen(
                    command, env=environment | {"DGL_ROLE": role}, stdout=file, stderr=subprocess.STDOUT
                )
        codes = {role: process.wait(timeout=600) for role, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    told = "\n".join(f"-- {role}\n{output.read_text()[-3000:]}" for role, output in outputs.items())
    assert codes == {"server": 0, "client": 0}, told
    assert "trained 6 batches" in outputs["client"].read_text(), told
