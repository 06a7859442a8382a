# SPDX-License-Identifier: Apache-2.0
"""What is trained, how its dependencies are treated, and for how long: the options of one training run."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgl_hybrid.exchange.approximate import APPROXIMATIONS
from dgl_hybrid.exchange.connect import DEFAULT_TIMEOUT_S
from dgl_hybrid.planner import STRATEGIES, PlannerConfig

MODELS = ("gcn", "sage", "gat", "gatv2", "gin")
DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda")
_CACHE_RATIO = 0.5
"""If none is given."""


LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.01, 1e8
"""What PyTorch's process groups can wait for: less is over before anything began, more is no number of theirs."""

_FLOAT32_MAX = 3.4028234663852886e38
"""Above it the optimizer has no number for weights of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A stack of one kind of `dgl.nn` layer."""

    model: str = "gcn"
    """Kind of layer."""
    num_layers: int = 2
    """Number of layers L."""
    hidden: int = 64
    """Width of the hidden layers, all heads together."""
    heads: int = 4
    """Attention heads of hidden layers (gat, gatv2); the last layer has one."""
    dropout: float = 0.5
    """Dropout before every layer (sage and gin: but the first), and on attention; 0 turns it off."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.model not in MODELS:
            raise ValueError(f"unknown model (got {self.model!r}); choose one of {', '.join(MODELS)}")
        for name in ("num_layers", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in 0..1, 1 excluded (got {self.dropout})")
        if self.model in ("gat", "gatv2") and self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads={self.heads} for {self.model} (got {self.hidden})")


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """What becomes of dependencies: computed here (cached), or received (communicated)."""

    strategy: str = "hybrid"
    """Who decides: the planner, or one rule for all."""
    cache_ratio: float = _CACHE_RATIO
    """Strategy ratio only: share of the dependencies of each layer to cache."""
    memory_budget: float | None = None
    """Bytes the halo rows of one rank may hold, e.g. 200e6 or 200MB; without it there is no limit."""
    plan: str | None = None
    """Folder of plans that `dgl-hybrid plan` saved; nothing is planned then."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy (got {self.strategy!r}); choose one of {', '.join(STRATEGIES)}")
        self.planner_config()
        if self.plan is not None and self.strategy != "hybrid":
            raise ValueError(f"nothing is planned with a plan: leave strategy {self.strategy} out, or plan {self.plan}")
        if self.strategy != "ratio" and self.cache_ratio != _CACHE_RATIO:
            raise ValueError(
                f"cache_ratio is of strategy ratio alone (got {self.cache_ratio} with strategy {self.strategy})"
            )

    def planner_config(self) -> PlannerConfig:
        """Returns the planner's options."""
        return PlannerConfig(
            strategy=self.strategy, cache_ratio=self.cache_ratio, memory_budget_bytes=self.memory_budget
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long and in which arithmetic; one optimizer step (Adam) an epoch."""

    epochs: int = 200
    """Number of epochs."""
    lr: float = 0.01
    """Learning rate of Adam."""
    weight_decay: float = 5e-4
    """Weight decay of Adam, on all parameters."""
    eval_every: int = 5
    """Epochs between evaluations; 0: only after the last."""
    dtype: str = "float32"
    """Arithmetic; float64 to compare runs digit by digit."""
    device: str = "cpu"
    """Where ranks train; cuda: on their machine's GPUs, which they share if there are fewer."""
    seed: int = 0
    """Of initial weights and dropout. (A generated graph has its own: powerlaw:seed=1.)"""

    exchange_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that ranks wait for each other before they give up; planning for large graphs may need more."""
    approximate: str | None = None
    """Exchange narrower rows (bf16, int8) or those of the epoch before (stale) in training steps; exact without it."""
    checkpoint: str | None = None
    """Folder for the trained model, saved after every evaluation: best.safetensors and last.safetensors."""
    resume: bool = False
    """Go on from the last model in --checkpoint; --epochs counts those before, too."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1 (got {self.epochs})")
        if self.eval_every < 0:
            raise ValueError(f"eval_every must not be negative (got {self.eval_every})")
        most = sys.float_info.max if self.dtype == "float64" else _FLOAT32_MAX
        if not 0.0 < self.lr <= most or not 0.0 <= self.weight_decay <= most:
            raise ValueError(
                f"lr must be positive and weight_decay not negative (got {self.lr} and {self.weight_decay}), both "
                f"finite in {self.dtype}"
            )
        if not 0.0 < self.exchange_timeout_s < math.inf:
            raise ValueError(f"exchange_timeout_s must be positive and finite (got {self.exchange_timeout_s})")
        if not LEAST_TIMEOUT_S <= self.exchange_timeout_s <= MOST_TIMEOUT_S:
            raise ValueError(
                f"exchange_timeout_s must lie in {LEAST_TIMEOUT_S:g}..{MOST_TIMEOUT_S:g} seconds (got "
                f"{self.exchange_timeout_s:g})"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype (got {self.dtype!r}); choose one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"unknown device (got {self.device!r}); choose one of {', '.join(DEVICES)}")
        if self.approximate is not None and self.approximate not in APPROXIMATIONS:
            raise ValueError(
                f"unknown approximation (got {self.approximate!r}); choose one of {', '.join(APPROXIMATIONS)}"
            )
        if self.resume and self.checkpoint is None:
            raise ValueError("resume needs checkpoint: the folder of the model to go on from")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in 0..2**32-1 (got {self.seed})")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """Everything a rank needs to train; travels to rank processes as JSON."""

    part_config: str
    """Path of the partition's JSON file."""
    dataset: str
    """What results call the graph."""
    num_classes: int | None = None
    """None: the largest label of any rank, plus one."""
    model: ModelConfig
    strategy: StrategyConfig
    training: TrainConfig

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary that `json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainJob:
        """Reads what `to_json` wrote."""
        return cls(
            part_config=str(Path(data["part_config"])),
            dataset=data["dataset"],
            num_classes=data["num_classes"],
            model=ModelConfig(**data["model"]),
            strategy=StrategyConfig(**data["strategy"]),
            training=TrainConfig(**data["training"]),
        )
