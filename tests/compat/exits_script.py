# SPDX-License-Identifier: Apache-2.0
"""A DistDGL job in which something fails; arguments: `on` or `off`, what fails."""

from __future__ import annotations

import atexit
import os
import signal
import sys

import dgl
import torch

from dgl_hybrid.compat import repairs


class FailingSampler(dgl.dataloading.NeighborSampler):
    """Fails, or is killed, at its second batch."""

    def __init__(self, how: str) -> None:
        super().__init__([2])
        self.how = how
        self.num_batches = 0

    def sample_blocks(self, g: object, seed_nodes: object, exclude_eids: object = None) -> object:
        self.num_batches += 1
        if self.num_batches == 2 and self.how == "sampler-raises":
            raise ValueError("the sampler does not like this batch")
        if self.num_batches == 2 and self.how == "sampler-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample_blocks(g, seed_nodes, exclude_eids)


if "on" in sys.argv:
    repairs.switch_on()  # here, for samplers: they import this module and do not run main()


def main() -> None:
    how = sys.argv[2]
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    if leave := getattr(dgl.distributed.dist_context, "_leave_if_failed", None):
        atexit.unregister(leave)  # as in a job that another launcher has started
    rank = int(os.environ["RANK"])
    g = dgl.distributed.DistGraph("repairs", part_config=os.environ["DGL_CONF_PATH"])
    rows = dgl.distributed.DistTensor((g.num_nodes(), 2), torch.float32, "rows")  # deleted by all trainers together
    loader = dgl.dataloading.DistNodeDataLoader(g, torch.arange(200), FailingSampler(how), batch_size=10)
    num_batches = sum(1 for _ in loader) if rank == 1 or how == "nothing" else 0
    g.barrier()
    if rank == 1 and how == "trainer-raises":
        raise ValueError("the trainer does not like this epoch")
    if how != "nothing":
        g.barrier()  # without end: the other trainer is gone
    print(f"ended well after {num_batches} batches, {rows.shape[0]} rows", flush=True)


if __name__ == "__main__":
    main()
