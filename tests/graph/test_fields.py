# SPDX-License-Identifier: Apache-2.0
"""When received rows of source fields serve again."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.graph.fields import SourceFields


class Received:
    """Appends a row, and counts how often."""

    def __init__(self) -> None:
        self.num_exchanges = 0

    def extend(self, fields: list[Tensor]) -> list[Tensor]:
        self.num_exchanges += 1
        return [torch.cat([field, torch.full_like(field[:1], 7.0)]) for field in fields]


def test_rows_received_in_inference_mode_are_received_again_for_training() -> None:
    """A backward could not keep them."""
    fields, received = SourceFields(3, "layer 1"), Received()
    fields["x"] = torch.ones(3, 2)
    with torch.inference_mode():
        fields.complete(["x"], received.extend)
        fields.complete(["x"], received.extend)
    assert received.num_exchanges == 1
    query = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x = fields.complete(["x"], received.extend)["x"]
        (x * query).sum().backward()
    assert received.num_exchanges == 2
    with torch.inference_mode():
        fields.complete(["x"], received.extend)
    assert received.num_exchanges == 2


def test_approximate_rows_serve_no_evaluation() -> None:
    fields, received = SourceFields(3, "layer 1", is_approximate=True), Received()
    fields["x"] = torch.ones(3, 2)
    fields.complete(["x"], received.extend)
    fields.complete(["x"], received.extend)
    assert received.num_exchanges == 1
    with torch.no_grad():
        fields.complete(["x"], received.extend)
        fields.complete(["x"], received.extend)
    assert received.num_exchanges == 2
    fields.complete(["x"], received.extend)  # exact ones serve training
    assert received.num_exchanges == 2
