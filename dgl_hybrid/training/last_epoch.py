# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other of the last epoch as they ask for the next batch, all in one gather of integers.

Between four ranks on two cores a gather takes milliseconds, so there is no second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dgl_hybrid.exchange.communicator import Communicator


@dataclass(frozen=True, kw_only=True, slots=True)
class LastEpoch:
    """One rank's news."""

    epoch_ns: int
    """What it took; 0: it was no training (nothing went back), or could not be timed."""
    was_changed: bool
    """Whether what is kept from epoch to epoch is no longer right."""
    has_drawn: bool
    """Whether it drew random numbers."""
    change_ns: int
    """What the last change of plans took."""
    is_called_otherwise: bool
    """Whether the model was called in another way than the plan was made for."""
    num_written: int
    """Fields of the graph that were written to since."""
    steps_done: int
    """Steps that drew random numbers, this one not counted."""
    seed: int
    """Of dropout; any integer, of which 63 bits are told."""
    has_other_call: bool
    """Whether another model than the one that plans are for used the blocks."""
    dense_below: int
    """Levels below this one hold every vertex, as far as the epoch told."""
    normed_below: int
    """The same as far as calls that were given the blocks told."""
    is_on_gpu: bool
    """Where the blocks were used."""
    are_not_all: bool
    """Whether the first layer did something else than what is kept of it."""
    num_asked: tuple[int, ...]
    """(L,) how often each layer was asked for something that would be kept."""

    def to_ints(self) -> list[int]:
        """Returns what `from_ints` reads."""
        *single, last = (getattr(self, field.name) for field in fields(self))
        return [int(value) for value in (*single, *last)]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> LastEpoch:
        """Reads what `to_ints` returned."""
        *single, last = fields(cls)
        told: dict[str, Any] = {
            field.name: bool(value) if field.type == "bool" else value
            for field, value in zip(single, values, strict=False)
        }
        told[last.name] = tuple(values[len(single) :])
        return cls(**told)

    def gather(self, communicator: Communicator) -> list[LastEpoch]:
        """Returns the news of all ranks. Collective."""
        return [
            self.from_ints(row) for row in communicator.gather_ints(self.to_ints(), what="the next epoch of a loader")
        ]


def check_same_masks(told: Sequence[LastEpoch]) -> None:
    """Checks that ranks would draw the same masks for one row.

    Raises:
        ValueError: On all ranks: they were given different states.
    """
    first = told[0]
    for rank, other in enumerate(told):
        if (other.steps_done, other.seed) != (first.steps_done, first.seed):
            raise ValueError(
                f"every rank must give `load_state_dict` the same state, or dropout would differ between a row and "
                f"its replicas: rank 0 is at step {first.steps_done} of seed {first.seed}, rank {rank} at step "
                f"{other.steps_done} of seed {other.seed}. Read the checkpoint on every rank."
            )
