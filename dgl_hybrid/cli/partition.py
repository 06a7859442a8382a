# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid partition`: writes a partition folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dgl_hybrid.cli.common import RunConfig, add_common_options, print_config
from dgl_hybrid.cli.options import add_config_options, resolve
from dgl_hybrid.cli.tables import make_console
from dgl_hybrid.launch.step_bar import step_bar
from dgl_hybrid.launch.workspace import (
    DataConfig,
    PartitionConfig,
    describe,
    load_graph,
    prepare_partition,
    write_partition,
)

CONFIGS = (DataConfig, PartitionConfig, RunConfig)
WITHOUT = {
    "partition": "a partition is made here, not read; name the new one with --out",
    "threads": "one process makes the partition, and starts no ranks",
}
"""Fields that are no options here, and why."""
TEXTS = {
    "symmetric": "Add the reverse of every arc; not done unless given. `train --model gcn` does it for graphs that it "
    "partitions itself: give --symmetric --self-loops here for the same.",
    "self_loops": "Give every vertex one self-loop; not done unless given. `train` does it for gcn, gat and gatv2 with "
    "graphs that it partitions itself.",
    "ranks": "Number of parts, one for each rank; 2 if not given.",
    "out": "Folder for the partition; a folder of the workspace, whose name is printed, if not given.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    add_common_options(parser)
    add_config_options(parser, CONFIGS, without=WITHOUT, texts=TEXTS)


def run(args: argparse.Namespace) -> int:
    """Writes the partition to --out, or into the workspace, and says where it is."""
    from dgl_hybrid.partition import read_partition_summary

    configs = resolve(args, CONFIGS, without=WITHOUT)
    if args.print_config:
        return print_config(configs, as_line=args.json)
    data, partition, options = configs
    if options.out is not None and partition.workspace is not None:
        raise ValueError(
            f"--workspace cannot be given with --out: the partition is written to {options.out} and kept nowhere else"
        )
    with step_bar(not args.json) as on_step:
        if options.out is None:
            part_config = prepare_partition(data, partition, on_step=on_step).part_config
        else:
            num_parts = partition.ranks or 2
            dataset, description = load_graph(data, on_step), describe(data, partition, num_parts)
            folder = Path(options.out)
            part_config = write_partition(dataset, num_parts, folder, partition, description, on_step=on_step)
    summary = read_partition_summary(part_config)
    sizes = [end - start for start, end in zip(summary.node_offsets[:-1], summary.node_offsets[1:], strict=True)]
    edges = [end - start for start, end in zip(summary.edge_offsets[:-1], summary.edge_offsets[1:], strict=True)]
    make_console().print(
        f"{summary.part_config}: {summary.num_nodes:,} vertices and {summary.num_edges:,} edges in "
        f"{summary.num_parts} parts; vertices {', '.join(f'{n:,}' for n in sizes)}; in-edges "
        f"{', '.join(f'{n:,}' for n in edges)}",
        soft_wrap=True,
    )
    if args.json:
        record = {"part_config": str(summary.part_config), "num_parts": summary.num_parts, "num_nodes": sizes}
        print(json.dumps({**record, "num_edges": edges}))
    return 0
