# SPDX-License-Identifier: Apache-2.0
"""PipeGCN (github.com/GATECH-EIC/PipeGCN) without its pipeline (hence exact), first layer precomputed; user's checkout.

Its training loop prints and does not return, so it is followed here step by step with its own parts. It is written for
CUDA; on the CPU its streams, events and pinned buffers have nothing to do, and stand-ins take their place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.systems.adaptors.base import (
    PATIENCE,
    Epoch,
    Sample,
    Stopwatch,
    System,
    mean_over_ranks,
    original_ids,
    pick_logits,
    sample_ids,
    sketch,
)
from dgl_hybrid.partition import load_partition


class PipeGCN(System):
    """GraphSAGE with mean aggregation, which is the model it has; the same function of the same weights as DGL's."""

    def join(self) -> None:
        dist.init_process_group("gloo", timeout=PATIENCE)

    def prepare(self) -> dict[str, Any]:
        job = self.job
        if job.model != "sage":
            raise NotImplementedError(f"PipeGCN has GraphSAGE only (got {job.model})")
        self.train = train = import_pipegcn(Path(job.peers))
        self.context = context = sys.modules["helper.context"]
        with OnCPU():
            graph, nodes, book = self._load()
            part = train.create_inner_graph(graph.clone(), nodes)
            num_in = int(nodes["inner_node"].sum())
            graph, part = graph.int(), part.int()
            boundary = train.get_boundary(nodes, book)
            positions = train.get_pos(nodes, book)
            graph = train.order_graph(part, graph, book, nodes, positions)
            self.in_degrees = nodes["in_degree"]
            graph, nodes, boundary = train.move_train_first(graph, nodes, boundary)
            received = train.get_recv_shape(nodes)
            widths = [job.feat_dim, *[job.hidden] * (job.num_layers - 1), job.num_classes]
            context.buffer.init_buffer(
                num_in, graph.num_nodes("_U"), boundary, received, widths[: job.num_layers], use_pp=True, backend="gloo"
            )
            settings = Namespace(
                model="graphsage",
                backend="gloo",
                use_pp=True,
                norm=None,
                dropout=0.0,
                n_linear=0,
                n_train=job.num_train,
            )
            self.x = train.precompute(graph, nodes, boundary, received, settings)
            self.in_degrees = nodes["in_degree"]
            self.graph, self.train_mask = graph, nodes["train_mask"]
            self.label = nodes["label"][self.train_mask]
            self.seeds = nodes[dgl.NID][: len(self.train_mask)][self.train_mask]
            self.model = train.create_model(widths, settings)
            self._take_weights(self.make_model())
            context.reducer.init(self.model)
        for name, parameter in self.model.named_parameters():
            # Not `register_hook`, as it does: a sum that is ready before the gradient is stored would be lost.
            parameter.register_post_accumulate_grad_hook(self._reduce(name))
        self.optimizer = self.make_optimizer(self.model)
        self.model.train()
        return {"pipeline": False, "precomputed_first_layer": True}

    def _load(self) -> tuple[dgl.DGLGraph, dict[str, Tensor], Any]:
        """What its `load_partition` returns, from a folder without its own fields."""
        graph, fields, _, book, _, (node_type, *_), _ = dgl.distributed.load_partition(self.job.part_config, self.rank)
        nodes = {name: fields[f"{node_type}/{name}"] for name in ("feat", "label", "train_mask")}
        nodes["train_mask"] = nodes["train_mask"].bool()
        nodes["label"] = nodes["label"].long()
        nodes["in_degree"] = load_partition(self.job.part_config, self.rank, verify=False).in_degrees
        nodes[dgl.NID] = graph.ndata[dgl.NID]
        nodes["part_id"] = book.nid2partid(graph.ndata[dgl.NID])
        nodes["inner_node"] = graph.ndata["inner_node"].bool()
        graph.ndata.clear()
        graph.edata.clear()
        return graph, nodes, book

    def _take_weights(self, model: nn.Module) -> None:
        """Makes its layers the functions that DGL's are: one bias each (its second one would be redundant)."""
        pairs: list[tuple[Any, Any]] = list(
            zip(self.model.layers, model.get_submodule("layers").children(), strict=True)
        )
        for index, (own, other) in enumerate(pairs):
            with torch.no_grad():
                if index == 0:
                    own.linear.weight.copy_(torch.cat([other.fc_self.weight, other.fc_neigh.weight], dim=1))
                    own.linear.bias.copy_(other.fc_self.bias)
                else:
                    own.linear1.load_state_dict(other.fc_self.state_dict())
                    own.linear2 = nn.Linear(own.linear2.in_features, own.linear2.out_features, bias=False)
                    own.linear2.weight.copy_(other.fc_neigh.weight)

    def _reduce(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            self.context.reducer.reduce(parameter, name, parameter.grad, self.job.num_train)

        return hook

    def _step(self) -> tuple[Tensor, Tensor]:
        with quiet_cuda():
            logits = self.model(self.graph, self.x, self.in_degrees)[self.train_mask]
            loss = F.cross_entropy(logits, self.label, reduction="sum")
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.context.buffer.next_epoch()
            self.context.reducer.synchronize()
            self.optimizer.step()
        return loss.detach(), logits

    def check(self) -> Sample:
        losses, logits, gradients = [], {}, {}
        for epoch in range(self.job.gate_epochs):
            loss, rows = self._step()
            self.context.comm_timer.clear()
            losses.append(mean_over_ranks(float(loss), len(self.seeds)))
            if epoch == 0:
                logits = pick_logits(original_ids(self.job)[self.seeds], rows, sample_ids(self.job))
                gradients = sketch(self._gradients())
        return Sample(losses=losses, logits=logits, gradients=gradients)

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """By the names of DGL's weights; see `_take_weights`."""
        for index, own in enumerate(self.model.layers):
            if index == 0:
                of_self, of_neigh = own.linear.weight.grad.chunk(2, dim=1)
                bias = own.linear.bias.grad
            else:
                of_self, bias, of_neigh = own.linear1.weight.grad, own.linear1.bias.grad, own.linear2.weight.grad
            yield f"layers.{index}.fc_self.weight", of_self
            yield f"layers.{index}.fc_self.bias", bias
            yield f"layers.{index}.fc_neigh.weight", of_neigh

    def run_epoch(self) -> Epoch:
        with Stopwatch() as watch:
            self._step()
        exchange_s = self.context.comm_timer.tot_time()
        self.context.comm_timer.clear()
        return Epoch(elapsed_s=watch.elapsed_s, cpu_s=watch.cpu_s, exchange_s=exchange_s)


# -------------------------------------------------------------------- CUDA's stand-ins


class _Idle:
    """A stream or an event where everything runs in program order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


class OnCPU(TorchFunctionMode):
    """Creates on the CPU, pageable, what is asked for on "cuda" or pinned."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    def __enter__(self) -> Any:
        self._quiet = quiet_cuda()
        self._quiet.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._quiet.__exit__(*error)


@contextlib.contextmanager
def quiet_cuda() -> Iterator[None]:
    """Puts stand-ins into `torch.cuda` and makes moves to the device do nothing."""
    cuda: dict[str, Any] = {
        "Stream": _Idle,
        "Event": _Idle,
        "current_stream": _Idle,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    tensor: dict[str, Any] = {"cuda": lambda self, *a, **k: self, "pin_memory": lambda self, *a, **k: self}
    before: list[tuple[Any, str, Any]] = [(torch.cuda, name, getattr(torch.cuda, name)) for name in cuda]
    before += [(Tensor, name, getattr(Tensor, name)) for name in tensor]
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    for name, value in tensor.items():
        setattr(Tensor, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def import_pipegcn(peers: Path) -> Any:
    """Imports `train` of `peers/PipeGCN`; what it wants for loading data sets and for scores is not needed."""
    stubs: dict[str, types.ModuleType] = {}
    for name, members in (
        ("ogb", ()),
        ("ogb.nodeproppred", ("DglNodePropPredDataset",)),
        ("sklearn", ()),
        ("sklearn.preprocessing", ("StandardScaler",)),
        ("sklearn.metrics", ("f1_score",)),
    ):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                continue
        stub = types.ModuleType(name)
        for member in members:
            setattr(stub, member, None)
        sys.modules[name] = stubs[name] = stub
    if not hasattr(fn, "copy_src"):  # gone from DGL
        fn.copy_src = lambda src, out: fn.copy_u(src, out)
    sys.path.insert(0, str(peers / "PipeGCN"))
    import train  # type: ignore[import-not-found]

    for name in stubs:  # others look for these packages, too
        del sys.modules[name]
    return train
