# SPDX-License-Identifier: Apache-2.0
"""Decides, per halo vertex and level, whether its row is computed here or received. Pure, but for `probe`."""

from .config import STRATEGIES, PlannerConfig
from .costs import ItemCosts, cost_model
from .estimate import EpochEstimate, RankEstimate, choose_plan
from .explain import explain_vertex
from .forced import random_plan
from .make import Candidate, make_plan, propose_plans
from .memory import chunk_rows_within, least_bytes_in_chunks, unsplit_layers
from .model_times import ModelTimes
from .model_trace import LayerTrace, LevelTrace, ModelTrace, synthetic_trace
from .order import LEAST_GAIN, WorkCounts, propose_orders
from .plan import DependencyPlan, check_plan, plan_objective
from .plan_files import load_plan, save_plan
from .problem import PlanProblem
from .report import ReportRow, report, summarize_plan
from .run_rows import RunRows
from .topology import Topology, uniform_topology
from .worth_trying import find_worth_trying

__all__ = [
    "LEAST_GAIN",
    "STRATEGIES",
    "Candidate",
    "DependencyPlan",
    "EpochEstimate",
    "ItemCosts",
    "LayerTrace",
    "LevelTrace",
    "ModelTimes",
    "ModelTrace",
    "PlanProblem",
    "PlannerConfig",
    "RankEstimate",
    "ReportRow",
    "RunRows",
    "Topology",
    "WorkCounts",
    "check_plan",
    "choose_plan",
    "chunk_rows_within",
    "cost_model",
    "explain_vertex",
    "find_worth_trying",
    "least_bytes_in_chunks",
    "load_plan",
    "make_plan",
    "plan_objective",
    "propose_orders",
    "propose_plans",
    "random_plan",
    "report",
    "save_plan",
    "summarize_plan",
    "synthetic_trace",
    "uniform_topology",
    "unsplit_layers",
]
