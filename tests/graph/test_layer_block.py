# SPDX-License-Identifier: Apache-2.0
"""Blocks on ranks without edges, fields that outlive a scope, copies, and what a block refuses."""

from __future__ import annotations

from pathlib import Path

import dgl
import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.graph.layer_block import LayerBlock
from tests.graph.blocks import (
    ReadsSome,
    loss_of_rows,
    run_copies,
    run_edge_ids,
    run_fields,
    run_id_types,
    run_reads,
    run_reads_some,
    run_user_reduce,
)
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import with_isolated
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


@pytest.fixture(scope="session")
def isolated_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return PartitionStore(Path(tmp_path_factory.mktemp("isolated"))).get("isolated", with_isolated(), 3)


@pytest.mark.parametrize(
    "kind",
    [
        *("overwrite", "two_exchanges", "table_lookup", "dropped_messages", "edge_field", "max_of_edges", "direct_max"),
        *("flattened_messages", "flattened_and_applied", "flattened_edges", "messages_times_outer"),
    ],
)
def test_a_rank_without_edges_takes_part(kind: str, isolated_folder: str) -> None:
    """Also where a function cannot take no edges at all (`h.reshape(len(h), -1)`), and where it cannot take one."""
    results = run_ranks(3, run_user_reduce, isolated_folder, kind, timeout=120)
    assert results[0]["edges"] == 0
    assert all(result["edges"] > 0 for result in results[1:])
    for result in results:
        assert result["events"] == results[0]["events"]
        assert result["of_nothing"] == 0.0
        assert result["random_calls"] == results[0]["random_calls"]
        with_edges = ("edge_field", "direct_max", "flattened_messages", "messages_times_outer")
        assert result["edge_grad"] == (kind in with_edges)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    "kind", ["one_of_two_dtypes", "two_fields_of_two_ends", "no_gradient", "writes_in_place", "parameter_alone"]
)
def test_a_rank_without_edges_returns_gradients_of_what_is_read_alone(
    kind: str, is_checkpointed: bool, isolated_folder: str
) -> None:
    """It took part in exchanges of gradients for fields that no function reads, which nobody else begins.

    Nor may it run anything of a checkpointed layer again to find out: its exchanges would be this rank's alone.
    """
    results = run_ranks(3, run_reads_some, isolated_folder, kind, is_checkpointed=is_checkpointed, timeout=60)
    graph, model = with_isolated(), ReadsSome(kind)
    x = graph.ndata["feat"].clone().requires_grad_()
    y = model(graph, x)
    seeds = torch.cat([result.seeds for result in results])
    if y.requires_grad:
        loss_of_rows(y[seeds], seeds).backward()

    assert [result.num_edges > 0 for result in results] == [False, True, True]
    assert [result.requires_grad for result in results] == [kind != "no_gradient"] * 3
    assert [result.events for result in results] == [results[0].events] * 3
    expected = {"input": x.grad, "weight": model.linear.weight.grad}
    for name, gradient in expected.items():
        shares = [result.gradients[name] for result in results]
        if gradient is None:
            assert not any(isinstance(share, Tensor) for share in shares), name
            continue
        total = torch.zeros_like(gradient)
        for result, share in zip(results, shares, strict=True):
            assert isinstance(share, Tensor), name
            rows = result.input_ids if name == "input" else torch.arange(len(total))
            total.index_add_(0, rows, share)
        assert_close(total, gradient, f"gradient of the {name}")


@pytest.mark.parametrize(
    "run", [run_fields, run_copies, run_reads, run_edge_ids, run_id_types], ids=lambda run: run.__name__
)
def test_what_is_kept_and_what_is_not(run: object, folder: str) -> None:
    for checks in run_ranks(3, run, folder):  # type: ignore[arg-type]
        assert all(checks.values()), checks  # type: ignore[attr-defined]


def lone_block() -> LayerBlock:
    """Two destinations, three sources, one rank."""
    none = torch.empty(0, dtype=torch.int64)
    plan = ExchangePlan(
        rank=0, world_size=1, layer=1, num_rows=3, send_index=none, send_counts=(0,), recv_counts=(0,), recv_global=none
    )
    structure = LayerStructure(
        layer=1,
        num_dst=2,
        num_held=3,
        indptr=torch.tensor([0, 2, 3]),
        indices=torch.tensor([1, 2, 0]),
        exchange=plan,
    )
    return LayerBlock(
        structure,
        Communicator(None),
        rows_global=torch.arange(3),
        out_degrees=torch.tensor([5, 6, 7]),
        device=torch.device("cpu"),
    )


def test_degrees_and_sizes() -> None:
    block = lone_block()
    assert (block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()) == (3, 2, 3)
    assert block.in_degrees().tolist() == [2, 1]
    assert block.out_degrees().tolist() == [5, 6, 7]
    assert block.out_degrees(torch.tensor([2])).tolist() == [7]
    assert block.int().out_degrees().dtype == block.int().in_degrees().dtype == torch.int32
    assert block["_E"] is block


def test_degrees_are_the_callers_own() -> None:
    """Layers change them in place; all layers and epochs had the same tensor."""
    block = lone_block()
    for degrees in (block.in_degrees(), block.out_degrees(), block.out_degrees(slice(0, 2))):
        degrees += 1
    assert block.in_degrees().tolist() == [2, 1]
    assert block.out_degrees().tolist() == [5, 6, 7]
    known = lone_block()
    known._degrees.known_of_destinations = torch.tensor([9, 8])
    degrees = known.in_degrees()
    degrees.clamp_(max=3)
    assert known.in_degrees().tolist() == [9, 8]


def test_sources_and_destinations_are_asked_for_alike() -> None:
    """`srcnodes` was a method: `srcnodes[ntype]` failed where `dstnodes[ntype]` did not."""
    block = lone_block()
    for ntype in ("_N", None):
        block.srcnodes[ntype].data["h"] = torch.ones(3, 1)
        block.dstnodes[ntype].data["h"] = torch.zeros(2, 1)
        assert block.srcnodes[ntype].data["h"] is block.srcdata["h"]
        assert block.dstnodes[ntype].data["h"] is block.dstdata["h"]
    assert block.srcnodes[:].data[dgl.NID].tolist() == block.srcnodes().tolist() == block.srcnodes("_N").tolist()
    assert block.int().srcnodes().dtype == torch.int32
    with pytest.raises(BlockError, match="must have 3 rows"):
        block.srcnodes["_N"].data["h"] = torch.ones(2, 1)
    with pytest.raises(BlockError, match=r"rank 0 of 1, layer 1\): take `srcdata\[name\]`"):
        _ = block.srcnodes[torch.tensor([0])]
    for nodes in (block.srcnodes, block.dstnodes):
        with pytest.raises(dgl.DGLError, match="made_up"):
            _ = nodes["made_up"]
        with pytest.raises(dgl.DGLError, match="made_up"):
            nodes("made_up")


@pytest.mark.parametrize(
    ("name", "words"),
    [("ndata", "SGConv"), ("edges", "apply_edges"), ("out_edges", "full-graph degrees"), ("subgraph", "update_all")],
)
def test_what_cannot_be_exact_is_refused(name: str, words: str) -> None:
    with pytest.raises(BlockError, match=words):
        getattr(lone_block(), name)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="made_up"):
        _ = lone_block().made_up  # type: ignore[attr-defined]


def test_source_fields_have_one_row_for_each_row_held() -> None:
    block = lone_block()
    with pytest.raises(BlockError, match="must have 3 rows"):
        block.srcdata["h"] = torch.ones(2, 1)
    with pytest.raises(TypeError, match="must be a tensor"):
        block.srcdata["h"] = [1.0, 2.0, 3.0]  # type: ignore[assignment]
    with pytest.raises(BlockError, match="'h' is not set"):
        block.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "y"))
    with pytest.raises(BlockError, match="some edges only"):
        block.apply_edges(dgl.function.copy_e("w", "m"), edges=torch.tensor([0]))
