// SPDX-License-Identifier: Apache-2.0
//
// Message passing on sparse graphs: all kernels, in one source. NVRTC compiles it for the device; for tests, g++ compiles the same text
// against tests/ops/simt/simt_host.h (-DSIMT_HOST). It includes nothing on the device. There are no atomics: every value is summed in an
// order that depends on the operands' shapes alone, so two runs give the same bits.
//
// ---- Kernel ABI --------------------------------------------------------------------------------------------------------------------
//
// Shapes: S sources, N destinations, E edges, H heads, D width per head; x is (S, H, D), contiguous. "Rows" are those of the adjacency
// given (destinations for in-edges, sources for out-edges); "entries" are its E positions; "edge rows" are rows of tensors with E rows.
//
// Specialisation. One compilation holds the kernels of one family and one set of options:
//   -DKERNELS=KERNELS_SPMM | KERNELS_SPMM_SELECT | KERNELS_SDDMM | KERNELS_SDDMM_DOT | KERNELS_SOFTMAX | KERNELS_GAT |
//             KERNELS_GAT_BACKWARD | KERNELS_GATV2 | KERNELS_GATV2_BACKWARD
//   -DDTYPE=DTYPE_F32 | DTYPE_F16 | DTYPE_BF16     T: type of features, weights, logits
//   -DINDEX_BITS=32 | 64                           Index: type of task_begin, task_row, indices, edge_ids, arg, split_row, slot_task
//   -DGROUP=1 | 2 | 4 | 8 | 16 | 32                lanes of a warp that work on one task
//   -DVEC=1 | 2 | 4 | 8                            elements per load: VEC * sizeof(T) <= 16; see "Alignment"
//   -DPACKS=1 | 2 | ... (families by head)         loads per lane that hold one head's row; (VEC * PACKS <= 32)
//   -DBATCH=4 (optional)                           entries in flight per lane
//   -DREDUCE=REDUCE_SUM | REDUCE_MAX | REDUCE_MIN                  SPMM only
//   -DWEIGHT=WEIGHT_NONE | WEIGHT_HEAD | WEIGHT_COLUMN             SPMM and SPMM_SELECT; COLUMN: D = 1, w has a value per column
//   -DSOURCE=SOURCE_NODES | SOURCE_EDGES                           SPMM only; EDGES: x has E rows, read at the entry's edge row
//   -DOP=OP_ADD | OP_SUB | OP_MUL | OP_DIV | OP_COPY               SDDMM only
//   -DLHS=TARGET_U | TARGET_V | TARGET_E, -DRHS=...                SDDMM and SDDMM_DOT; u = indices[entry], v = row, e = edge row
//   -DDROPOUT=0 | 1                                                GAT, GAT_BACKWARD, GATV2, GATV2_BACKWARD
// Options that a family does not name are ignored, except DTYPE, INDEX_BITS and GROUP, which all families take.
//
// Alignment. With VEC > 1, every pointer to T must be aligned to VEC * sizeof(T) bytes, every float pointer ("partial") to
// min(16, 4 * VEC) bytes, every arg pointer to min(16, VEC * sizeof(Index)) bytes. VEC divides
//   H * D in SPMM with WEIGHT_NONE or WEIGHT_COLUMN, SPMM_SELECT's spmm_select_bwd_kernel likewise, and SDDMM;
//   D     in SPMM and SPMM_SELECT with WEIGHT_HEAD, SPMM_SELECT's spmm_select_edges_bwd_kernel, and all other families.
// VEC = 1 always works. A good choice is the largest VEC that is allowed, then the smallest GROUP with GROUP * VEC >= columns (at most
// 32), where columns is H * D (flat kernels) or D (kernels by head); kernels by head then take PACKS = ceil(D / (GROUP * VEC)), limited
// to VEC * PACKS <= 32; wider heads go in tiles along grid.y.
//
// Tasks. A task is a run of entries of one row; a row is cut into tasks of at most C entries (C is the launcher's choice), and a row
// without entries has one empty task. The list is three arrays:
//   task_begin (T + 1,) Index: task t covers entries task_begin[t] .. task_begin[t + 1]; tasks follow each other in row order
//   task_row   (T,) Index or null: row of task t; null: task t is row t
//   task_slot  (T,) int32 or null: -1 if the row has one task, which writes the row's result; else the task's slot, under which it writes
//              partial results. Slots are numbered in task order, 0 .. num_slots - 1. null: no row is split (task_begin = indptr will do)
// Split rows are merged in slot order by a second kernel, from
//   split_row (R,) Index or null: the split rows (null: write compactly, at 0 .. R - 1); split_slots (R + 1,) int32: slots of the i-th
//   one are split_slots[i] .. split_slots[i + 1]. The merge kernels are launched only if R > 0. Splits are for kernels with row results; kernels
//   that write only edge rows ("tasks, no slots") ignore task_slot but take it all the same.
//
// Launch. block = (128, 1, 1) always, no dynamic shared memory. grid.x = ceil(units * GROUP / 128) where "units" is named per kernel;
// grid.y is named per kernel (1 if not). Argument types: i64 = long long, i32 = int, u64 = unsigned long long, f32 = float; pointers are
// 64-bit device addresses. TASKS stands for the four arguments
//   const Index* task_begin, const Index* task_row, const i32* task_slot, i64 num_tasks
// SPLITS stands for: const Index* split_row, const i32* split_slots, i64 num_split
// DROPOUT stands for (always present; ignored with DROPOUT=0):
//   const i64* edge_keys (E,) by edge row or null (the edge row itself), u64 key0, u64 key1, i32 threshold, f32 scale
//   threshold = min(round(p * 2**32), 2**32 - 1) - 2**31; scale = 1 / (1 - p), or 0 for p = 1
// edge_ids is (E,) Index or null (entry k is edge row k). el, er, lse, terms, d_el, d_logit and all partials are float.
//
// KERNELS_SPMM: out[row] = reduce over the row's entries of x[source] * w[edge]
//   spmm_fwd_kernel(TASKS, const Index* indices (null with SOURCE_EDGES), const Index* edge_ids, const T* x, const T* w (E, H) | null,
//                   T* out (rows, H, D), Index* arg (rows, H, D) | null with REDUCE_SUM, f32* partial (slots, H * D),
//                   Index* partial_arg (slots, H * D) | null with REDUCE_SUM, i32 H, i32 D)
//                   units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC)).  arg = edge row of the winner, -1 in rows without entries
//   REDUCE_SUM:  sum_merge_kernel(SPLITS, const f32* partial, T* out, i32 columns = H * D)        units = R, grid.y as above
//   MAX and MIN: select_merge_kernel(SPLITS, const f32* partial, const Index* partial_arg, T* out, Index* arg, i32 columns)   likewise
//   segment_reduce is spmm_fwd_kernel with SOURCE_EDGES, WEIGHT_NONE, task_begin from the offsets, edge_ids = null.
//
// KERNELS_SPMM_SELECT: backward of max and min
//   spmm_select_bwd_kernel(TASKS of out_edges, const Index* indices, const Index* edge_ids, const T* grad (N, H, D), const Index* arg (N, H, D),
//                   const T* w | null, T* dx (S, H, D), f32* partial (slots, H * D), i32 H, i32 D)
//                   units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
//   sum_merge_kernel as in SPMM, with out = dx
//   spmm_select_edges_bwd_kernel(TASKS of in_edges (no slots), const Index* indices, const Index* edge_ids, const T* grad, const Index* arg,
//                   const T* x | null (copy_e), T* dw (E, H), i32 H, i32 D)       units = num_tasks * H.  WEIGHT is ignored
//
// KERNELS_SDDMM: out[edge row] = lhs op rhs, elementwise
//   sddmm_fwd_kernel(TASKS of in_edges (no slots), const Index* indices, const Index* edge_ids, const T* lhs (., H, D), const T* rhs | null,
//                   T* out (E, H, D), i32 H, i32 D)                units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
// KERNELS_SDDMM_DOT: out[edge row, h] = sum over D of lhs * rhs
//   sddmm_dot_fwd_kernel(the same arguments, T* out (E, H))       units = num_tasks * H
//
// KERNELS_SOFTMAX (VEC is not used): over the entries of each row, per head. head_lanes: power of two <= GROUP, best the smallest one >= H
//   edge_softmax_fwd_kernel(TASKS, const Index* edge_ids, const T* logits (E, H), T* out (E, H), f32* partial_max (slots, H),
//                   f32* partial_sum (slots, H), i32 H, i32 head_lanes)            units = num_tasks, grid.y = ceil(H / head_lanes)
//   then, if R > 0 (slot_task (num_slots,) Index: task of a slot; slot_split (num_slots,) i32: which of the R split rows it belongs to):
//   softmax_merge_kernel(const i32* split_slots, i64 num_split, const f32* partial_max, const f32* partial_sum, f32* split_max (R, H),
//                   f32* split_sum (R, H), i32 H)                                  grid.x = ceil(R * H / 128)
//   edge_softmax_split_fwd_kernel(const Index* task_begin, const Index* slot_task, const i32* slot_split, i64 num_slots, const Index* edge_ids,
//                   const T* logits, T* out, const f32* split_max, const f32* split_sum, i32 H, i32 head_lanes)
//                   units = num_slots, grid.y = ceil(H / head_lanes)
//   edge_softmax_bwd_kernel(TASKS, const Index* edge_ids, const T* out, const T* grad, T* d_logits, f32* partial_sum (slots, H), i32 H,
//                   i32 head_lanes)                                                units, grid.y as forward
//   sum_merge_f32_kernel(SPLITS with split_row = null, const f32* partial_sum, f32* split_sum (R, H), i32 columns = H)   grid.x = ceil(R * H / 128)
//   edge_softmax_split_bwd_kernel(const Index* task_begin, const Index* slot_task, const i32* slot_split, i64 num_slots, const Index* edge_ids,
//                   const T* out, const T* grad, T* d_logits, const f32* split_sum, i32 H, i32 head_lanes)   as edge_softmax_split_fwd_kernel
//
// KERNELS_GAT: out = sum of drop(softmax(leaky_relu(el[u] + er[v]))) * x[u];  flat in columns, VEC divides D
//   gat_fwd_kernel(TASKS, const Index* indices, const Index* edge_ids, const T* x, const f32* el (S, H), const f32* er (N, H), T* out (N, H, D),
//                   f32* lse (N, H), f32* partial (slots, H, D), f32* partial_max (slots, H), f32* partial_sum (slots, H), i32 H, i32 D, f32 slope,
//                   DROPOUT)                                       units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
//   gat_merge_kernel(SPLITS, const f32* partial, const f32* partial_max, const f32* partial_sum, T* out, f32* lse, i32 H, i32 D)
//                                                                  units = R, grid.y = ceil(H * D / (GROUP * VEC))
// KERNELS_GAT_BACKWARD (by head, PACKS); tiles = ceil(D / (GROUP * VEC * PACKS))
//   gat_terms_kernel(const T* grad (N, H, D), const T* out (N, H, D), const f32* er | null (taken as 0), const f32* lse, f32* terms (N, H, 4), 16-byte aligned,
//                   i64 N, i32 H, i32 D)                           units = N * H.  terms = (er, lse, sum over D of grad * out, 0)
//   gat_bwd_kernel(TASKS of out_edges, const Index* indices, const Index* edge_ids, const T* x, const T* grad, const f32* el, const f32* terms,
//                   T* dx (S, H, D), f32* d_el (S, H), f32* d_logit (E, H), f32* partial (slots, H, D), f32* partial_el (slots, H), i32 H, i32 D, f32 slope,
//                   DROPOUT)                                       units = num_tasks * H, grid.y = tiles
//   sum_merge_kernel (out = dx) and sum_merge_f32_kernel (partial_el -> d_el, columns = H, grid.x = ceil(R * H / 128))
//   d_er is spmm_fwd_kernel (F32, SOURCE_EDGES, REDUCE_SUM) of d_logit over in_edges.
// KERNELS_GATV2 (by head, PACKS): out = sum of drop(softmax(attention . leaky_relu(x_src[u] + x_dst[v]))) * x_src[u]
//   gatv2_fwd_kernel(TASKS, const Index* indices, const Index* edge_ids, const T* x_src, const T* x_dst, const T* attention (H, D), T* out, f32* lse,
//                   f32* partial, f32* partial_max, f32* partial_sum, i32 H, i32 D, f32 slope, DROPOUT)     units = num_tasks * H, grid.y = tiles
//   gat_merge_kernel as in GAT
// KERNELS_GATV2_BACKWARD (by head, PACKS)
//   gat_terms_kernel (er = null)
//   gatv2_src_bwd_kernel(TASKS of out_edges, const Index* indices, const Index* edge_ids, const T* x_src, const T* x_dst, const T* attention, const T* grad,
//                   const f32* terms, T* dx_src (S, H, D), f32* d_logit (E, H), f32* partial (slots, H, D), i32 H, i32 D, f32 slope, DROPOUT)
//                   units = num_tasks * H, grid.y = tiles
//   gatv2_dst_bwd_kernel(TASKS of in_edges, i64 num_workers, const Index* indices, const Index* edge_ids, const T* x_src, const T* x_dst, const T* attention,
//                   const f32* d_logit, T* dx_dst (N, H, D), f32* partial (slots, H, D), f32* partial_attention (num_workers, H, D), i32 H, i32 D, f32 slope)
//                   units = num_workers * H, grid.y = tiles.  Worker i takes tasks i, i + num_workers, ...; choose num_workers by the shapes alone
//                   (for example min(num_tasks, 4096)), since the order of the sums depends on it
//   sum_merge_kernel twice (dx_src by out_edges' splits, dx_dst by in_edges'); d_attention is spmm_fwd_kernel (F32, SOURCE_EDGES, REDUCE_SUM, H = 1,
//   D = H * D) of partial_attention as one row of num_workers entries, cut into tasks like any other.
