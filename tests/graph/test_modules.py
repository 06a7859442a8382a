# SPDX-License-Identifier: Apache-2.0
"""Each convolution of `dgl.nn` on three ranks equals the whole graph, or says clearly that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgl_hybrid.errors import BlockError
from tests.graph.modules import MODULES, OTHER_WAYS, run_module, run_reference
from tests.helpers.exactness import assert_close
from tests.helpers.world import run_ranks, run_ranks_expect_errors

ENTRIES = MODULES | OTHER_WAYS


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.error is None])
def test_equals_the_whole_graph(name: str, graph: Any, folder: str) -> None:
    expected = run_reference(graph, name)
    results = run_ranks(3, run_module, folder, name)
    ids = torch.cat([result.node_ids for result in results])
    order = torch.argsort(ids)
    assert torch.equal(ids[order], expected.node_ids)
    assert_close(torch.cat([result.logits for result in results])[order], expected.logits, "logits")
    for key, grad in expected.grads.items():
        assert_close(results[0].grads[key], grad, f"gradient of {key}")


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.error is not None])
def test_says_that_it_does_not_work(name: str, folder: str) -> None:
    for error in run_ranks_expect_errors(3, run_module, folder, name):
        assert error.type_name == BlockError.__name__
        assert str(ENTRIES[name].error) in error.message
