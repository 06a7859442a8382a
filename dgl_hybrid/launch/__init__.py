# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run and prepares what they need."""
