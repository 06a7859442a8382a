# SPDX-License-Identifier: Apache-2.0
"""How long does an epoch of exact training take, with every system a user could pick, side by side?"""
