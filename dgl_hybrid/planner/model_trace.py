# SPDX-License-Identifier: Apache-2.0
"""What one epoch of the user's model costs, per row and per edge, before it is known on which machine.

The tracing itself lives in `dgl_hybrid.graph` (it needs a block to run the model on); here are the numbers it yields.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..errors import PlanError

BYTES_PER_ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelTrace:
    """Work whose leading dimension is the number of rows of one level, forward and backward together."""

    row_flops: float
    """Dense FLOPs per row: destination side of the layer that makes the level, source side of the one that reads it."""
    row_bytes: float
    """Elementwise and copy traffic per row, in bytes."""
    held_bytes: float = 0.0
    """Bytes one row keeps alive until backward; 0 if unknown, then the operand it feeds is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTrace:
    """Work of one layer that scales with its in-edges or with the rows exchanged for it."""

    edge_flops: float
    """FLOPs per in-edge, forward and backward."""
    edge_bytes: float
    """Bytes gathered and scattered per in-edge, forward and backward."""
    operand_bytes_fwd: float
    """Bytes of one exchanged row in forward."""
    operand_bytes_bwd: float
    """Bytes of its gradient on the way home; 0 when no gradient flows (input features)."""
    operand_width: int
    """Elements of one exchanged row."""
    static_operand: bool = False
    """The operand is the same in every epoch (raw features), so what is aggregated from it could be kept."""
    mixes_rows: bool = False
    """The layer couples all rows (batch norm): demand closure stops below it."""
    edge_held_bytes: float = 0.0
    """Bytes one in-edge keeps alive until backward (attention scores), structure not counted."""
    can_split: bool = False
    """A sum whose edges from held and from received rows can be added up apart, so that the former need not wait."""
    can_sum_apart: bool = False
    """A sum without weights: owners can add up what a reader needs, and send sums in place of more rows."""
    beside_flops: float = 0.0
    """Of the FLOPs of a row that the layer makes, those that wait for no message, forward and backward: they may run
    while rows or gradients travel."""
    can_sum_first: bool = True
    """There are two orders of its sum and its product to choose from."""
    sums_first: bool = False
    """The layer sums before it multiplies although products make rows narrower: see `order.py`."""
    keeps_result: bool = False
    """What the layer aggregates is made in the first epoch and kept: its exchange and its in-edges cost no time later,
    only the bytes of what was brought here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrace:
    """Costs of an L-layer model: `levels[k]` for k = 0..L, `layers[l - 1]` for layer l = 1..L."""

    levels: tuple[LevelTrace, ...]
    layers: tuple[LayerTrace, ...]
    dtype: str
    num_parameters: int

    def __post_init__(self) -> None:
        if not self.layers or len(self.levels) != len(self.layers) + 1:
            raise ValueError(
                f"a trace of L layers has L + 1 levels (got {len(self.layers)} layers, {len(self.levels)} levels)"
            )
        for name, value in _negatives(self):
            raise ValueError(f"trace costs must not be negative (got {name} = {value})")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def sums_first(self) -> tuple[bool, ...]:
        """(L,) which layers sum before they multiply although products make rows narrower."""
        return tuple(layer.sums_first for layer in self.layers)

    def to_json(self) -> dict[str, object]:
        """Returns a dictionary that `json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, object]) -> ModelTrace:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: a field is missing or has the wrong type.
        """
        try:
            levels = tuple(LevelTrace(**x) for x in data["levels"])  # type: ignore[attr-defined]
            layers = tuple(LayerTrace(**x) for x in data["layers"])  # type: ignore[attr-defined]
            return cls(
                levels=levels,
                layers=layers,
                dtype=str(data["dtype"]),
                num_parameters=int(data["num_parameters"]),  # type: ignore[call-overload]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the stored model trace cannot be read ({error}); trace the model again") from error

    def digest(self) -> str:
        """Short fingerprint: two traces with equal numbers have the same one."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def _negatives(trace: ModelTrace) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for kind, records in asdict(trace).items():
        if kind not in ("levels", "layers"):
            continue
        for index, record in enumerate(records):
            found += [(f"{kind}[{index}].{name}", value) for name, value in record.items() if not value >= 0]
    return found


def synthetic_trace(dims: Sequence[int], dtype: str = "float32") -> ModelTrace:
    """Builds the trace of a plain GCN-like model from its widths, for planning without a model.

    Layer l multiplies before or after aggregating, whichever row is narrower, as `dgl.nn.GraphConv` does.

    Args:
        dims: L + 1 widths, input features first, classes last.
        dtype: name of a floating dtype.

    Returns:
        The trace; level 0 gets no gradient.

    Raises:
        ValueError: fewer than two widths, one below 1, or an unknown dtype.
    """
    if len(dims) < 2 or min(dims) < 1:
        raise ValueError(f"dims must hold at least two positive widths (got {list(dims)})")
    if dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype must be one of {sorted(BYTES_PER_ELEMENT)} (got {dtype!r})")
    size = BYTES_PER_ELEMENT[dtype]
    num_layers = len(dims) - 1
    flops = [0.0] * (num_layers + 1)
    row_bytes = [0.0] * (num_layers + 1)
    held = [0.0] * (num_layers + 1)
    layers = []
    for layer in range(1, num_layers + 1):
        d_in, d_out = dims[layer - 1], dims[layer]
        transform_first = d_in > d_out
        width = d_out if transform_first else d_in
        # One product forward, one for the weight, one for the input; the input features need none.
        products = 2 if layer == 1 else 3
        flops[layer - 1 if transform_first else layer] += 2.0 * d_in * d_out * products
        # Bias, normalisation and activation read and write the output row, forward and backward.
        row_bytes[layer] += 8.0 * d_out * size
        held[layer] += float(d_out * size)
        held[layer - 1 if transform_first else layer] += float(width * size)
        grad = layer > 1 or transform_first
        layers.append(
            LayerTrace(
                edge_flops=float(width * (2 if grad else 1)),
                edge_bytes=float(width * size * (2 if grad else 1)),
                operand_bytes_fwd=float(width * size),
                operand_bytes_bwd=float(width * size) if grad else 0.0,
                operand_width=width,
                static_operand=not grad,
                can_split=True,
                can_sum_apart=True,
            )
        )
    return ModelTrace(
        levels=tuple(
            LevelTrace(row_flops=f, row_bytes=b, held_bytes=h) for f, b, h in zip(flops, row_bytes, held, strict=True)
        ),
        layers=tuple(layers),
        dtype=dtype,
        num_parameters=sum(a * b + b for a, b in itertools.pairwise(dims)),
    )
