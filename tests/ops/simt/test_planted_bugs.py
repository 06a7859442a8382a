# SPDX-License-Identifier: Apache-2.0
"""Bugs planted into the kernels' source, each of which the host's tests must catch: the tests of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.ops.simt.build import SOURCE, needs_compiler
from tests.ops.simt.cases import make_case
from tests.ops.simt.guarded import CRASHED, FAULT, WRONG, run_isolated

pytestmark = needs_compiler

SUM = ("SPMM", ("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_HEAD"))
MAX = ("SPMM", ("REDUCE=REDUCE_MAX", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_HEAD"))
SELECT = ("SPMM_SELECT", ("WEIGHT=WEIGHT_HEAD",))
SDDMM = ("SDDMM", ("OP=OP_SUB", "LHS=TARGET_U", "RHS=TARGET_V"))
DOT = ("SDDMM_DOT", ("LHS=TARGET_U", "RHS=TARGET_V"))
SOFTMAX = ("SOFTMAX", ())
GAT = ("GAT", ("DROPOUT=1",))
GAT_BACKWARD = ("GAT_BACKWARD", ("DROPOUT=1",))
GATV2 = ("GATV2", ("DROPOUT=1",))
GATV2_BACKWARD = ("GATV2_BACKWARD", ("DROPOUT=1",))


@dataclass(frozen=True)
class Bug:
    name: str
    old: str
    new: str
    kernels: tuple[str, tuple[str, ...]]
    profile: str = "idle_lanes"
    caught_as: tuple[int, ...] = (WRONG,)
    operands: str = "normal"
    slow: bool = True


BUGS = [
    # Groups, masks and shuffles
    Bug(
        "mask of the whole warp for a group of it",
        "return (u32)(((u64)1 << GROUP) - 1) <<",
        "return 0xffffffffu | (u32)",
        DOT,
        caught_as=(FAULT,),
        slow=False,
    ),
    Bug(
        "idle lanes leave before a shuffle",
        "sum = 0.f;\n#pragma unroll 4\n",
        "sum = 0.f;\n  if (!lane.on) return;\n#pragma unroll 4\n",
        SOFTMAX,
        "odd_width",
        caught_as=(FAULT,),
    ),
    Bug(
        "lanes without a column leave before a shuffle",
        "  HeadRow own, attention_row;\n",
        "  HeadRow own, attention_row;\n  if (head_column(0) >= width) return;\n",
        GATV2,
        "half_full",
        caught_as=(FAULT,),
    ),
    Bug(
        "shuffle from another group",
        "__shfl_xor_sync(group_mask(), value, offset)",
        "__shfl_xor_sync(group_mask(), value, offset * GROUP)",
        DOT,
        caught_as=(FAULT,),
    ),
    Bug(
        "butterfly lacks a step",
        "for (int offset = 1; offset < GROUP; offset *= 2) value",
        "for (int offset = 2; offset < GROUP; offset *= 2) value",
        DOT,
        "prime_width",
    ),
    Bug(
        "softmax lanes of other heads merged",
        "for (int offset = head_lanes; offset < GROUP; offset *= 2) {",
        "for (int offset = 1; offset < GROUP; offset *= 2) {",
        SOFTMAX,
    ),
    # Entries, tasks and splits
    Bug(
        "indices read one too far",
        "      if (k < end) {\n        if (NODES)",
        "      if (k <= end) {\n        if (NODES)",
        SUM,
        caught_as=(CRASHED,),
        slow=False,
    ),
    Bug(
        "last entry of a task dropped",
        "if (k + q < task.end) {\n        const i64 source",
        "if (k + q < task.end - 1) {\n        const i64 source",
        SUM,
    ),
    Bug(
        "partials of a row overwrite each other",
        "store_floats(partial + (i64)task.slot * columns",
        "store_floats(partial + (i64)0 * columns",
        SUM,
    ),
    Bug(
        "merge drops the last slot",
        "end = split_slots[split + 1];\n  double sums[VEC] = {};\n",
        "end = split_slots[split + 1] - 1;\n  double sums[VEC] = {};\n",
        SUM,
        slow=False,
    ),
    Bug(
        "merge writes the split's number as its row",
        "store_features(out + (split_row ? (i64)split_row[split] : split)",
        "store_features(out + (split)",
        SUM,
    ),
    Bug(
        "selection drops a slot",
        "for (int slot = begin + 1; slot < end;",
        "for (int slot = begin + 2; slot < end;",
        MAX,
    ),
    Bug("edge ids forgotten", "edge[q] = edge_ids ? __ldg(edge_ids + k) : (Index)k;", "edge[q] = (Index)k;", SUM),
    Bug(
        "split softmax rows take the first row's sum",
        "(i64)slot_split[slot] * heads",
        "(i64)slot_split[0] * heads",
        SOFTMAX,
        "odd_width",
    ),
    # Columns and types
    Bug(
        "lanes' columns overlap",
        "column = (blockIdx.y * GROUP + group_lane()) * VEC;",
        "column = blockIdx.y * GROUP * VEC + group_lane();",
        SDDMM,
        "three_tiles",
        caught_as=(WRONG, CRASHED),
    ),
    Bug(
        "columns past the end written",
        "if (t >= num_tasks || column >= columns) return;",
        "if (t >= num_tasks) return;",
        SDDMM,
        "three_tiles",
        caught_as=(WRONG, CRASHED),
    ),
    Bug(
        "head of a column",
        "const int head = column / width;",
        "const int head = column / heads;",
        SUM,
        "half_full",
        caught_as=(WRONG, CRASHED),
    ),
    Bug("bfloat16 truncated", "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "bits >> 16", MAX, "odd_width"),
    Bug(
        "upper half of int64 indices lost",
        "(u64)pack.words[2 * i + 1] << 32 | pack.words[2 * i]",
        "pack.words[2 * i]",
        ("SPMM", ("REDUCE=REDUCE_MAX", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE")),
        "full_warp",
        operands="far_edge_rows",
    ),
    # Reductions
    Bug(
        "the last of equals wins",
        "value > best : value < best",
        "value >= best : value <= best",
        MAX,
        operands="special",
        slow=False,
    ),
    Bug("NaN loses", "  if (value != value) return best == best;\n", "", MAX, operands="special"),
    Bug(
        "selection by position instead of edge row",
        "if (winners[q][i] != entries.edge[q]) continue;",
        "if (winners[q][i] != (Index)(k + q)) continue;",
        SELECT,
    ),
    Bug(
        "selected gradient without its weight",
        "feature(gradients[q], i) * weights[q];",
        "feature(gradients[q], i) + 0.f * weights[q];",
        SELECT,
    ),
    Bug(
        "weights' gradient of every column",
        "if (winners[i] == entries.edge[q]) sums[q]",
        "if (winners[i] >= 0) sums[q]",
        SELECT,
    ),
    Bug("operands exchanged", "return lhs - rhs;", "return rhs - lhs;", SDDMM),
    Bug(
        "destination taken for source",
        "TARGET == TARGET_U ? (i64)entries.node[q] : TARGET == TARGET_V ? row",
        "TARGET == TARGET_V ? (i64)entries.node[q] : TARGET == TARGET_U ? row",
        SDDMM,
        caught_as=(WRONG, CRASHED),
    ),
    Bug(
        "dot product of the first chunk only",
        "column < width; column += GROUP * VEC) {\n      Features left",
        "column < GROUP * VEC && column < width; column += GROUP * VEC) {\n      Features left",
        DOT,
        "wide_heads",
    ),
    # Softmax, GAT, GATv2
    Bug("sum not rescaled", "sum *= expf(maximum - shift);", "", SOFTMAX, "one_lane"),
    Bug(
        "all-masked batch gives NaN", "return maximum == NEGATIVE_INFINITY ? 0.f : maximum;", "return maximum;", SOFTMAX
    ),
    Bug(
        "softmax gradient without the sum",
        "to_float(out[at]) * (to_float(grad[at]) - sum)",
        "to_float(out[at]) * to_float(grad[at])",
        SOFTMAX,
    ),
    Bug("weights not rescaled", "weight_sum *= rescale;", "", GAT, slow=False),
    Bug(
        "dropped weights missing in the sum",
        "      weight_sum += weight;\n      weight *= DROPOUT_FACTOR(entries.edge[q]);\n",
        "      weight *= DROPOUT_FACTOR(entries.edge[q]);\n      weight_sum += weight;\n",
        GAT,
    ),
    Bug("all heads share a mask", "u32 word = (u32)row_word + column_word;", "u32 word = (u32)row_word;", GAT),
    Bug("mask by the low word only", "  word ^= (u32)(row_word >> 32);\n", "", GATV2),
    Bug("edge keys ignored", "(edge_keys ? edge_keys[edge] : (i64)(edge))", "((i64)(edge))", GAT),
    Bug(
        "log-sum-exp without the maximum",
        "lse[task.row * heads + head] = empty ? 0.f : maximum + logf(weight_sum);",
        "lse[task.row * heads + head] = empty ? 0.f : logf(weight_sum);",
        GAT,
    ),
    Bug(
        "rows without entries divide by zero",
        "result[i] = empty ? 0.f : result[i] / weight_sum;",
        "result[i] = result[i] / weight_sum;",
        GAT,
    ),
    Bug(
        "merge ignores the tasks' maxima",
        "const float factor = expf(partial_max[(i64)slot * heads + head] - shift);",
        "const float factor = 1.f;",
        GATV2,
        slow=False,
    ),
    Bug(
        "d_logit at the position of the entry",
        "d_logit[(i64)entries.edge[q] * heads + head] = d_z;",
        "d_logit[(k + q) * heads + head] = d_z;",
        GAT_BACKWARD,
        slow=False,
    ),
    Bug(
        "leaky_relu's slope forgotten",
        "(factor * dots[q] - term[q].z) * (z > 0.f ? 1.f : slope);",
        "(factor * dots[q] - term[q].z);",
        GAT_BACKWARD,
    ),
    Bug("delta forgotten", "(factor * dots[q] - term[q].z)", "(factor * dots[q])", GAT_BACKWARD),
    Bug(
        "delta without its columns past the first chunk",
        "terms)[at] = quad;",
        "terms)[at] = quad, ((float4*)terms)[at].z -= 1e-3f;",
        GAT_BACKWARD,
    ),
    Bug(
        "every tile computes the first one",
        "blockIdx.y * TILE + (p * GROUP",
        "0 * TILE + (p * GROUP",
        GAT_BACKWARD,
        "wide_heads",
    ),
    Bug(
        "wide heads count a tile twice",
        "      if (gridDim.y == 1) {\n#pragma unroll\n        for (int p",
        "      {\n#pragma unroll\n        for (int p",
        GAT_BACKWARD,
        "wide_heads",
    ),
    Bug(
        "gradient through the logit forgotten",
        "sums.values[p][i] += d_z * attention_row.at(p, i) * (inner > 0.f ? 1.f : slope);",
        "(void)inner;",
        GATV2_BACKWARD,
    ),
    Bug(
        "workers skip tasks",
        "t < num_tasks; t += num_workers)",
        "t < num_tasks - 1; t += num_workers)",
        GATV2_BACKWARD,
        caught_as=(WRONG,),
    ),
    Bug(
        "attention's gradient of the last task only",
        "    HeadSums sums;\n    sums.clear();\n",
        "    HeadSums sums;\n    sums.clear();\n    attention_sums.clear();\n",
        GATV2_BACKWARD,
    ),
]


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if bug.slow else []) for bug in BUGS]
)
def test_bug_is_caught(bug: Bug) -> None:
    source = SOURCE.read_text("utf-8")
    assert bug.old in source, "the source has changed: plant the bug elsewhere"
    case = make_case(*bug.kernels, bug.profile)
    assert run_isolated([case], "end", source=source.replace(bug.old, bug.new), operands=bug.operands) in bug.caught_as


@pytest.mark.slow
@pytest.mark.parametrize("operands", ["normal", "special"])
def test_unchanged_source_passes_where_bugs_are_caught(operands: str) -> None:
    cases = {(bug.kernels, bug.profile) for bug in BUGS if bug.operands == operands}
    assert (
        run_isolated([make_case(*kernels, profile) for kernels, profile in sorted(cases)], "end", operands=operands)
        == 0
    )
