# SPDX-License-Identifier: Apache-2.0
"""Level sets, exchange plans and the differentiable exchange of rows between ranks."""
