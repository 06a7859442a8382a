# SPDX-License-Identifier: Apache-2.0
"""`LayerBlock`, the graph object unmodified `dgl.nn` modules run on, and the trace of a model on small ones."""
