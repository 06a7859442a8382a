# SPDX-License-Identifier: Apache-2.0
"""Turns the plugin on and off in a process: hooks, repairs, services, and the variable that its children inherit."""

from __future__ import annotations

import logging
import os

from dgl import DGLError
from dgl.distributed import dist_context, kvstore

from dgl_hybrid.compat import repairs, require_supported_dgl
from dgl_hybrid.errors import ExchangeError, HybridError
from dgl_hybrid.exchange import mailbox
from dgl_hybrid.sampling import written
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, OFF_WORDS, HaloConfig, Strategy, read_environment
from dgl_hybrid.sampling.hooks import give_back
from dgl_hybrid.sampling.plugin import HaloPlugin
from dgl_hybrid.sampling.written import WrittenFields

_logger = logging.getLogger(__name__)

_plugin: HaloPlugin | None = None
_silent: WrittenFields | None = None
"""By which this process said that it would announce no writes, as long as that holds."""
_exported: str | None = None
"""What this process itself wrote into `ENABLE_VARIABLE`, for its children."""
_launchers_word = ""
"""What was in that variable before."""
_warned: set[str] = set()


def enable(*, strategy: Strategy = "hybrid", budget: str | int = "auto") -> None:
    """Turns the plugin on: DistDGL's sampling and feature reads are answered from a halo store where that pays.

    Call it before `dgl.distributed.initialize`, in every process of the job (servers run the same script, sampler
    processes are told by an environment variable); `dgl-hybrid run` and `dgl-hybrid launch` do it for a script that
    does not. Results stay those of DistDGL: the same rows, and samples of the same distribution. Calling it again
    with other arguments begins anew with an empty store.

    Whoever starts the job has the last word: under `DGL_HYBRID_ENABLE=0` (`--strategy off`) this does nothing, and a
    strategy or budget of that variable holds in place of the argument, until `disable`. Either is warned of once.

    Args:
        strategy: `hybrid` decides per vertex by expected reads and measured costs within the budget, `depcache` holds
            all that is reached, whatever the budget, `depcomm` holds nothing (it repairs DGL and counts reads).
        budget: With `hybrid`, of each process, trainers and their sampler processes: `auto` (a quarter of the free
            memory of host or container at the first read or loader, divided by all of these on the host), `unlimited`,
            a share of the bytes of all node features of the graph (`10%`), or bytes (`256MB`, 268435456).

    Raises:
        ValueError: An unknown strategy or budget.
        CompatError: Another DGL than a supported one, one that was imported before this package and runs without its
            fixes, or one whose functions were replaced by something else.
        HybridError: DGL's servers of this job run without the plugin, so they cannot tell of writes.
    """
    global _plugin, _silent, _exported
    config = _with_launcher_word(HaloConfig(strategy=strategy, budget=budget))
    if config is None or (_plugin is not None and _plugin.config == config):
        return
    require_supported_dgl()
    if dist_context.is_initialized() and not written.is_served(kvstore.get_kvstore()):
        raise HybridError(
            "dgl_hybrid.enable() must come before dgl.distributed.initialize(), on every machine (got: connected to a "
            "server that runs without it). Move the line up, or start the script with `dgl-hybrid run` or `dgl-hybrid "
            "launch`."
        )
    written.register_services()
    mailbox.register_services()
    before = _plugin
    if before is None and _silent is None:
        _silent = _silent_since_connecting()
    _remove()  # in silence: no write comes between
    plugin = HaloPlugin(config, _silent if before is None else before.written)
    try:
        repairs.switch_on()
        plugin.install()
    except BaseException:
        repairs.switch_off()
        _fall_silent(before)
        raise
    _exported = os.environ[ENABLE_VARIABLE] = config.to_environment()
    _plugin = plugin
    if _silent is not None and _silent.is_of(kvstore.get_kvstore()):
        _silent.speak()
    _silent = None


def _with_launcher_word(asked: HaloConfig) -> HaloConfig | None:
    """Returns what holds where a script asks for `asked`; None: nothing."""
    global _launchers_word
    value = os.environ.get(ENABLE_VARIABLE, "")
    if value != _exported:
        _launchers_word = value
    value = _launchers_word
    if value == "":
        return asked
    if value in OFF_WORDS:
        _warn_once(
            f"{ENABLE_VARIABLE}={value} has switched dgl_hybrid off for this job: dgl_hybrid.enable() does nothing. "
            f"Take the variable (or --strategy off) away to have it on."
        )
        return None
    said = read_environment(value)
    config = HaloConfig(**{"strategy": asked.strategy, "budget": asked.budget, **said})
    if config != asked:
        _warn_once(
            f"{ENABLE_VARIABLE}={value} holds in place of what dgl_hybrid.enable() was asked for: strategy "
            f"{config.strategy}, budget {config.budget}, not {asked.strategy}, {asked.budget}"
        )
    return config


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _logger.warning(message)


def disable() -> None:
    """Turns the plugin off: every function of DistDGL is the original one again, and what was held is dropped.

    Writes of this process are no longer announced, so the processes of the job hold no rows until it is on again here.
    They learn of it by the servers: a process that switches the plugin off before `dgl.distributed.initialize` says
    nothing, and must not write into fields of which others hold rows.

    What full-graph training on a `DistGraph` has hooked is DGL's own again, too, until a `FullGraphLoader` of it is
    iterated again. Call this on all ranks, between its epochs: a forward that trains on a batch from before raises
    `HybridError`. Hooks of message passing belong to the blocks of such loaders, whatever graph they are of, and stay
    (`route_ops`).

    Sampler processes (`num_samplers`) keep the plugin as they were started with it, what they hold too, as they do if
    `enable` is called again with other arguments.
    """
    _fall_silent(_plugin)  # while its hooks still announce
    _remove()
    give_back()


def _fall_silent(plugin: HaloPlugin | None) -> None:
    global _silent
    client = kvstore.get_kvstore()
    if plugin is None or not dist_context.is_initialized() or not isinstance(client, kvstore.KVClient):
        return
    try:
        silent = plugin.written_fields(client)
        silent.fall_silent()
    except (OSError, DGLError, ExchangeError) as error:
        # Where servers are gone the job is at its end, and what ended it is to be seen.
        _logger.warning("servers could not be told that dgl_hybrid is off in this process (%s)", error)
    else:
        _silent = silent


def _silent_since_connecting() -> WrittenFields | None:
    """Says what nobody could say before: this process has been connected with the plugin off, and may have written."""
    client = kvstore.get_kvstore()
    if not dist_context.is_initialized() or not isinstance(client, kvstore.KVClient):
        return None
    silent = WrittenFields(client)
    silent.fall_silent()
    return silent


def _remove() -> None:
    global _plugin, _exported
    if _plugin is not None:
        _plugin.remove()
        repairs.switch_off()
        os.environ.pop(ENABLE_VARIABLE, None)
    _plugin = _exported = None


def held_bytes() -> int:
    """Returns what this process holds of other machines' rows and in-edge lists; 0 when the plugin is off."""
    return 0 if _plugin is None else _plugin.num_bytes


def enable_from_environment() -> None:
    """Turns the plugin on as a parent process has it; without the variable, or where it says off, nothing happens.

    Raises:
        ValueError: The variable holds what `HaloConfig.from_environment` cannot read.
    """
    value = os.environ.get(ENABLE_VARIABLE, "")
    if value not in ("", *OFF_WORDS):
        config = HaloConfig.from_environment(value)
        enable(strategy=config.strategy, budget=config.budget)
