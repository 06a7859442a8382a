# SPDX-License-Identifier: Apache-2.0
"""How much does a DistDGL script still read from other machines with the plugin on, and how much faster is it?"""
