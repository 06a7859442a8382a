# SPDX-License-Identifier: Apache-2.0
"""A generated graph with power-law degrees, communities and labels that neighbours help to predict."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from dgl_hybrid.datasets.dataset import GraphDataset, make_dataset
from dgl_hybrid.errors import DatasetError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLawConfig:
    """Options of the generated graph."""

    nodes: int = 20_000
    """Number of vertices."""
    degree: float = 16.0
    """Mean in-degree; every undirected edge counts at both ends."""
    features: int = 64
    """Width F of the features."""
    classes: int = 16
    """Number of classes; each is one community."""
    train: float = 0.3
    """Fraction of vertices in the train mask."""
    val: float = 0.2
    """Fraction in the validation mask; the test mask takes the rest."""
    homophily: float = 0.6
    """Probability that an edge is drawn inside the community (further edges fall inside by chance)."""
    exponent: float = 2.5
    """Power-law exponent of the degrees, above 2."""
    signal: float = 2.2
    """Distance between class centres in units of the features' noise; lower makes features alone less telling."""
    label_noise: float = 0.08
    """Fraction of vertices whose label is drawn anew, uniformly; bounds the reachable accuracy."""

    def __post_init__(self) -> None:
        """Checks every field."""
        positive = {"nodes": self.nodes, "features": self.features, "classes": self.classes}
        for name, value in positive.items():
            if value < 1:
                raise DatasetError(f"powerlaw: {name} must be at least 1 (got {value})")
        if not 0 <= self.degree <= (self.nodes - 1) / 2:
            raise DatasetError(
                f"powerlaw: degree must be between 0 and (nodes - 1) / 2 = {(self.nodes - 1) / 2:g} "
                f"(got {self.degree:g})"
            )
        for name in ("train", "val", "homophily", "label_noise"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise DatasetError(f"powerlaw: {name} must be between 0 and 1 (got {value:g})")
        if self.train + self.val > 1:
            raise DatasetError(f"powerlaw: train + val must not exceed 1 (got {self.train + self.val:g})")
        if not self.exponent > 2:
            raise DatasetError(f"powerlaw: exponent must be above 2 (got {self.exponent:g})")
        if not self.signal >= 0:
            raise DatasetError(f"powerlaw: signal must not be negative (got {self.signal:g})")


def generate_powerlaw(config: PowerLawConfig, *, seed: int = 0) -> GraphDataset:
    """Draws a degree-corrected stochastic block model with Gaussian features.

    Symmetric, without self-loops and duplicate edges; vertices of low weight may stay isolated. The same config and
    seed give the same graph in every run.

    Args:
        config: Size and difficulty.
        seed: Of all randomness.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(config.classes, 10.0))
    community = rng.choice(config.classes, size=config.nodes, p=shares)
    src, dst = _draw_edges(rng, community, config)
    centres = rng.standard_normal((config.classes, config.features), dtype=np.float32)
    # Two random centres lie sqrt(2 F) apart; scaled so that `signal` means the same at every width.
    centres *= np.float32(config.signal / np.sqrt(2 * config.features))
    feat = rng.standard_normal((config.nodes, config.features), dtype=np.float32)
    feat += centres[community]
    label = community.astype(np.int64)
    redrawn = rng.random(config.nodes) < config.label_noise
    label[redrawn] = rng.integers(0, config.classes, size=int(redrawn.sum()))
    return make_dataset(
        name="powerlaw",
        origin="powerlaw",
        src=torch.from_numpy(np.concatenate([src, dst])),
        dst=torch.from_numpy(np.concatenate([dst, src])),
        feat=torch.from_numpy(feat),
        label=torch.from_numpy(label),
        masks=split_masks(rng, config.nodes, config.train, config.val),
        num_classes=config.classes,
        meta={"source": "generated", "seed": seed, "directed": False, "config": asdict(config)},
    )


def split_masks(rng: np.random.Generator, num_nodes: int, train: float, val: float) -> dict[str, torch.Tensor]:
    """Random split masks, bool (N,) each; the test mask takes what train and val leave."""
    order = rng.permutation(num_nodes)
    num_train, num_val = round(train * num_nodes), round(val * num_nodes)
    bounds = {
        "train_mask": order[:num_train],
        "val_mask": order[num_train : num_train + num_val],
        "test_mask": order[num_train + num_val :],
    }
    masks: dict[str, torch.Tensor] = {}
    for name, members in bounds.items():
        mask = np.zeros(num_nodes, dtype=bool)
        mask[members] = True
        masks[name] = torch.from_numpy(mask)
    return masks


def _draw_edges(rng: np.random.Generator, community: IntArray, config: PowerLawConfig) -> tuple[IntArray, IntArray]:
    """Draws undirected edges, each once, ends in proportion to the vertices' weights."""
    num_nodes = config.nodes
    wanted = round(num_nodes * config.degree / 2)
    weight = (1.0 - rng.random(num_nodes)) ** (-1.0 / (config.exponent - 1.0))
    # Past sqrt(sum of weights) a vertex would mostly draw duplicates; this is the usual structural cut-off.
    weight = np.minimum(weight, np.sqrt(weight.sum()))
    by_community = np.argsort(community, kind="stable")
    cumulative = np.concatenate([[0.0], np.cumsum(weight[by_community])])
    starts = cumulative[np.searchsorted(community[by_community], np.arange(config.classes))]
    ends = cumulative[np.searchsorted(community[by_community], np.arange(config.classes), side="right")]

    def pick(low: FloatArray | float, high: FloatArray | float, count: int) -> IntArray:
        target = low + (np.asarray(high) - low) * rng.random(count)
        slot = np.searchsorted(cumulative, target, side="right") - 1
        return by_community[np.clip(slot, 0, num_nodes - 1)]

    keys = np.empty(0, dtype=np.int64)
    # Duplicates and self-loops are dropped, so a few rounds are needed; dense graphs may end a little short.
    for _ in range(12):
        missing = wanted - keys.size
        if missing <= 0:
            break
        count = int(missing * 1.1) + 16
        first = pick(0.0, cumulative[-1], count)
        inside = rng.random(count) < config.homophily
        own = community[first]
        second = pick(np.where(inside, starts[own], 0.0), np.where(inside, ends[own], cumulative[-1]), count)
        low, high = np.minimum(first, second), np.maximum(first, second)
        keys = np.unique(np.concatenate([keys, (low * num_nodes + high)[low != high]]))
    if keys.size > wanted:
        keys = np.sort(rng.choice(keys, size=wanted, replace=False))
    return keys // num_nodes, keys % num_nodes
