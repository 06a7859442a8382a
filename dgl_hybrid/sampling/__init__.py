# SPDX-License-Identifier: Apache-2.0
"""The halo store behind DistDGL's sampling and feature reads, and the hooks that put it there."""
