# SPDX-License-Identifier: Apache-2.0
"""Turns the plugin on and off in a process: hooks, repairs, services, and the variable that its children inherit."""

from __future__ import annotations

import os

from dgl.distributed import dist_context, kvstore

from dgl_hybrid.compat import repairs, require_supported_dgl
from dgl_hybrid.errors import HybridError
from dgl_hybrid.exchange import mailbox
from dgl_hybrid.sampling import written
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig, Strategy
from dgl_hybrid.sampling.plugin import HaloPlugin

_plugin: HaloPlugin | None = None


def enable(*, strategy: Strategy = "hybrid", budget: str | int = "auto") -> None:
    """Turns the plugin on: DistDGL's sampling and feature reads are answered from a halo store where that pays.

    Call it before `dgl.distributed.initialize`, in every process of the job (servers run the same script, sampler
    processes are told by an environment variable); `dgl-hybrid run` and `dgl-hybrid launch` do it for a script that
    does not. Results stay those of DistDGL: the same rows, and samples of the same distribution. Calling it again
    with other arguments begins anew with an empty store.

    Args:
        strategy: `hybrid` decides per vertex by expected reads and measured costs within the budget, `depcache` holds
            all that is reached, whatever the budget, `depcomm` holds nothing (it repairs DGL and counts reads).
        budget: With `hybrid`, of each trainer: `auto` (a quarter of the free memory of host or container at the first
            read or loader, divided by the host's trainers and their sampler processes), `unlimited`, a share of the
            bytes of all node features of the graph (`10%`), or bytes (`256MB`, 268435456).

    Raises:
        ValueError: An unknown strategy or budget.
        CompatError: Another DGL than a supported one, or one whose functions were replaced by something else.
        HybridError: DGL's servers of this job run without the plugin, so they cannot tell of writes.
    """
    global _plugin
    config = HaloConfig(strategy=strategy, budget=budget)
    if _plugin is not None and _plugin.config == config:
        return
    require_supported_dgl()
    if dist_context.is_initialized() and not written.is_served(kvstore.get_kvstore()):
        raise HybridError(
            "dgl_hybrid.enable() must come before dgl.distributed.initialize() (got: connected to a server that runs "
            "without it). Move the line up, or start the script with `dgl-hybrid run` or `dgl-hybrid launch`."
        )
    disable()
    plugin = HaloPlugin(config)
    repairs.switch_on()
    try:
        plugin.install()
    except BaseException:
        repairs.switch_off()
        raise
    written.register_services()
    mailbox.register_services()
    os.environ[ENABLE_VARIABLE] = config.to_environment()
    _plugin = plugin


def disable() -> None:
    """Turns the plugin off: every function of DGL is the original one again, and what was held is dropped."""
    global _plugin
    if _plugin is None:
        return
    _plugin.remove()
    repairs.switch_off()
    os.environ.pop(ENABLE_VARIABLE, None)
    _plugin = None


def held_bytes() -> int:
    """Returns what this process holds of other machines' rows and in-edge lists; 0 when the plugin is off."""
    return 0 if _plugin is None else _plugin.num_bytes


def enable_from_environment() -> None:
    """Turns the plugin on as a parent process has it; without the variable, or with `0` in it, nothing happens.

    Raises:
        ValueError: The variable holds what `HaloConfig.from_environment` cannot read.
    """
    value = os.environ.get(ENABLE_VARIABLE, "0")
    if value not in ("", "0"):
        config = HaloConfig.from_environment(value)
        enable(strategy=config.strategy, budget=config.budget)
