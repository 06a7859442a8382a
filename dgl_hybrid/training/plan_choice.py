# SPDX-License-Identifier: Apache-2.0
"""By which plan a loader's epochs run: made for its model, tried beside others in turns, made anew when costs drift."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dgl_hybrid.errors import ExchangeError, HybridError
from dgl_hybrid.exchange.communicator import Communicator, is_on_all_ranks
from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.graph.model_copy import left_as_it_was
from dgl_hybrid.planner import DependencyPlan
from dgl_hybrid.training.plan_trials import PlanTrials
from dgl_hybrid.training.planning import PlanMaker, PlanOutcome, TraceError, with_dense_below
from dgl_hybrid.training.seen_calls import MOST_CHECKS, Seen, SeenCalls

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_told_of: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Wrappers for which something stands, as was said: plans are made anew, and for several loaders."""


class PlanChoice:
    """Decides; what is decided for is built by the loader, which tells how long epochs and changes of plans took.

    Every method is collective, with the same arguments on all ranks but for models and calls; properties are not.

    Args:
        communicator: Of the ranks.
        maker: Makes plans.
        calls: Which models were called, and how.
        num_layers: Of the loader's blocks.
        share: Of the time trained that trials of plans may take; 0: none.
        is_fixed: The script gives a plan, which stays.
        given: That plan; None if it is bare ids, or none is given.

    Attributes:
        outcome: The plan that runs, and why; None until there is one.
        trials: Of its candidates, if there are any and they may be tried.
        is_fixed: What runs stays, whatever the model: a plan was given, or none can be made.
        normed_below: Levels below this one hold every vertex where another call stands for the outermost one, whose
            batch norm no trace sees then; alike on all ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        maker: PlanMaker,
        calls: SeenCalls,
        *,
        num_layers: int,
        share: float,
        is_fixed: bool,
        given: DependencyPlan | None = None,
    ) -> None:
        self._communicator, self._num_layers, self._share, self._given = communicator, num_layers, share, given
        self.maker, self.calls = maker, calls
        self.is_fixed, self._is_checked = is_fixed, not is_fixed
        self.outcome: PlanOutcome | None = None
        self.trials: PlanTrials | None = None
        self.normed_below = 0
        self._is_planned = False
        self._planned_under: torch.dtype | None = None
        """The autocast."""
        self._is_warned = False

    # ---------------------------------------------------------------- where it stands

    @property
    def best_plan(self) -> DependencyPlan | None:
        """The fastest known so far, or the one that was given; None: there is none yet."""
        if self.outcome is None:
            return self._given
        if self.trials is None or not self.trials.is_trying:
            return self.outcome.plan
        return self.outcome.candidates[self.trials.fastest]

    @property
    def is_settled(self) -> bool:
        """Whether the plan stays from now on: it is made, and trials are over."""
        return (self.outcome is not None or self.is_fixed) and (self.trials is None or self.trials.is_settled)

    @property
    def is_in_trials(self) -> bool:
        """Whether plans take turns, and more of them are to be built."""
        return self.trials is not None and not self.trials.is_settled

    @property
    def is_trying(self) -> bool:
        """Whether this epoch's plan runs to be measured, or there is none yet; not whether it is the best one known."""
        return (self.outcome is None and not self.is_fixed) or (self.trials is not None and self.trials.is_trying)

    @property
    def needs_call(self) -> bool:
        """Whether a plan is made, or a given one checked, once it is known how the model is called."""
        return self.outcome is None and not (self.is_fixed and self._is_checked)

    @property
    def is_called_otherwise(self) -> bool:
        """Whether the model is called with another autocast than it was planned for: nothing is kept, overlaps or comes
        in chunks under it, so that plans for the model without it are wrong then.
        """
        return self.calls.has_seen_any and self._is_planned and self.calls.autocast != self._planned_under

    # ---------------------------------------------------------------- planning

    def plan(self, model: nn.Module, template: CallTemplate, *, is_trained: bool = True) -> PlanOutcome:
        """Makes a plan, and begins to try its candidates if there is a choice.

        Args:
            model: The user's.
            template: How it is called.
            is_trained: Alike on all ranks; see `PlanMaker.make`.

        Raises:
            BlockError, TraceError, PlanError: On all ranks; see `PlanMaker.make`.
        """
        outcome, planning_s = self._make(model, template, is_trained=is_trained)
        self.outcome, self.trials = outcome, None
        if self._share > 0.0 and len(outcome.candidates) > 1:
            self.trials = PlanTrials(
                len(outcome.candidates),
                self.favourites(outcome),
                self._share,
                predicted_s=outcome.predicted_s,
                planning_s=planning_s,
            )
        return outcome

    def plan_for_call(self) -> PlanOutcome | None:
        """Plans from the call that was seen; with a fixed plan, checks the model alone.

        Returns:
            What is to be built; None: what there is stays.
        """
        seen = self._seen_call()
        if seen is None:
            return None
        try:
            if not self.is_fixed:
                is_trained = self._any_has_trained()
                outcome, is_stand_in = self._of_first_that_runs(
                    seen, lambda *call: self.plan(*call, is_trained=is_trained)
                )
                if not is_stand_in:
                    self.calls.forget_inner_calls()
                return outcome
            self._is_checked = True
            self._is_planned, self._planned_under = True, self.calls.autocast
            self._of_first_that_runs(seen, self.maker.trace)
            self.calls.forget_inner_calls()
        except TraceError as error:
            # The model runs, only not on blocks made up for the trace: go on as before, which is exact but for mixing.
            self.is_fixed = self._is_checked = True
            self.calls.forget_inner_calls()
            _logger.warning(
                "%s; no plan is made and nothing checked, everything stays as it is%s", error, self._of_budget()
            )
        return None

    def check_other_models(self) -> PlanOutcome | None:
        """Checks models that train on this loader besides the one that plans were made for, and finds which levels have
        to hold every vertex for them.

        Returns:
            What is to be built, if the plan that runs holds fewer; None: what there is stays.
        """
        others = self.calls.take_others()
        places = range(MOST_CHECKS)
        told = self._communicator.gather_ints(
            [int(place < len(others) and others[place] is not None) for place in places]
        )
        for place in places:
            if not all(are_there[place] for are_there in told):
                continue
            other = others[place]
            assert other is not None
            try:
                traced, _ = self._of_first_that_runs(other, self.maker.trace)
            except TraceError as error:
                _logger.warning("%s; nothing of it is checked", error)
            else:
                self.maker.dense_below = max(self.maker.dense_below, traced.dense_below)
        if self.outcome is None or self.outcome.dense_below >= self.maker.dense_below:
            return None
        dense_below = self.maker.dense_below
        self.outcome = replace(
            self.outcome,
            plan=with_dense_below(self.outcome.plan, dense_below),
            candidates=tuple(with_dense_below(plan, dense_below) for plan in self.outcome.candidates),
            dense_below=dense_below,
        )
        return self.outcome

    def forget_basis(self) -> None:
        """Drops what the plan was made from: nobody asks before epochs slow down, and then it is made anew."""
        if self.outcome is not None and self.outcome.basis is not None:
            self.outcome = replace(self.outcome, basis=None)

    def favourites(self, outcome: PlanOutcome) -> list[int]:
        """Returns the positions of the plans that one would choose without measuring: the pure ones and NeutronStar's.

        Those of rank 0: where NeutronStar's greedy takes too long for a rank's halo, another plan has its place there,
        and ranks that do not favour the same positions would end trials with different plans.
        """
        pure = ("depcache", "depcomm", "neutronstar")
        own = [position for position, plan in enumerate(outcome.candidates) if plan.strategy in pure]
        favourites: list[int] = self._communicator.broadcast_json(own)
        return favourites

    def _any_has_trained(self) -> bool:
        """Tells whether a call was seen, on any rank, that trains. Collective."""
        told = self._communicator.gather_ints([int(self.calls.has_seen_training)])
        return any(has_trained for (has_trained,) in told)

    def _make(self, model: nn.Module, template: CallTemplate, *, is_trained: bool = True) -> tuple[PlanOutcome, float]:
        """Returns a plan and the seconds it took the slowest rank to find it."""
        start_ns = time.perf_counter_ns()
        # What is planned for may be called inside of the outermost call.
        under = self.calls.autocast if self.calls.has_seen_any else template.autocast
        self._is_planned, self._planned_under = True, under
        outcome = self.maker.make(model, template, is_trained=is_trained)
        took = self._communicator.gather_ints([time.perf_counter_ns() - start_ns])
        return outcome, max(ns for (ns,) in took) / 1e9

    def _of_budget(self) -> str:
        return "" if self.maker.memory_budget_bytes is None else "; the memory budget is not kept"

    def _of_first_that_runs(self, seen: Seen, use: Callable[[nn.Module, CallTemplate], T]) -> tuple[T, bool]:
        """Uses an outermost call, or, if that cannot be made on other blocks, the first one inside of it that can.

        Args:
            seen: That call; one was seen on all ranks.
            use: Collective, and raises on all ranks if it raises.

        Returns:
            What `use` does, and whether it is of a call that stands for the outermost one.

        Raises:
            TraceError: On all ranks, none can be made: of the outermost.
        """
        told = self._communicator.gather_ints([len(seen.calls), int(seen.is_whole)])
        is_whole = all(of_rank[1] for of_rank in told)
        why, errors = "", list[TraceError]()
        if is_whole:
            try:
                return use(*seen.calls[0]), False
            except TraceError as error:
                why = str(error)
                errors.append(error)
        else:
            why = f"{type(seen.outermost).__name__} is given blocks inside of an object in which no others can be put"
        # Ranks with fewer calls that can be tried leave the others out on all.
        num_inner = min(of_rank[0] - of_rank[1] for of_rank in told)
        for model, template in seen.calls[seen.is_whole :][:num_inner]:
            self._plan_for_batch_norm_beside(model, seen.outermost)
            try:
                # It may call parts of what it is called by, which no copy of it has.
                with left_as_it_was(seen.outermost):
                    used = use(model, template)
            except TraceError as error:
                errors.append(error)
                continue
            if self._communicator.rank == 0 and seen.outermost not in _told_of:
                _told_of.add(seen.outermost)
                _logger.warning(
                    "%s: %s, which it calls with the blocks of all layers, stands for it. What it does besides is "
                    "neither priced nor checked%s",
                    why,
                    type(model).__name__,
                    "" if self.maker.memory_budget_bytes is None else ", nor kept to the memory budget",
                )
            errors.clear()  # they have this frame
            return used, True
        try:
            raise errors[0] if errors else TraceError(why)
        finally:
            errors.clear()

    def _plan_for_batch_norm_beside(self, model: nn.Module, outermost: nn.Module) -> None:
        """Leaves every vertex where batch norm may be that no trace of a model sees which stands for another one.

        That of modules may be anywhere, and begin in a later epoch, as when the first one evaluates.
        """
        inside = set(model.modules())
        norms = [x for x in outermost.modules() if isinstance(x, _BatchNorm) and x not in inside]
        told = self._communicator.gather_ints([len(norms)])
        beside = self._num_layers if any(num_norms for (num_norms,) in told) else self.normed_below
        self.maker.dense_below = max(self.maker.dense_below, beside)

    def _seen_call(self) -> Seen | None:
        """Returns how the model was called, if all ranks have seen it and it is still there."""
        seen = self.calls.first()
        told = self._communicator.gather_ints([int(seen is not None), int(self.calls.is_in_pieces and seen is None)])
        if all(row[1] for row in told):
            self.is_fixed = self._is_checked = True
            if self._communicator.rank == 0:
                _logger.warning(
                    "no module is given the blocks of all %d layers, and uses them, so no plan is made, nothing is "
                    "checked and everything stays as it is. The loss weight of each rank is applied to what the module "
                    "returns that uses the last block: gradients are exact if the loss depends on parameters through "
                    "that alone, and not where a script adds something to it (a skip connection around it) that "
                    "trains, too. Where several modules use the blocks in turn, put these in one nn.Module and call "
                    "that; pass blocks as arguments, in lists, tuples, dicts, dataclasses or namespaces; where the "
                    "model has fewer layers, make the loader for as many%s",
                    self._num_layers,
                    self._of_budget(),
                )
        return seen if all(row[0] for row in told) else None

    # ---------------------------------------------------------------- trials

    def after_epoch(self, epoch_s: float, change_s: float) -> PlanOutcome | None:
        """Takes the last epoch's time to the trials.

        Args:
            epoch_s: Of the slowest rank.
            change_s: What it took before that epoch to change to its plan, of the slowest rank.

        Returns:
            What is to be built, if another plan has its turn; None: what there is stays.
        """
        trials, outcome = self.trials, self.outcome
        if trials is None or outcome is None:
            return None
        before, was_settled = trials.current, trials.is_settled
        trials.record(epoch_s, change_s)
        if trials.is_settled and not was_settled and self._communicator.rank == 0:
            measured = ", ".join(
                f"{plan.strategy} {1e3 * (time_s or 0.0):.3g} ms"
                for plan, time_s in zip(outcome.candidates, trials.measured_s, strict=True)
            )
            _logger.info("measured %s: staying with %s", measured, outcome.candidates[trials.current].strategy)
        if trials.has_drifted:
            return self.plan_anew()
        if trials.current == before:
            return None
        self.outcome = replace(outcome, plan=outcome.candidates[trials.current])
        return self.outcome

    def plan_anew(self) -> PlanOutcome:
        """Costs have drifted: measures rates and the model again and tries what is best now.

        Where rates were given, and where the model is gone, the candidates of before have another turn.
        """
        trials, outcome = self.trials, self.outcome
        assert trials is not None
        assert outcome is not None
        if self._communicator.rank == 0:
            _logger.info(
                "epochs no longer take what plans were chosen by: candidates are tried anew (where epochs only get "
                "longer as training goes on, gradients may have become subnormal: torch.set_flush_denormal)"
            )
        planning_s, seen = 0.0, self._seen_call() if self.maker.measures_rates else None
        if seen is not None:
            self.maker.forget_rates()
            try:
                made, _ = self._of_first_that_runs(seen, self._make)
                outcome, planning_s = made
            except ExchangeError:
                raise
            except Exception as error:  # none fits the memory budget by now, or the model is another one, or no memory
                if not isinstance(error, HybridError) and not is_on_all_ranks(error):
                    raise
                _logger.warning("%s: %s; the plans of before are tried again", type(error).__name__, error)
        trials.begin_anew(
            len(outcome.candidates), self.favourites(outcome), predicted_s=outcome.predicted_s, planning_s=planning_s
        )
        self.outcome = replace(outcome, plan=outcome.candidates[trials.current])
        return self.outcome

    def say_untimed(self) -> None:
        """Says once that an epoch has trained whose time nobody knows. Of this rank alone."""
        if self.trials is not None and not self._is_warned and self._communicator.rank == 0:
            self._is_warned = True
            _logger.warning(
                "plans are to take turns in real epochs, but epochs cannot be timed where the batch is taken by "
                "next(iter(loader)): write `for input_nodes, seeds, blocks in loader`, or give autotune=False"
            )
