// SPDX-License-Identifier: Apache-2.0
//
// CUDA threads on a CPU, for tests: what a kernel source sees in place of CUDA's own declarations (simt_host.cpp runs it).
// It includes next to nothing, since it is compiled with every specialisation.
#pragma once

#include <stdint.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" float expf(float) noexcept;
extern "C" float logf(float) noexcept;
extern "C" float fmaxf(float, float) noexcept;

namespace simt {

int lane();
// Waits for the lanes of the mask; returns the value that the source lane brought.
uint64_t exchange(unsigned mask, uint64_t value, int source);
void synchronize(unsigned mask);
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);
void register_kernel(const char* name, void (*run)(void**), const char* signature);

template <class V>
V shuffle(unsigned mask, V value, int source) {
  static_assert(sizeof(V) <= 8, "a shuffle moves 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(V));
  bits = exchange(mask, bits, source);
  __builtin_memcpy(&value, &bits, sizeof(V));
  return value;
}

// A letter per parameter: p pointer, i int, l long long, u unsigned long long, f float.
template <class P>
struct Letter;
template <class P>
struct Letter<P*> {
  enum { value = 'p' };
};
template <>
struct Letter<int> {
  enum { value = 'i' };
};
template <>
struct Letter<long long> {
  enum { value = 'l' };
};
template <>
struct Letter<unsigned long long> {
  enum { value = 'u' };
};
template <>
struct Letter<float> {
  enum { value = 'f' };
};

template <int... I>
struct Positions {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  typedef Positions<I...> Type;
};

template <class... P, int... I>
void call(void (*kernel)(P...), void** arguments, Positions<I...>) {
  kernel(*(P*)arguments[I]...);
}
template <class... P>
void call(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, typename Count<sizeof...(P)>::Type());
}

template <class... P>
void register_kernel(const char* name, void (*run)(void**), void (*)(P...)) {
  static const char signature[] = {(char)Letter<P>::value..., 0};
  register_kernel(name, run, signature);
}

}  // namespace simt

#define EXPORT_KERNEL(name)                                                                                 \
  static const int name##_registered =                                                                     \
      (simt::register_kernel(#name, [](void** arguments) { simt::call(name, arguments); }, name), 0);

static inline void __syncwarp(unsigned mask = ~0u) { simt::synchronize(mask); }
template <class V>
V __shfl_sync(unsigned mask, V value, int source, int width = 32) {
  return simt::shuffle(mask, value, (simt::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class V>
V __shfl_xor_sync(unsigned mask, V value, int offset) {
  return simt::shuffle(mask, value, simt::lane() ^ offset);
}
template <class V>
V __ldg(const V* address) {
  return *address;
}
static inline float __uint_as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
