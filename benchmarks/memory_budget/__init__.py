# SPDX-License-Identifier: Apache-2.0
"""Whether training stays within a memory budget that all received rows together would exceed."""
