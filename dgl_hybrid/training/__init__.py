# SPDX-License-Identifier: Apache-2.0
"""`PartitionedGraph`, `FullGraphLoader` and what makes a training script exact on ranks."""
