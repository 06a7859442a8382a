# SPDX-License-Identifier: Apache-2.0
"""Message-passing ops on compressed rows: one set of functions, kernels for CPU and CUDA, and a plain reference.

`SparseGraph` holds the structure; `spmm`, `scaled_sum`, `sddmm`, `edge_softmax`, `gat`, `gatv2` and `segment_reduce`
run on it.
`SparseRows` are constant rows with few entries, for products with a weight.
Importing this room loads no kernels: a backend (`backend.py`) is loaded when an op first meets a tensor it serves.
"""

from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.functions import edge_softmax, gat, gatv2, scaled_sum, sddmm, segment_reduce, spmm
from dgl_hybrid.ops.sparse_graph import SparseGraph
from dgl_hybrid.ops.sparse_rows import SparseRows

__all__ = [
    "EdgeDropout",
    "SparseGraph",
    "SparseRows",
    "edge_softmax",
    "gat",
    "gatv2",
    "scaled_sum",
    "sddmm",
    "segment_reduce",
    "spmm",
]
