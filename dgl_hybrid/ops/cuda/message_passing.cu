// SPDX-License-Identifier: Apache-2.0
//
// Message passing on sparse graphs: all kernels, in one source. NVRTC compiles it for the device; for tests, g++
// compiles the same text against tests/ops/simt/simt_host.h (-DSIMT_HOST). On the device it includes nothing. There are
// no atomics: every value is summed in an order that depends on the operands' shapes alone, so two runs give the same
// bits.
//
// ---- Kernel ABI -----------------------------------------------------------------------------------------------------
//
// Shapes: S sources, N destinations, E edges, H heads, D width per head; x is (S, H, D), contiguous. "Rows" are those
// of the adjacency given (destinations for in-edges, sources for out-edges); "entries" are its E positions; "edge rows"
// are rows of tensors with E rows.
//
// Specialisation. One compilation holds the kernels of one family for one set of options:
//   -DKERNELS=KERNELS_SPMM | KERNELS_SPMM_SELECT | KERNELS_SDDMM | KERNELS_SDDMM_DOT | KERNELS_SOFTMAX | KERNELS_GAT |
//             KERNELS_GAT_BACKWARD | KERNELS_GATV2 | KERNELS_GATV2_BACKWARD
//   -DDTYPE=DTYPE_F32 | DTYPE_F16 | DTYPE_BF16   T: type of features, weights, logits; sums are float
//   -DINDEX_BITS=32 | 64              Index: type of task_begin, task_row, indices, edge_ids, arg, split_row, slot_task
//   -DGROUP=1 | 2 | 4 | 8 | 16 | 32   lanes of a warp that work on one task
//   -DVEC=1 | 2 | 4 | 8               elements per load: VEC * sizeof(T) <= 16; see "Alignment"
//   -DPACKS=1 | 2 | ...               kernels by head: loads per lane that hold a head's row; VEC * PACKS <= 32
//   -DBATCH=4                         entries in flight per lane (optional)
//   -DREDUCE=REDUCE_SUM | REDUCE_MAX | REDUCE_MIN        SPMM
//   -DSOURCE=SOURCE_NODES | SOURCE_EDGES                 SPMM; EDGES: x has E rows, read at the entry's edge row
//   -DWEIGHT=WEIGHT_NONE | WEIGHT_HEAD | WEIGHT_COLUMN   SPMM, SPMM_SELECT; COLUMN: D = 1, a weight per column
//   -DOP=OP_ADD | OP_SUB | OP_MUL | OP_DIV | OP_COPY     SDDMM
//   -DLHS=TARGET_U | TARGET_V | TARGET_E, -DRHS=...      SDDMM, SDDMM_DOT; u = indices[entry], v = row, e = edge row
//   -DDROPOUT=0 | 1                                      GAT, GAT_BACKWARD, GATV2, GATV2_BACKWARD
// A family ignores the options that are not its own; KERNELS, DTYPE, INDEX_BITS and GROUP are always needed.
//
// Alignment. With VEC > 1, pointers to T must be aligned to VEC * sizeof(T) bytes, "partial" to min(16, 4 * VEC) bytes,
// arg to min(16, VEC * sizeof(Index)) bytes. VEC divides
//   H * D in SPMM and spmm_select_bwd_kernel with WEIGHT_NONE or WEIGHT_COLUMN, and in SDDMM;
//   D     in SPMM and spmm_select_bwd_kernel with WEIGHT_HEAD, in spmm_select_edges_bwd_kernel, and all other families.
// VEC = 1 always works. A good choice is the largest VEC that is allowed, then the smallest GROUP with GROUP * VEC >=
// columns (32 at most), where columns is H * D (flat kernels) or D (kernels by head). Kernels by head then take PACKS =
// ceil(D / (GROUP * VEC)), limited to VEC * PACKS <= 32; wider heads go in tiles along grid.y.
//
// Tasks. A task is a run of entries of one row. A row is cut into tasks of at most C entries (C is the launcher's
// choice); a row without entries has one empty task. The list is three arrays:
//   task_begin (T + 1,) Index     task t covers entries task_begin[t] .. task_begin[t + 1]; tasks follow each other in
//                                 row order
//   task_row   (T,) Index | null  row of task t; null: task t is row t
//   task_slot  (T,) i32 | null    -1 if the row has one task, which writes the row's result; else the slot under which
//                                 the task writes its partial result. Slots are numbered in task order from 0. null: no
//                                 row is split, and task_begin may be indptr
// Split rows are merged in slot order by a second kernel, launched only if there are any (R > 0), from
//   split_row   (R,) Index | null   the split rows; null: write compactly, at 0 .. R - 1
//   split_slots (R + 1,) i32        the i-th one has slots split_slots[i] .. split_slots[i + 1]
// Kernels that write only edge rows ("tasks, no slots") take task_slot, but ignore it.
//
// Launch. block = (128, 1, 1), no dynamic shared memory; grid.x = ceil(units * GROUP / 128), where "units" is named per
// kernel; grid.y is 1 if not named. Types: i64 = long long, i32 = int, u64 = unsigned long long, f32 = float; pointers
// are 64-bit device addresses. Abbreviations for arguments:
//   TASKS    const Index* task_begin, const Index* task_row, const i32* task_slot, i64 num_tasks
//   SPLITS   const Index* split_row, const i32* split_slots, i64 num_split
//   SLOTS    const Index* task_begin, const Index* slot_task (num_slots,), const i32* slot_split (num_slots,), i64
//            num_slots: the task of each slot, and which of the R split rows it belongs to
//   EDGES    const Index* indices, const Index* edge_ids; edge_ids is (E,) or null (entry k is edge row k)
//   DROPOUT  const i64* edge_keys, u64 key0, u64 key1, i32 threshold, f32 scale; always present, ignored with
//            DROPOUT=0. edge_keys is (E,) by edge row, or null (the edge row itself); threshold = min(round(p * 2**32),
//            2**32 - 1) - 2**31; scale = 1 / (1 - p), or 0 for p = 1
// el, er, lse, terms, d_el, d_logit and all partials are float.
//
// KERNELS_SPMM: out[row] = reduce over the row's entries of x[source] * w[edge]; arg = edge row of the winner or -1
//   spmm_fwd_kernel(TASKS, EDGES, const T* x, const T* w (E, H) | null, T* out (rows, H, D), Index* arg (rows, H, D),
//       f32* partial (slots, H, D), Index* partial_arg (slots, H, D), i32 H, i32 D)
//       indices are null with SOURCE_EDGES, arg and partial_arg with REDUCE_SUM
//       units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
//   sum_merge_kernel(SPLITS, const f32* partial, T* out, i32 columns = H * D)          for REDUCE_SUM
//   select_merge_kernel(SPLITS, const f32* partial, const Index* partial_arg, T* out, Index* arg, i32 columns = H * D)
//       for the others.  Both: units = R, grid.y as above
//   segment_reduce is spmm_fwd_kernel with SOURCE_EDGES, WEIGHT_NONE, task_begin from the offsets, edge_ids = null.
//
// KERNELS_SPMM_SELECT: backward of max and min
//   spmm_select_bwd_kernel(TASKS of out-edges, EDGES, const T* grad (N, H, D), const Index* arg (N, H, D), const T* w |
//       null, T* dx (S, H, D), f32* partial (slots, H, D), i32 H, i32 D)
//       units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC)); then sum_merge_kernel with out = dx
//   spmm_select_edges_bwd_kernel(TASKS of in-edges, no slots, EDGES, const T* grad, const Index* arg, const T* x | null
//       for copy_e, T* dw (E, H), i32 H, i32 D)
//       units = num_tasks * H.  WEIGHT is ignored
//
// KERNELS_SDDMM: out[edge row] = lhs op rhs, elementwise
//   sddmm_fwd_kernel(TASKS of in-edges, no slots, EDGES, const T* lhs, const T* rhs | null, T* out (E, H, D), i32 H,
//       i32 D)
//       units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
// KERNELS_SDDMM_DOT: out[edge row, h] = sum over D of lhs * rhs
//   sddmm_dot_fwd_kernel(the same, T* out (E, H), i32 H, i32 D)      units = num_tasks * H
//
// KERNELS_SOFTMAX: over the entries of each row, per head; VEC is not used. head_lanes is a power of two <= GROUP, best
// the smallest one >= H. units = num_tasks or num_slots, grid.y = ceil(H / head_lanes), unless said otherwise
//   edge_softmax_fwd_kernel(TASKS, const Index* edge_ids, const T* logits (E, H), T* out (E, H), f32* partial_max
//       (slots, H), f32* partial_sum (slots, H), i32 H, i32 head_lanes)
//   then, if R > 0:
//   softmax_merge_kernel(const i32* split_slots, i64 num_split, const f32* partial_max, const f32* partial_sum,
//       f32* split_max (R, H), f32* split_sum (R, H), i32 H)                              grid.x = ceil(R * H / 128)
//   edge_softmax_split_fwd_kernel(SLOTS, const Index* edge_ids, const T* logits, T* out, const f32* split_max,
//       const f32* split_sum, i32 H, i32 head_lanes)
//   edge_softmax_bwd_kernel(TASKS, const Index* edge_ids, const T* out, const T* grad, T* d_logits,
//       f32* partial_sum (slots, H), i32 H, i32 head_lanes)
//   then, if R > 0:
//   sum_merge_f32_kernel(SPLITS with split_row = null, const f32* partial_sum, f32* split_sum (R, H), i32 columns = H)
//       grid.x = ceil(R * H / 128)
//   edge_softmax_split_bwd_kernel(SLOTS, const Index* edge_ids, const T* out, const T* grad, T* d_logits,
//       const f32* split_sum, i32 H, i32 head_lanes)
//
// KERNELS_GAT (flat, VEC divides D): out = sum of drop(softmax(leaky_relu(el[u] + er[v]))) * x[u]
//   gat_fwd_kernel(TASKS, EDGES, const T* x, const f32* el (S, H), const f32* er (N, H), T* out (N, H, D), f32* lse (N,
//       H), f32* partial (slots, H, D), f32* partial_max (slots, H), f32* partial_sum (slots, H), i32 H, i32 D, f32
//       slope, DROPOUT)
//       units = num_tasks, grid.y = ceil(H * D / (GROUP * VEC))
//   gat_merge_kernel(SPLITS, const f32* partial, const f32* partial_max, const f32* partial_sum, T* out, f32* lse, i32
//       H, i32 D)
//       units = R, grid.y as above
// KERNELS_GAT_BACKWARD (by head); tiles = ceil(D / (GROUP * VEC * PACKS))
//   gat_terms_kernel(const T* grad (N, H, D), const T* out (N, H, D), const f32* er | null (taken as 0), const f32*
//       lse, f32* terms (N, H, 4), i64 N, i32 H, i32 D)
//       units = N * H.  terms = (er, lse, sum over D of grad * out, 0), aligned to 16 bytes
//   gat_bwd_kernel(TASKS of out-edges, EDGES, const T* x, const T* grad, const f32* el, const f32* terms, T* dx (S, H,
//       D), f32* d_el (S, H), f32* d_logit (E, H), f32* partial (slots, H, D), f32* partial_el (slots, H), i32 H, i32
//       D, f32 slope, DROPOUT)
//       units = num_tasks * H, grid.y = tiles; then sum_merge_kernel with out = dx, and sum_merge_f32_kernel of
//       partial_el into d_el (columns = H, grid.x = ceil(R * H / 128)). d_er is spmm_fwd_kernel (F32, SOURCE_EDGES,
//       REDUCE_SUM) of d_logit over the in-edges
// KERNELS_GATV2 (by head): out = sum of drop(softmax(attention . leaky_relu(x_src[u] + x_dst[v]))) * x_src[u]
//   gatv2_fwd_kernel(TASKS, EDGES, const T* x_src, const T* x_dst, const T* attention (H, D), T* out, f32* lse, f32*
//       partial, f32* partial_max, f32* partial_sum, i32 H, i32 D, f32 slope, DROPOUT)
//       units = num_tasks * H, grid.y = tiles; then gat_merge_kernel as in GAT
// KERNELS_GATV2_BACKWARD (by head), after gat_terms_kernel with er = null
//   gatv2_src_bwd_kernel(TASKS of out-edges, EDGES, const T* x_src, const T* x_dst, const T* attention, const T* grad,
//       const f32* terms, T* dx_src (S, H, D), f32* d_logit (E, H), f32* partial (slots, H, D), i32 H, i32 D, f32
//       slope, DROPOUT)
//       units = num_tasks * H, grid.y = tiles; then sum_merge_kernel with out = dx_src
//   gatv2_dst_bwd_kernel(TASKS of in-edges, i64 num_workers, EDGES, const T* x_src, const T* x_dst, const T* attention,
//       const f32* d_logit, T* dx_dst (N, H, D), f32* partial (slots, H, D), f32* partial_attention (num_workers, H,
//       D), i32 H, i32 D, f32 slope)
//       units = num_workers * H, grid.y = tiles; then sum_merge_kernel with out = dx_dst. Worker i takes tasks i, i +
//       num_workers, ...; num_workers must follow from the shapes alone, since the order of the sums depends on it.
//       d_attention is spmm_fwd_kernel (F32, SOURCE_EDGES, REDUCE_SUM) of partial_attention as one row of num_workers
//       entries

// ---- Options --------------------------------------------------------------------------------------------------------

#define KERNELS_SPMM 1
#define KERNELS_SPMM_SELECT 2
#define KERNELS_SDDMM 3
#define KERNELS_SDDMM_DOT 4
#define KERNELS_SOFTMAX 5
#define KERNELS_GAT 6
#define KERNELS_GAT_BACKWARD 7
#define KERNELS_GATV2 8
#define KERNELS_GATV2_BACKWARD 9
#define DTYPE_F32 1
#define DTYPE_F16 2
#define DTYPE_BF16 3
#define REDUCE_SUM 1
#define REDUCE_MAX 2
#define REDUCE_MIN 3
#define WEIGHT_NONE 1
#define WEIGHT_HEAD 2
#define WEIGHT_COLUMN 3
#define SOURCE_NODES 1
#define SOURCE_EDGES 2
#define OP_ADD 1
#define OP_SUB 2
#define OP_MUL 3
#define OP_DIV 4
#define OP_COPY 5
#define TARGET_U 1
#define TARGET_V 2
#define TARGET_E 3

#ifndef VEC
#define VEC 1
#endif
#ifndef PACKS
#define PACKS 1
#endif
#ifndef BATCH
#define BATCH 4
#endif
#ifndef WEIGHT
#define WEIGHT WEIGHT_NONE
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif

#if !defined(KERNELS) || !defined(DTYPE) || !defined(INDEX_BITS) || !defined(GROUP)
#error "KERNELS, DTYPE, INDEX_BITS and GROUP must be given"
#endif
#if KERNELS == KERNELS_SPMM && (!defined(REDUCE) || !defined(SOURCE))
#error "KERNELS_SPMM needs REDUCE and SOURCE"
#endif
#if (KERNELS == KERNELS_SDDMM || KERNELS == KERNELS_SDDMM_DOT) && (!defined(LHS) || !defined(RHS))
#error "KERNELS_SDDMM and KERNELS_SDDMM_DOT need LHS and RHS"
#endif
#if KERNELS == KERNELS_SDDMM && !defined(OP)
#error "KERNELS_SDDMM needs OP"
#endif

// ---- Types, loads and stores ----------------------------------------------------------------------------------------

#ifdef SIMT_HOST
#include "simt_host.h"
#else
#define EXPORT_KERNEL(name)
#endif

#define BLOCK 128
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(BLOCK, 1) name
#define INLINE __device__ __forceinline__
#define NEGATIVE_INFINITY (-__uint_as_float(0x7f800000u))

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
#if DTYPE == DTYPE_F32
typedef float T;
#else
typedef u16 T;
#endif
#if INDEX_BITS == 32
typedef int Index;
#else
typedef i64 Index;
#endif

static_assert(GROUP >= 1 && GROUP <= 32 && (GROUP & (GROUP - 1)) == 0, "GROUP must be a power of two, 1 to 32");
static_assert(VEC >= 1 && VEC * sizeof(T) <= 16 && (VEC & (VEC - 1)) == 0, "VEC elements must fill at most 16 bytes");
static_assert(PACKS >= 1 && VEC * PACKS <= 32, "a lane holds at most 32 columns");

INLINE float to_float(float value) { return value; }

INLINE float to_float(u16 bits) {
#if DTYPE == DTYPE_BF16
  return __uint_as_float((u32)bits << 16);
#elif defined(SIMT_HOST)
  return simt::half_to_float(bits);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

INLINE u16 to_half_bits(float value) {
#if DTYPE == DTYPE_F16 && defined(SIMT_HOST)
  return simt::float_to_half(value);
#elif DTYPE == DTYPE_F16
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else  // by hand, since sm_75 has no instruction for it: round to nearest, ties to even; NaN stays NaN
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40u);
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

INLINE void store_one(float* target, float value) { *target = value; }
INLINE void store_one(u16* target, float value) { *target = to_half_bits(value); }

// BYTES bytes of memory in registers: what one load instruction fetches (two for 32 bytes, four for 64).
template <int BYTES>
struct Pack {
  u32 words[(BYTES + 3) / 4];
};

template <int BYTES>
INLINE Pack<BYTES> load_pack(const void* source) {
  Pack<BYTES> pack;
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 quad = __ldg((const uint4*)source + i);
      pack.words[4 * i] = quad.x, pack.words[4 * i + 1] = quad.y;
      pack.words[4 * i + 2] = quad.z, pack.words[4 * i + 3] = quad.w;
    }
  } else if constexpr (BYTES == 8) {
    const uint2 pair = __ldg((const uint2*)source);
    pack.words[0] = pair.x, pack.words[1] = pair.y;
  } else if constexpr (BYTES == 4) {
    pack.words[0] = __ldg((const u32*)source);
  } else {
    pack.words[0] = __ldg((const u16*)source);
  }
  return pack;
}

template <int BYTES>
INLINE void store_pack(void* target, const Pack<BYTES>& pack) {
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      uint4 quad;
      quad.x = pack.words[4 * i], quad.y = pack.words[4 * i + 1];
      quad.z = pack.words[4 * i + 2], quad.w = pack.words[4 * i + 3];
      ((uint4*)target)[i] = quad;
    }
  } else if constexpr (BYTES == 8) {
    uint2 pair;
    pair.x = pack.words[0], pair.y = pack.words[1];
    *(uint2*)target = pair;
  } else if constexpr (BYTES == 4) {
    *(u32*)target = pack.words[0];
  } else {
    *(u16*)target = (u16)pack.words[0];
  }
}

// VEC features, as loaded.
typedef Pack<VEC * (int)sizeof(T)> Features;

INLINE Features no_features() {
  Features pack;
#pragma unroll
  for (u32& word : pack.words) word = 0;
  return pack;
}

INLINE Features load_features(const T* source) { return load_pack<VEC * (int)sizeof(T)>(source); }

INLINE float feature(const Features& pack, int i) {
#if DTYPE == DTYPE_F32
  return __uint_as_float(pack.words[i]);
#else
  return to_float((u16)(pack.words[i / 2] >> 16 * (i % 2)));
#endif
}

INLINE void store_features(T* target, const float (&values)[VEC]) {
  Features pack = no_features();
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#if DTYPE == DTYPE_F32
    pack.words[i] = __float_as_uint(values[i]);
#else
    pack.words[i / 2] |= (u32)to_half_bits(values[i]) << 16 * (i % 2);
#endif
  }
  store_pack(target, pack);
}

INLINE void load_floats(const float* source, float (&values)[VEC]) {
  const Pack<4 * VEC> pack = load_pack<4 * VEC>(source);
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = __uint_as_float(pack.words[i]);
}

INLINE void store_floats(float* target, const float (&values)[VEC]) {
  Pack<4 * VEC> pack;
#pragma unroll
  for (int i = 0; i < VEC; ++i) pack.words[i] = __float_as_uint(values[i]);
  store_pack(target, pack);
}

INLINE void load_indices(const Index* source, Index (&values)[VEC]) {
  const Pack<VEC * (int)sizeof(Index)> pack = load_pack<VEC * (int)sizeof(Index)>(source);
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#if INDEX_BITS == 32
    values[i] = (Index)pack.words[i];
#else
    values[i] = (Index)((u64)pack.words[2 * i + 1] << 32 | pack.words[2 * i]);
#endif
  }
}

INLINE void store_indices(Index* target, const Index (&values)[VEC]) {
  Pack<VEC * (int)sizeof(Index)> pack;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#if INDEX_BITS == 32
    pack.words[i] = (u32)values[i];
#else
    pack.words[2 * i] = (u32)values[i], pack.words[2 * i + 1] = (u32)((u64)values[i] >> 32);
#endif
  }
  store_pack(target, pack);
}

// ---- Groups, tasks and entries --------------------------------------------------------------------------------------

// Lanes beside each other in a warp. Their number is a power of two, so a group never straddles two warps.
INLINE i64 group_index() { return ((i64)blockIdx.x * BLOCK + threadIdx.x) / GROUP; }
INLINE int group_lane() { return threadIdx.x % GROUP; }
INLINE u32 group_mask() {
  // Groups of a warp leave their loops at different times, so each shuffles among its own lanes only.
  return (u32)(((u64)1 << GROUP) - 1) << threadIdx.x % 32 / GROUP * GROUP;
}

// The sum over the group, the same bits in every lane: a butterfly adds the same pairs everywhere, in either order.
INLINE float group_sum(float value) {
#pragma unroll
  for (int offset = 1; offset < GROUP; offset *= 2) value += __shfl_xor_sync(group_mask(), value, offset);
  return value;
}

struct Task {
  i64 begin, end, row;
  int slot;
};

#define TASK_PARAMS                                                                                     \
  const Index *__restrict__ task_begin, const Index *__restrict__ task_row, const int *__restrict__ task_slot, \
      i64 num_tasks
#define READ_TASK(t) \
  { task_begin[t], task_begin[(t) + 1], task_row ? (i64)task_row[t] : (t), task_slot ? task_slot[t] : -1 }
#define SPLIT_PARAMS const Index *__restrict__ split_row, const int *__restrict__ split_slots, i64 num_split

// Neighbours and edge rows of the next COUNT entries. Every lane of a group reads the same words (one transaction), a
// batch ahead of their use, so that their latency hides behind the gathers of the batch before.
template <bool NODES, bool EDGES, int COUNT>
struct Entries {
  Index node[COUNT], edge[COUNT];

  INLINE void load(const Index* indices, const Index* edge_ids, i64 begin, i64 end) {
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
      const i64 k = begin + q;
      node[q] = edge[q] = 0;
      if (k < end) {
        if (NODES) node[q] = __ldg(indices + k);
        if (EDGES) edge[q] = edge_ids ? __ldg(edge_ids + k) : (Index)k;
      }
    }
  }
};

// ---- Softmax and dropout --------------------------------------------------------------------------------------------

// What a maximum is subtracted as: a row whose logits are all -inf so far keeps weights of 0, not NaN.
INLINE float softmax_shift(float maximum) { return maximum == NEGATIVE_INFINITY ? 0.f : maximum; }

INLINE float leaky_relu(float value, float slope) { return value > 0.f ? value : value * slope; }

#define DROPOUT_PARAMS const i64 *__restrict__ edge_keys, u64 key0, u64 key1, int threshold, float scale

// The mask function of dgl_hybrid/ops/random_words.py, whose note explains it: all backends drop the same elements.
INLINE u64 splitmix64(u64 word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ word >> 27) * 0x94D049BB133111EBull;
  return word ^ word >> 31;
}

INLINE u64 mix_id(u64 id, u64 key0, u64 key1) {
  return splitmix64(splitmix64(id * 0x9E3779B97F4A7C15ull + key0) ^ key1);
}

INLINE u32 dropout_column_word(int head) {
  return (u32)mix_id((u64)head, 0x243F6A8885A308D3ull, 0x13198A2E03707344ull);
}

INLINE bool dropout_keeps(u64 row_word, u32 column_word, int threshold) {
  u32 word = (u32)row_word + column_word;
  word = (word ^ word >> 16) * 0x7FEB352Du;
  word = (word ^ word >> 15) * 0x846CA68Bu;
  word ^= (u32)(row_word >> 32);
  word = (word ^ word >> 16) * 0x7FEB352Du;
  return (int)word >= threshold;
}

// The factor of an attention weight: 1 without dropout, else 0 or the scale.
#if DROPOUT
#define DROPOUT_FACTOR(edge) \
  (dropout_keeps(mix_id((u64)(edge_keys ? edge_keys[edge] : (i64)(edge)), key0, key1), column_word, threshold) \
       ? scale                                                                                                \
       : 0.f)
#else
#define DROPOUT_FACTOR(edge) 1.f
#endif

// ---- Merging of split rows ------------------------------------------------------------------------------------------

#if (KERNELS == KERNELS_SPMM && REDUCE == REDUCE_SUM) || KERNELS == KERNELS_SPMM_SELECT || \
    KERNELS == KERNELS_GAT_BACKWARD || KERNELS == KERNELS_GATV2_BACKWARD
// Adds up the partial sums of each split row. In double, because a hub has thousands of them.
KERNEL(sum_merge_kernel)(SPLIT_PARAMS, const float* __restrict__ partial, T* __restrict__ out, int columns) {
  const i64 split = group_index();
  const int column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (split >= num_split || column >= columns) return;
  const int begin = split_slots[split], end = split_slots[split + 1];
  double sums[VEC] = {};
#pragma unroll 8
  for (int slot = begin; slot < end; ++slot) {
    float values[VEC];
    load_floats(partial + (i64)slot * columns + column, values);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sums[i] += values[i];
  }
  float result[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) result[i] = (float)sums[i];
  store_features(out + (split_row ? (i64)split_row[split] : split) * columns + column, result);
}
EXPORT_KERNEL(sum_merge_kernel)
#endif

#if KERNELS == KERNELS_SOFTMAX || KERNELS == KERNELS_GAT_BACKWARD
// The same for float results, one thread per row and column.
KERNEL(sum_merge_f32_kernel)(SPLIT_PARAMS, const float* __restrict__ partial, float* __restrict__ out, int columns) {
  const i64 thread = (i64)blockIdx.x * BLOCK + threadIdx.x, split = thread / columns;
  const int column = (int)(thread % columns);
  if (split >= num_split) return;
  const int begin = split_slots[split], end = split_slots[split + 1];
  double sum = 0.;
#pragma unroll 8
  for (int slot = begin; slot < end; ++slot) sum += partial[(i64)slot * columns + column];
  out[(split_row ? (i64)split_row[split] : split) * columns + column] = (float)sum;
}
EXPORT_KERNEL(sum_merge_f32_kernel)
#endif

#if KERNELS == KERNELS_GAT || KERNELS == KERNELS_GATV2
// Merges the softmax states (maximum, sum of weights, weighted sum of features) of each split row.
KERNEL(gat_merge_kernel)(
    SPLIT_PARAMS, const float* __restrict__ partial, const float* __restrict__ partial_max,
    const float* __restrict__ partial_sum, T* __restrict__ out, float* __restrict__ lse, int heads, int width) {
  const i64 split = group_index();
  const int columns = heads * width, column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (split >= num_split || column >= columns) return;
  const int begin = split_slots[split], end = split_slots[split + 1], head = column / width;
  float maximum = NEGATIVE_INFINITY;
  for (int slot = begin; slot < end; ++slot) maximum = fmaxf(maximum, partial_max[(i64)slot * heads + head]);
  const float shift = softmax_shift(maximum);
  double weight_sum = 0., sums[VEC] = {};
#pragma unroll 8
  for (int slot = begin; slot < end; ++slot) {
    const float factor = expf(partial_max[(i64)slot * heads + head] - shift);
    float values[VEC];
    load_floats(partial + (i64)slot * columns + column, values);
    weight_sum += (double)factor * partial_sum[(i64)slot * heads + head];
#pragma unroll
    for (int i = 0; i < VEC; ++i) sums[i] += (double)factor * values[i];
  }
  const i64 row = split_row ? (i64)split_row[split] : split;
  float result[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) result[i] = (float)sums[i] / (float)weight_sum;
  store_features(out + row * columns + column, result);
  if (column % width == 0) lse[row * heads + head] = maximum + logf((float)weight_sum);
}
EXPORT_KERNEL(gat_merge_kernel)
#endif

// ---- SpMM -----------------------------------------------------------------------------------------------------------

#if KERNELS == KERNELS_SPMM
#if REDUCE != REDUCE_SUM
// NaN wins, and of equals the first: strictly better only.
INLINE bool beats(float value, float best) {
  if (value != value) return best == best;
  return REDUCE == REDUCE_MAX ? value > best : value < best;
}
#endif

KERNEL(spmm_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ x,
    const T* __restrict__ w, T* __restrict__ out, Index* __restrict__ arg, float* __restrict__ partial,
    Index* __restrict__ partial_arg, int heads, int width) {
  const i64 t = group_index();
  const int columns = heads * width, column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (t >= num_tasks || column >= columns) return;
  const Task task = READ_TASK(t);
#if WEIGHT == WEIGHT_HEAD
  const int head = column / width;
#endif

  float result[VEC] = {};
#if REDUCE != REDUCE_SUM
  Index best[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) best[i] = -1;
#endif
  Entries<SOURCE == SOURCE_NODES, SOURCE == SOURCE_EDGES || WEIGHT != WEIGHT_NONE || REDUCE != REDUCE_SUM, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    Features features[BATCH];
#if WEIGHT == WEIGHT_HEAD
    float weights[BATCH];
#elif WEIGHT == WEIGHT_COLUMN
    Features weights[BATCH];
#endif
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      features[q] = no_features();
      if (k + q < task.end) {
        const i64 source = SOURCE == SOURCE_NODES ? entries.node[q] : entries.edge[q];
        features[q] = load_features(x + source * columns + column);
      }
#if WEIGHT == WEIGHT_HEAD
      weights[q] = k + q < task.end ? to_float(__ldg(w + (i64)entries.edge[q] * heads + head)) : 0.f;
#elif WEIGHT == WEIGHT_COLUMN
      weights[q] = no_features();
      if (k + q < task.end) weights[q] = load_features(w + (i64)entries.edge[q] * columns + column);
#endif
    }
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      if (k + q >= task.end) break;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
#if WEIGHT == WEIGHT_NONE
        const float value = feature(features[q], i);
#elif WEIGHT == WEIGHT_HEAD
        const float value = feature(features[q], i) * weights[q];
#else
        const float value = feature(features[q], i) * feature(weights[q], i);
#endif
#if REDUCE == REDUCE_SUM
        result[i] += value;
#else
        if (best[i] < 0 || beats(value, result[i])) result[i] = value, best[i] = entries.edge[q];
#endif
      }
    }
  }

  if (task.slot < 0) {
    store_features(out + task.row * columns + column, result);
#if REDUCE != REDUCE_SUM
    store_indices(arg + task.row * columns + column, best);
#endif
  } else {
    store_floats(partial + (i64)task.slot * columns + column, result);
#if REDUCE != REDUCE_SUM
    store_indices(partial_arg + (i64)task.slot * columns + column, best);
#endif
  }
}
EXPORT_KERNEL(spmm_fwd_kernel)

#if REDUCE != REDUCE_SUM
KERNEL(select_merge_kernel)(
    SPLIT_PARAMS, const float* __restrict__ partial, const Index* __restrict__ partial_arg, T* __restrict__ out,
    Index* __restrict__ arg, int columns) {
  const i64 split = group_index();
  const int column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (split >= num_split || column >= columns) return;
  const int begin = split_slots[split], end = split_slots[split + 1];
  float result[VEC];
  Index best[VEC];
  load_floats(partial + (i64)begin * columns + column, result);
  load_indices(partial_arg + (i64)begin * columns + column, best);
#pragma unroll 8
  for (int slot = begin + 1; slot < end; ++slot) {
    float values[VEC];
    Index candidates[VEC];
    load_floats(partial + (i64)slot * columns + column, values);
    load_indices(partial_arg + (i64)slot * columns + column, candidates);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      if (beats(values[i], result[i])) result[i] = values[i], best[i] = candidates[i];
    }
  }
  const i64 row = split_row ? (i64)split_row[split] : split;
  store_features(out + row * columns + column, result);
  store_indices(arg + row * columns + column, best);
}
EXPORT_KERNEL(select_merge_kernel)
#endif
#endif

#if KERNELS == KERNELS_SPMM_SELECT
// Each source collects the gradients of the destinations whose maximum (minimum) came over its edge.
KERNEL(spmm_select_bwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ grad,
    const Index* __restrict__ arg, const T* __restrict__ w, T* __restrict__ dx, float* __restrict__ partial, int heads,
    int width) {
  const i64 t = group_index();
  const int columns = heads * width, column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (t >= num_tasks || column >= columns) return;
  const Task task = READ_TASK(t);
#if WEIGHT == WEIGHT_HEAD
  const int head = column / width;
#endif

  float result[VEC] = {};
  Entries<true, true, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    Features gradients[BATCH];
    Index winners[BATCH][VEC];
#if WEIGHT == WEIGHT_HEAD
    float weights[BATCH];
#elif WEIGHT == WEIGHT_COLUMN
    Features weights[BATCH];
#endif
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      if (k + q >= task.end) break;
      const i64 offset = (i64)entries.node[q] * columns + column;
      gradients[q] = load_features(grad + offset);
      load_indices(arg + offset, winners[q]);
#if WEIGHT == WEIGHT_HEAD
      weights[q] = to_float(__ldg(w + (i64)entries.edge[q] * heads + head));
#elif WEIGHT == WEIGHT_COLUMN
      weights[q] = load_features(w + (i64)entries.edge[q] * columns + column);
#endif
    }
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      if (k + q >= task.end) break;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        if (winners[q][i] != entries.edge[q]) continue;
#if WEIGHT == WEIGHT_NONE
        result[i] += feature(gradients[q], i);
#elif WEIGHT == WEIGHT_HEAD
        result[i] += feature(gradients[q], i) * weights[q];
#else
        result[i] += feature(gradients[q], i) * feature(weights[q], i);
#endif
      }
    }
  }
  if (task.slot < 0) {
    store_features(dx + task.row * columns + column, result);
  } else {
    store_floats(partial + (i64)task.slot * columns + column, result);
  }
}
EXPORT_KERNEL(spmm_select_bwd_kernel)

// The weights' gradient: per edge and head, over the columns that this edge won.
KERNEL(spmm_select_edges_bwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ grad,
    const Index* __restrict__ arg, const T* __restrict__ x, T* __restrict__ dw, int heads, int width) {
  const i64 t = group_index() / heads;
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const int head = (int)(group_index() % heads), columns = heads * width;
  const i64 own = task.row * columns + head * width;

  Entries<true, true, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    float sums[BATCH] = {};
#pragma unroll 1
    for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
      const Features gradient = load_features(grad + own + column);
      Index winners[VEC];
      load_indices(arg + own + column, winners);
#pragma unroll
      for (int q = 0; q < BATCH; ++q) {
        if (k + q >= task.end) break;
        Features features = no_features();
        if (x) features = load_features(x + (i64)entries.node[q] * columns + head * width + column);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          if (winners[i] == entries.edge[q]) sums[q] += feature(gradient, i) * (x ? feature(features, i) : 1.f);
        }
      }
    }
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      const float sum = group_sum(sums[q]);
      if (k + q < task.end && group_lane() == 0) store_one(dw + (i64)entries.edge[q] * heads + head, sum);
    }
  }
}
EXPORT_KERNEL(spmm_select_edges_bwd_kernel)
#endif

// ---- SDDMM ----------------------------------------------------------------------------------------------------------

#if KERNELS == KERNELS_SDDMM || KERNELS == KERNELS_SDDMM_DOT
#if KERNELS == KERNELS_SDDMM
#define NEEDS_RHS (OP != OP_COPY)
#else
#define NEEDS_RHS 1
#endif
#define NEEDS_NODES (LHS == TARGET_U || (NEEDS_RHS && RHS == TARGET_U))

template <int TARGET, class E>
INLINE i64 operand_row(const E& entries, int q, i64 row) {
  return TARGET == TARGET_U ? (i64)entries.node[q] : TARGET == TARGET_V ? row : (i64)entries.edge[q];
}
#endif

#if KERNELS == KERNELS_SDDMM
INLINE float combine(float lhs, float rhs) {
#if OP == OP_ADD
  return lhs + rhs;
#elif OP == OP_SUB
  return lhs - rhs;
#elif OP == OP_MUL
  return lhs * rhs;
#elif OP == OP_DIV
  return lhs / rhs;
#else
  return lhs;
#endif
}

KERNEL(sddmm_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ lhs,
    const T* __restrict__ rhs, T* __restrict__ out, int heads, int width) {
  const i64 t = group_index();
  const int columns = heads * width, column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (t >= num_tasks || column >= columns) return;
  const Task task = READ_TASK(t);

  Entries<NEEDS_NODES, true, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    Features left[BATCH], right[BATCH];
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      left[q] = right[q] = no_features();
      if (k + q < task.end) {
        left[q] = load_features(lhs + operand_row<LHS>(entries, q, task.row) * columns + column);
        if (NEEDS_RHS) right[q] = load_features(rhs + operand_row<RHS>(entries, q, task.row) * columns + column);
      }
    }
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      if (k + q >= task.end) break;
      float values[VEC];
#pragma unroll
      for (int i = 0; i < VEC; ++i) values[i] = combine(feature(left[q], i), feature(right[q], i));
      store_features(out + (i64)entries.edge[q] * columns + column, values);
    }
  }
}
EXPORT_KERNEL(sddmm_fwd_kernel)
#endif

#if KERNELS == KERNELS_SDDMM_DOT
KERNEL(sddmm_dot_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ lhs,
    const T* __restrict__ rhs, T* __restrict__ out, int heads, int width) {
  const i64 t = group_index() / heads;
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const int head = (int)(group_index() % heads), columns = heads * width;

  Entries<NEEDS_NODES, true, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    float sums[BATCH] = {};
#pragma unroll 1
    for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
      Features left[BATCH], right[BATCH];
#pragma unroll
      for (int q = 0; q < BATCH; ++q) {
        left[q] = right[q] = no_features();
        if (k + q < task.end) {
          const i64 offset = head * width + column;
          left[q] = load_features(lhs + operand_row<LHS>(entries, q, task.row) * columns + offset);
          right[q] = load_features(rhs + operand_row<RHS>(entries, q, task.row) * columns + offset);
        }
      }
#pragma unroll
      for (int q = 0; q < BATCH; ++q) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[q] += feature(left[q], i) * feature(right[q], i);
      }
    }
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      const float sum = group_sum(sums[q]);
      if (k + q < task.end && group_lane() == 0) store_one(out + (i64)entries.edge[q] * heads + head, sum);
    }
  }
}
EXPORT_KERNEL(sddmm_dot_fwd_kernel)
#endif

// ---- Edge softmax ---------------------------------------------------------------------------------------------------

#if KERNELS == KERNELS_SOFTMAX
// Lanes of a group: head_lanes heads beside each other, times GROUP / head_lanes entries. Neighbouring lanes so read
// neighbouring words of (E, H) whatever H is.
struct SoftmaxLane {
  int head, first, stride;
  bool on;
};

INLINE SoftmaxLane softmax_lane(int heads, int head_lanes) {
  const int head = blockIdx.y * head_lanes + group_lane() % head_lanes;
  return {head, group_lane() / head_lanes, GROUP / head_lanes, head < heads};
}

INLINE i64 edge_row(const Index* edge_ids, i64 k) { return edge_ids ? (i64)__ldg(edge_ids + k) : k; }

INLINE void write_softmax(
    const Task& task, const SoftmaxLane& lane, const Index* edge_ids, const T* logits, T* out, float maximum, float sum,
    int heads) {
#pragma unroll 4
  for (i64 k = task.begin + lane.first; k < task.end; k += lane.stride) {
    const i64 at = edge_row(edge_ids, k) * heads + lane.head;
    store_one(out + at, expf(to_float(logits[at]) - maximum) / sum);
  }
}

INLINE void write_softmax_gradient(
    const Task& task, const SoftmaxLane& lane, const Index* edge_ids, const T* out, const T* grad, T* d_logits,
    float sum, int heads) {
#pragma unroll 4
  for (i64 k = task.begin + lane.first; k < task.end; k += lane.stride) {
    const i64 at = edge_row(edge_ids, k) * heads + lane.head;
    store_one(d_logits + at, to_float(out[at]) * (to_float(grad[at]) - sum));
  }
}

KERNEL(edge_softmax_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ edge_ids, const T* __restrict__ logits, T* __restrict__ out,
    float* __restrict__ partial_max, float* __restrict__ partial_sum, int heads, int head_lanes) {
  const i64 t = group_index();
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const SoftmaxLane lane = softmax_lane(heads, head_lanes);

  float maximum = NEGATIVE_INFINITY, sum = 0.f;
  for (i64 k = task.begin + lane.first; lane.on && k < task.end; k += (i64)BATCH * lane.stride) {
    float values[BATCH];
    float batch_max = maximum;
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      const i64 entry = k + (i64)q * lane.stride;
      values[q] = NEGATIVE_INFINITY;
      if (entry < task.end) values[q] = to_float(__ldg(logits + edge_row(edge_ids, entry) * heads + lane.head));
      batch_max = fmaxf(batch_max, values[q]);
    }
    const float shift = softmax_shift(batch_max);
    sum *= expf(maximum - shift);
#pragma unroll
    for (int q = 0; q < BATCH; ++q) sum += expf(values[q] - shift);
    maximum = batch_max;
  }
  for (int offset = head_lanes; offset < GROUP; offset *= 2) {
    const float other_max = __shfl_xor_sync(group_mask(), maximum, offset);
    const float other_sum = __shfl_xor_sync(group_mask(), sum, offset);
    const float merged_max = fmaxf(maximum, other_max), shift = softmax_shift(merged_max);
    // Rounded one by one: a fused multiply-add would favour one of the two lanes, and they would disagree.
    sum = __fadd_rn(__fmul_rn(sum, expf(maximum - shift)), __fmul_rn(other_sum, expf(other_max - shift)));
    maximum = merged_max;
  }
  if (!lane.on) return;
  if (task.slot < 0) {
    write_softmax(task, lane, edge_ids, logits, out, maximum, sum, heads);
  } else if (lane.first == 0) {
    partial_max[(i64)task.slot * heads + lane.head] = maximum;
    partial_sum[(i64)task.slot * heads + lane.head] = sum;
  }
}
EXPORT_KERNEL(edge_softmax_fwd_kernel)

KERNEL(softmax_merge_kernel)(
    const int* __restrict__ split_slots, i64 num_split, const float* __restrict__ partial_max,
    const float* __restrict__ partial_sum, float* __restrict__ split_max, float* __restrict__ split_sum, int heads) {
  const i64 thread = (i64)blockIdx.x * BLOCK + threadIdx.x, split = thread / heads;
  const int head = (int)(thread % heads);
  if (split >= num_split) return;
  const int begin = split_slots[split], end = split_slots[split + 1];
  float maximum = NEGATIVE_INFINITY;
#pragma unroll 8
  for (int slot = begin; slot < end; ++slot) maximum = fmaxf(maximum, partial_max[(i64)slot * heads + head]);
  const float shift = softmax_shift(maximum);
  double sum = 0.;
#pragma unroll 8
  for (int slot = begin; slot < end; ++slot) {
    sum += (double)expf(partial_max[(i64)slot * heads + head] - shift) * partial_sum[(i64)slot * heads + head];
  }
  split_max[thread] = maximum;
  split_sum[thread] = (float)sum;
}
EXPORT_KERNEL(softmax_merge_kernel)

#define SLOT_PARAMS                                                                                              \
  const Index *__restrict__ task_begin, const Index *__restrict__ slot_task, const int *__restrict__ slot_split, \
      i64 num_slots

KERNEL(edge_softmax_split_fwd_kernel)(
    SLOT_PARAMS, const Index* __restrict__ edge_ids, const T* __restrict__ logits, T* __restrict__ out,
    const float* __restrict__ split_max, const float* __restrict__ split_sum, int heads, int head_lanes) {
  const i64 slot = group_index();
  const SoftmaxLane lane = softmax_lane(heads, head_lanes);
  if (slot >= num_slots || !lane.on) return;
  const i64 t = slot_task[slot], at = (i64)slot_split[slot] * heads + lane.head;
  const Task task = {task_begin[t], task_begin[t + 1], 0, (int)slot};
  write_softmax(task, lane, edge_ids, logits, out, split_max[at], split_sum[at], heads);
}
EXPORT_KERNEL(edge_softmax_split_fwd_kernel)

KERNEL(edge_softmax_bwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ edge_ids, const T* __restrict__ out, const T* __restrict__ grad,
    T* __restrict__ d_logits, float* __restrict__ partial_sum, int heads, int head_lanes) {
  const i64 t = group_index();
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const SoftmaxLane lane = softmax_lane(heads, head_lanes);

  float sum = 0.f;
#pragma unroll 4
  for (i64 k = task.begin + lane.first; lane.on && k < task.end; k += lane.stride) {
    const i64 at = edge_row(edge_ids, k) * heads + lane.head;
    sum += to_float(__ldg(out + at)) * to_float(__ldg(grad + at));
  }
  for (int offset = head_lanes; offset < GROUP; offset *= 2) sum += __shfl_xor_sync(group_mask(), sum, offset);
  if (!lane.on) return;
  if (task.slot < 0) {
    write_softmax_gradient(task, lane, edge_ids, out, grad, d_logits, sum, heads);
  } else if (lane.first == 0) {
    partial_sum[(i64)task.slot * heads + lane.head] = sum;
  }
}
EXPORT_KERNEL(edge_softmax_bwd_kernel)

KERNEL(edge_softmax_split_bwd_kernel)(
    SLOT_PARAMS, const Index* __restrict__ edge_ids, const T* __restrict__ out, const T* __restrict__ grad,
    T* __restrict__ d_logits, const float* __restrict__ split_sum, int heads, int head_lanes) {
  const i64 slot = group_index();
  const SoftmaxLane lane = softmax_lane(heads, head_lanes);
  if (slot >= num_slots || !lane.on) return;
  const i64 t = slot_task[slot];
  const Task task = {task_begin[t], task_begin[t + 1], 0, (int)slot};
  write_softmax_gradient(
      task, lane, edge_ids, out, grad, d_logits, split_sum[(i64)slot_split[slot] * heads + lane.head], heads);
}
EXPORT_KERNEL(edge_softmax_split_bwd_kernel)
#endif

// ---- Fused GAT ------------------------------------------------------------------------------------------------------

#if KERNELS == KERNELS_GAT
// Online softmax: one pass over the entries, with a running maximum; a new one rescales what was summed. Lanes of the
// same head repeat its logits, which is cheaper than telling each other.
KERNEL(gat_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ x,
    const float* __restrict__ el, const float* __restrict__ er, T* __restrict__ out, float* __restrict__ lse,
    float* __restrict__ partial, float* __restrict__ partial_max, float* __restrict__ partial_sum, int heads, int width,
    float slope, DROPOUT_PARAMS) {
  const i64 t = group_index();
  const int columns = heads * width, column = (blockIdx.y * GROUP + group_lane()) * VEC;
  if (t >= num_tasks || column >= columns) return;
  const Task task = READ_TASK(t);
  const int head = column / width;
  const float er_own = er[task.row * heads + head];
#if DROPOUT
  const u32 column_word = dropout_column_word(head);
#endif

  float maximum = NEGATIVE_INFINITY, weight_sum = 0.f, result[VEC] = {};
  Entries<true, DROPOUT != 0, BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + BATCH, task.end);
    Features features[BATCH];
    float logits[BATCH];
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      features[q] = no_features();
      logits[q] = NEGATIVE_INFINITY;
      if (k + q < task.end) {
        features[q] = load_features(x + (i64)entries.node[q] * columns + column);
        logits[q] = leaky_relu(__ldg(el + (i64)entries.node[q] * heads + head) + er_own, slope);
      }
    }
    float batch_max = maximum;
#pragma unroll
    for (int q = 0; q < BATCH; ++q) batch_max = fmaxf(batch_max, logits[q]);
    const float shift = softmax_shift(batch_max), rescale = expf(maximum - shift);
    maximum = batch_max;
    weight_sum *= rescale;
#pragma unroll
    for (int i = 0; i < VEC; ++i) result[i] *= rescale;
#pragma unroll
    for (int q = 0; q < BATCH; ++q) {
      if (k + q >= task.end) break;
      float weight = expf(logits[q] - shift);
      weight_sum += weight;
      weight *= DROPOUT_FACTOR(entries.edge[q]);
#pragma unroll
      for (int i = 0; i < VEC; ++i) result[i] += weight * feature(features[q], i);
    }
  }

  const bool first_of_head = column % width == 0;
  if (task.slot < 0) {
    const bool empty = task.begin == task.end;
#pragma unroll
    for (int i = 0; i < VEC; ++i) result[i] = empty ? 0.f : result[i] / weight_sum;
    store_features(out + task.row * columns + column, result);
    if (first_of_head) lse[task.row * heads + head] = empty ? 0.f : maximum + logf(weight_sum);
  } else {
    store_floats(partial + (i64)task.slot * columns + column, result);
    if (first_of_head) {
      partial_max[(i64)task.slot * heads + head] = maximum;
      partial_sum[(i64)task.slot * heads + head] = weight_sum;
    }
  }
}
EXPORT_KERNEL(gat_fwd_kernel)
#endif

// ---- Kernels by head: a group works on one head of a task, so that dot products over the width stay in it -----------

#if KERNELS == KERNELS_GAT_BACKWARD || KERNELS == KERNELS_GATV2 || KERNELS == KERNELS_GATV2_BACKWARD

// Registers bound the entries in flight: a lane holds VEC * PACKS columns of each.
#define COLUMNS_PER_LANE (VEC * PACKS)
#define HEAD_BATCH (COLUMNS_PER_LANE >= 32 ? 1 : COLUMNS_PER_LANE >= 16 ? 2 : BATCH)
#define TILE (GROUP * COLUMNS_PER_LANE)

// Column of pack p in the head; neighbouring lanes hold neighbouring packs.
INLINE int head_column(int p) { return blockIdx.y * TILE + (p * GROUP + group_lane()) * VEC; }

// One lane's part of one head's row.
struct HeadRow {
  Features packs[PACKS];

  INLINE void load(const T* row, int width) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      packs[p] = no_features();
      if (head_column(p) < width) packs[p] = load_features(row + head_column(p));
    }
  }
  INLINE void clear() {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) packs[p] = no_features();
  }
  INLINE float at(int p, int i) const { return feature(packs[p], i); }
};

struct HeadSums {
  float values[PACKS][VEC];

  INLINE void clear() {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) values[p][i] = 0.f;
    }
  }
  INLINE void scale(float factor) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) values[p][i] *= factor;
    }
  }
  INLINE void store_rounded(T* row, int width) const {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (head_column(p) < width) store_features(row + head_column(p), values[p]);
    }
  }
  INLINE void store_exact(float* row, int width) const {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (head_column(p) < width) store_floats(row + head_column(p), values[p]);
    }
  }
};
#endif

#if KERNELS == KERNELS_GAT_BACKWARD || KERNELS == KERNELS_GATV2_BACKWARD
// What the backward needs of a destination, side by side, so that an edge fetches it with one load.
KERNEL(gat_terms_kernel)(
    const T* __restrict__ grad, const T* __restrict__ out, const float* __restrict__ er, const float* __restrict__ lse,
    float* __restrict__ terms, i64 num_rows, int heads, int width) {
  const i64 at = group_index();
  if (at >= num_rows * heads) return;
  float sum = 0.f;
#pragma unroll 1
  for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
    const Features left = load_features(grad + at * width + column), right = load_features(out + at * width + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += feature(left, i) * feature(right, i);
  }
  sum = group_sum(sum);
  if (group_lane() == 0) {
    float4 quad;
    quad.x = er ? er[at] : 0.f, quad.y = lse[at], quad.z = sum, quad.w = 0.f;
    ((float4*)terms)[at] = quad;
  }
}
EXPORT_KERNEL(gat_terms_kernel)
#endif

#if KERNELS == KERNELS_GAT_BACKWARD
INLINE float dot(const T* lhs, const T* rhs, int width) {
  float sum = 0.f;
#pragma unroll 1
  for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
    const Features left = load_features(lhs + column), right = load_features(rhs + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += feature(left, i) * feature(right, i);
  }
  return sum;
}

// One pass over the transposed graph: each source gathers its destinations' gradients once. With a = softmax weight and
// f = dropout factor of an edge: dx = sum a f grad, and d_logit = a (f grad . x - delta) leaky_relu'.
KERNEL(gat_bwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ x,
    const T* __restrict__ grad, const float* __restrict__ el, const float* __restrict__ terms, T* __restrict__ dx,
    float* __restrict__ d_el, float* __restrict__ d_logit, float* __restrict__ partial, float* __restrict__ partial_el,
    int heads, int width, float slope, DROPOUT_PARAMS) {
  const i64 t = group_index() / heads;
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const int head = (int)(group_index() % heads);
  const bool writes_edges = group_lane() == 0 && blockIdx.y == 0;
  const T* const x_row = x + (task.row * heads + head) * width;
  const float el_own = el[task.row * heads + head];
#if DROPOUT
  const u32 column_word = dropout_column_word(head);
#endif

  HeadRow own;
  own.load(x_row, width);
  HeadSums sums;
  sums.clear();
  float el_sum = 0.f;
  Entries<true, true, HEAD_BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += HEAD_BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + HEAD_BATCH, task.end);
    HeadRow gradients[HEAD_BATCH];
    float4 term[HEAD_BATCH];
    float dots[HEAD_BATCH] = {};
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      gradients[q].clear();
      term[q].x = term[q].y = term[q].z = 0.f;
      if (k + q < task.end) {
        const i64 at = (i64)entries.node[q] * heads + head;
        gradients[q].load(grad + at * width, width);
        term[q] = __ldg((const float4*)terms + at);
        // A head that is wider than a tile: each tile repeats the whole dot product.
        if (gridDim.y > 1) dots[q] = dot(grad + at * width, x_row, width);
      }
    }
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      if (gridDim.y == 1) {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) dots[q] += gradients[q].at(p, i) * own.at(p, i);
        }
      }
      dots[q] = group_sum(dots[q]);
    }
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      if (k + q >= task.end) break;
      const float z = el_own + term[q].x, weight = expf(leaky_relu(z, slope) - term[q].y);
      const float factor = DROPOUT_FACTOR(entries.edge[q]);
      const float d_z = weight * (factor * dots[q] - term[q].z) * (z > 0.f ? 1.f : slope);
      el_sum += d_z;
      if (writes_edges) d_logit[(i64)entries.edge[q] * heads + head] = d_z;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums.values[p][i] += weight * factor * gradients[q].at(p, i);
      }
    }
  }

  if (task.slot < 0) {
    sums.store_rounded(dx + (task.row * heads + head) * width, width);
    if (writes_edges) d_el[task.row * heads + head] = el_sum;
  } else {
    sums.store_exact(partial + ((i64)task.slot * heads + head) * width, width);
    if (writes_edges) partial_el[(i64)task.slot * heads + head] = el_sum;
  }
}
EXPORT_KERNEL(gat_bwd_kernel)
#endif

#if KERNELS == KERNELS_GATV2 || KERNELS == KERNELS_GATV2_BACKWARD
// One lane's part of attention . leaky_relu(lhs + rhs), from memory: for heads that are wider than a tile.
INLINE float attention_dot(const T* attention, const T* lhs, const T* rhs, float slope, int width) {
  float sum = 0.f;
#pragma unroll 1
  for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
    const Features weights = load_features(attention + column);
    const Features left = load_features(lhs + column), right = load_features(rhs + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      sum += feature(weights, i) * leaky_relu(feature(left, i) + feature(right, i), slope);
    }
  }
  return sum;
}

// The same from registers.
INLINE float attention_dot(const HeadRow& attention, const HeadRow& lhs, const HeadRow& rhs, float slope) {
  float sum = 0.f;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += attention.at(p, i) * leaky_relu(lhs.at(p, i) + rhs.at(p, i), slope);
  }
  return sum;
}
#endif

#if KERNELS == KERNELS_GATV2
KERNEL(gatv2_fwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ x_src,
    const T* __restrict__ x_dst, const T* __restrict__ attention, T* __restrict__ out, float* __restrict__ lse,
    float* __restrict__ partial, float* __restrict__ partial_max, float* __restrict__ partial_sum, int heads, int width,
    float slope, DROPOUT_PARAMS) {
  const i64 t = group_index() / heads;
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const int head = (int)(group_index() % heads);
  const bool writes_head = group_lane() == 0 && blockIdx.y == 0;
  const T* const dst_row = x_dst + (task.row * heads + head) * width;
#if DROPOUT
  const u32 column_word = dropout_column_word(head);
#endif

  HeadRow own, attention_row;
  own.load(dst_row, width);
  attention_row.load(attention + head * width, width);
  HeadSums sums;
  sums.clear();
  float maximum = NEGATIVE_INFINITY, weight_sum = 0.f;
  Entries<true, DROPOUT != 0, HEAD_BATCH> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += HEAD_BATCH) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + HEAD_BATCH, task.end);
    HeadRow features[HEAD_BATCH];
    float logits[HEAD_BATCH];
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      features[q].clear();
      if (k + q < task.end) features[q].load(x_src + ((i64)entries.node[q] * heads + head) * width, width);
    }
    float batch_max = maximum;
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      float part = 0.f;
      if (gridDim.y == 1) {
        part = attention_dot(attention_row, features[q], own, slope);
      } else if (k + q < task.end) {
        const T* const src_row = x_src + ((i64)entries.node[q] * heads + head) * width;
        part = attention_dot(attention + head * width, src_row, dst_row, slope, width);
      }
      part = group_sum(part);
      logits[q] = k + q < task.end ? part : NEGATIVE_INFINITY;
      batch_max = fmaxf(batch_max, logits[q]);
    }
    const float shift = softmax_shift(batch_max), rescale = expf(maximum - shift);
    maximum = batch_max;
    weight_sum *= rescale;
    sums.scale(rescale);
#pragma unroll
    for (int q = 0; q < HEAD_BATCH; ++q) {
      if (k + q >= task.end) break;
      float weight = expf(logits[q] - shift);
      weight_sum += weight;
      weight *= DROPOUT_FACTOR(entries.edge[q]);
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums.values[p][i] += weight * features[q].at(p, i);
      }
    }
  }

  if (task.slot < 0) {
    const bool empty = task.begin == task.end;
    sums.scale(empty ? 0.f : 1.f / weight_sum);
    sums.store_rounded(out + (task.row * heads + head) * width, width);
    if (writes_head) lse[task.row * heads + head] = empty ? 0.f : maximum + logf(weight_sum);
  } else {
    sums.store_exact(partial + ((i64)task.slot * heads + head) * width, width);
    if (writes_head) {
      partial_max[(i64)task.slot * heads + head] = maximum;
      partial_sum[(i64)task.slot * heads + head] = weight_sum;
    }
  }
}
EXPORT_KERNEL(gatv2_fwd_kernel)
#endif

#if KERNELS == KERNELS_GATV2_BACKWARD
// Over the transposed graph: dx_src, and d_logit per edge for the pass over the destinations. Both dot products of an
// edge (its logit again, and grad . x_src) come from one gather of x_dst and one of grad.
KERNEL(gatv2_src_bwd_kernel)(
    TASK_PARAMS, const Index* __restrict__ indices, const Index* __restrict__ edge_ids, const T* __restrict__ x_src,
    const T* __restrict__ x_dst, const T* __restrict__ attention, const T* __restrict__ grad,
    const float* __restrict__ terms, T* __restrict__ dx_src, float* __restrict__ d_logit, float* __restrict__ partial,
    int heads, int width, float slope, DROPOUT_PARAMS) {
  enum { COUNT = HEAD_BATCH >= 2 ? HEAD_BATCH / 2 : 1 };
  const i64 t = group_index() / heads;
  if (t >= num_tasks) return;
  const Task task = READ_TASK(t);
  const int head = (int)(group_index() % heads);
  const bool writes_edges = group_lane() == 0 && blockIdx.y == 0;
  const T* const src_row = x_src + (task.row * heads + head) * width;
#if DROPOUT
  const u32 column_word = dropout_column_word(head);
#endif

  HeadRow own, attention_row;
  own.load(src_row, width);
  attention_row.load(attention + head * width, width);
  HeadSums sums;
  sums.clear();
  Entries<true, true, COUNT> ahead;
  ahead.load(indices, edge_ids, task.begin, task.end);
  for (i64 k = task.begin; k < task.end; k += COUNT) {
    const auto entries = ahead;
    ahead.load(indices, edge_ids, k + COUNT, task.end);
    HeadRow features[COUNT], gradients[COUNT];
    float4 term[COUNT];
    float logits[COUNT] = {}, dots[COUNT] = {};
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
      features[q].clear();
      gradients[q].clear();
      term[q].y = term[q].z = 0.f;
      if (k + q < task.end) {
        const i64 at = (i64)entries.node[q] * heads + head;
        features[q].load(x_dst + at * width, width);
        gradients[q].load(grad + at * width, width);
        term[q] = __ldg((const float4*)terms + at);
        if (gridDim.y > 1) {
          logits[q] = attention_dot(attention + head * width, src_row, x_dst + at * width, slope, width);
#pragma unroll 1
          for (int column = group_lane() * VEC; column < width; column += GROUP * VEC) {
            const Features left = load_features(grad + at * width + column), right = load_features(src_row + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) dots[q] += feature(left, i) * feature(right, i);
          }
        }
      }
    }
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
      if (gridDim.y == 1) {
        logits[q] = attention_dot(attention_row, own, features[q], slope);
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) dots[q] += gradients[q].at(p, i) * own.at(p, i);
        }
      }
      logits[q] = group_sum(logits[q]);
      dots[q] = group_sum(dots[q]);
    }
#pragma unroll
    for (int q = 0; q < COUNT; ++q) {
      if (k + q >= task.end) break;
      const float weight = expf(logits[q] - term[q].y), factor = DROPOUT_FACTOR(entries.edge[q]);
      const float d_z = weight * (factor * dots[q] - term[q].z);
      if (writes_edges) d_logit[(i64)entries.edge[q] * heads + head] = d_z;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float inner = own.at(p, i) + features[q].at(p, i);
          sums.values[p][i] += weight * factor * gradients[q].at(p, i);
          sums.values[p][i] += d_z * attention_row.at(p, i) * (inner > 0.f ? 1.f : slope);
        }
      }
    }
  }

  if (task.slot < 0) {
    sums.store_rounded(dx_src + (task.row * heads + head) * width, width);
  } else {
    sums.store_exact(partial + ((i64)task.slot * heads + head) * width, width);
  }
}
EXPORT_KERNEL(gatv2_src_bwd_kernel)

// Over the in-edges: dx_dst, and the attention's gradient, which every worker sums over all its tasks, so that only
// num_workers rows of it are left to add.
KERNEL(gatv2_dst_bwd_kernel)(
    TASK_PARAMS, i64 num_workers, const Index* __restrict__ indices, const Index* __restrict__ edge_ids,
    const T* __restrict__ x_src, const T* __restrict__ x_dst, const T* __restrict__ attention,
    const float* __restrict__ d_logit, T* __restrict__ dx_dst, float* __restrict__ partial,
    float* __restrict__ partial_attention, int heads, int width, float slope) {
  const i64 worker = group_index() / heads;
  if (worker >= num_workers) return;
  const int head = (int)(group_index() % heads);

  HeadRow attention_row;
  attention_row.load(attention + head * width, width);
  HeadSums attention_sums;
  attention_sums.clear();
  for (i64 t = worker; t < num_tasks; t += num_workers) {
    const Task task = READ_TASK(t);
    HeadRow own;
    own.load(x_dst + (task.row * heads + head) * width, width);
    HeadSums sums;
    sums.clear();
    Entries<true, true, HEAD_BATCH> ahead;
    ahead.load(indices, edge_ids, task.begin, task.end);
    for (i64 k = task.begin; k < task.end; k += HEAD_BATCH) {
      const auto entries = ahead;
      ahead.load(indices, edge_ids, k + HEAD_BATCH, task.end);
      HeadRow features[HEAD_BATCH];
      float d_z[HEAD_BATCH] = {};
#pragma unroll
      for (int q = 0; q < HEAD_BATCH; ++q) {
        features[q].clear();
        if (k + q < task.end) {
          features[q].load(x_src + ((i64)entries.node[q] * heads + head) * width, width);
          d_z[q] = __ldg(d_logit + (i64)entries.edge[q] * heads + head);
        }
      }
#pragma unroll
      for (int q = 0; q < HEAD_BATCH; ++q) {
        if (k + q >= task.end) break;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            const float inner = features[q].at(p, i) + own.at(p, i), slope_here = inner > 0.f ? 1.f : slope;
            sums.values[p][i] += d_z[q] * slope_here;  // times the attention, once, below
            attention_sums.values[p][i] += d_z[q] * slope_here * inner;
          }
        }
      }
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) sums.values[p][i] *= attention_row.at(p, i);
    }
    if (task.slot < 0) {
      sums.store_rounded(dx_dst + (task.row * heads + head) * width, width);
    } else {
      sums.store_exact(partial + ((i64)task.slot * heads + head) * width, width);
    }
  }
  attention_sums.store_exact(partial_attention + (worker * heads + head) * width, width);
}
EXPORT_KERNEL(gatv2_dst_bwd_kernel)
#endif
