# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange is hidden behind work on held rows, and what partial sums save."""
