# SPDX-License-Identifier: Apache-2.0
"""Registers the ops with PyTorch as `torch.ops.dgl_hybrid.*`: CPU, CUDA and Meta implementations, and gradients.

[Note: the structure as lists]
A graph travels as two lists of tensors, `rows` by destination and `out_rows` by source, each `Adjacency.tensors()`.
`out_rows` may be empty: a gradient that needs it then builds it, so callers pass it when they expect gradients and
inference never pays for it. Operands are canonical (`backend.py`), in any strides.

[Note: gradients of gradients]
Each formula is written with the registered ops themselves, so it can be differentiated again, without end:
spmm_sum and sddmm are each other's derivatives, spmm_take, spmm_select_backward and spmm_select_backward_edges are the
three derivatives of one trilinear form, sparse_product and its transpose each other's. Only the fused attention ops end
after one: their backward refuses.

One module for each family of ops, all on `registration.py`; `sparse_product` ends as `row_products` does.
"""

# Importing a family registers it.
from dgl_hybrid.ops.library import (
    activation,
    edge_softmax,
    row_dropout,
    row_products,
    sddmm,
    segments,
    sparse_product,
    spmm,
)
from dgl_hybrid.ops.library.attention import pack_dropout

__all__ = [
    "activation",
    "edge_softmax",
    "pack_dropout",
    "row_dropout",
    "row_products",
    "sddmm",
    "segments",
    "sparse_product",
    "spmm",
]
