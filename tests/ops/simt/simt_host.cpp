// SPDX-License-Identifier: Apache-2.0
//
// Runs CUDA kernels on a CPU, for tests. Each thread of a block is a fiber; warp operations are rendez-vous of the lanes
// their mask names; the order of blocks, and of threads between rendez-vous, is random, by seed. An error (deadlock, a lane
// that is not in its own mask, a shuffle that reads a lane outside the mask, a mask with a lane that has exited) ends the
// launch with a message. README.md says what such a host cannot see.
#include "simt_host.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_ASSEMBLY_SWITCH 1
#else
#define SIMT_ASSEMBLY_SWITCH 0
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

#if SIMT_ASSEMBLY_SWITCH
// Saves the callee-saved registers on the running stack, and goes on where the other stack was left. Without the signal
// mask, which swapcontext saves by a system call each time, a switch takes nanoseconds.
extern "C" void simt_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.local simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stack, . - simt_switch_stack
)");
typedef void* Context;
#else
typedef ucontext_t Context;
#endif

constexpr size_t kStackBytes = 256 << 10;
constexpr int kMaxThreads = 1024;

enum class Operation { kSync, kShuffle };

struct Fiber {
  Context context;
  dim3 thread;
  bool done;
};

// Lanes that wait for each other: the ones with the same mask.
struct Meeting {
  unsigned mask, arrived;
  Operation operation;
  uint64_t value[32];
  int source[32];
};

struct Warp {
  std::vector<Meeting> open;
  unsigned exited;
  uint64_t result[32];
};

static Fiber fibers[kMaxThreads];
static std::vector<Warp> warps;
static std::vector<int> ready;  // fibers that can run
static Context scheduler;
static int current, live;
static std::mt19937 rng;
static std::string error;
static char* stacks;
static void (*run_thread)(void*);
static void* run_argument;

static void leave() {
#if SIMT_ASSEMBLY_SWITCH
  simt_switch_stack(&fibers[current].context, scheduler);
#else
  swapcontext(&fibers[current].context, &scheduler);
#endif
}

static void enter(int fiber) {
  current = fiber;
  threadIdx = fibers[fiber].thread;
#if SIMT_ASSEMBLY_SWITCH
  simt_switch_stack(&scheduler, fibers[fiber].context);
#else
  swapcontext(&scheduler, &fibers[fiber].context);
#endif
}

// Ends the launch: the scheduler looks at the error first, and never comes back to this fiber.
static void fail(const char* what, unsigned mask = 0) {
  char text[256];
  snprintf(text, sizeof text, "%s (block %u,%u, thread %u, mask 0x%08x)", what, blockIdx.x, blockIdx.y, threadIdx.x, mask);
  error = text;
  leave();
}

static void thread_main() {
  run_thread(run_argument);
  fibers[current].done = true;
  warps[current / 32].exited |= 1u << current % 32;
  --live;
  leave();
}

static void prepare(int fiber) {
  Fiber& f = fibers[fiber];
  char* const top = stacks + (fiber + 1) * kStackBytes;
#if SIMT_ASSEMBLY_SWITCH
  void** slots = (void**)top - 8;  // six registers, the address that `ret` takes, and one slot that aligns the stack
  std::fill(slots, slots + 8, nullptr);
  slots[6] = (void*)thread_main;
  f.context = slots;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = top - kStackBytes;
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, thread_main, 0);
#endif
  const unsigned i = fiber;
  f.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
  f.done = false;
}

// The running lane brings a value and waits for the other lanes of the mask; returns what the source lane brought. The
// last one to arrive computes everybody's result.
static uint64_t meet(unsigned mask, Operation operation, uint64_t value, int source) {
  Warp& warp = warps[current / 32];
  const int lane = current % 32;
  if (!(mask >> lane & 1)) fail("lane is not in its own mask", mask);
  if (mask & warp.exited) fail("mask names a lane that has exited", mask);
  auto meeting = std::find_if(warp.open.begin(), warp.open.end(), [&](const Meeting& m) { return m.mask == mask; });
  if (meeting == warp.open.end()) {
    warp.open.push_back(Meeting{mask, 0, operation, {}, {}});
    meeting = warp.open.end() - 1;
  }
  if (meeting->operation != operation) fail("lanes of a mask are at different operations", mask);
  meeting->arrived |= 1u << lane;
  meeting->value[lane] = value;
  meeting->source[lane] = source;
  if (meeting->arrived != mask) {
    leave();
    return warp.result[lane];
  }
  const int base = current / 32 * 32;
  for (int other = 0; other < 32; ++other) {
    if (!(mask >> other & 1)) continue;
    const int from = meeting->source[other];
    if (from < 0 || from > 31 || !(mask >> from & 1)) fail("shuffle reads a lane outside its mask", mask);
    warp.result[other] = meeting->value[from];
    if (other != lane) ready.push_back(base + other);
  }
  warp.open.erase(meeting);
  return warp.result[lane];
}

static void run_block() {
  live = blockDim.x * blockDim.y * blockDim.z;
  warps.assign((live + 31) / 32, Warp());
  if (live % 32) warps.back().exited = ~0u << live % 32;
  ready.clear();
  for (int i = 0; i < live; ++i) {
    prepare(i);
    ready.push_back(i);
  }
  while (live > 0 && error.empty()) {
    if (ready.empty()) {
      char text[128];
      snprintf(text, sizeof text, "deadlock: %d threads wait for lanes that never come (block %u,%u)", live, blockIdx.x, blockIdx.y);
      error = text;
      return;
    }
    const size_t pick = rng() % ready.size();
    std::swap(ready[pick], ready.back());
    const int fiber = ready.back();
    ready.pop_back();
    enter(fiber);
  }
}

struct Kernel {
  void (*run)(void**);
  const char* signature;
};

static std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> registry;
  return registry;
}

static int launch(const Kernel& kernel, const unsigned* grid, const unsigned* block, void** arguments, unsigned seed) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  rng.seed(seed);
  error.clear();
  if ((uint64_t)block[0] * block[1] * block[2] > kMaxThreads) {
    error = "a block has at most 1024 threads";
    return 1;
  }
  if (!stacks) {
    void* const memory = mmap(
        nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      error = "no memory for the stacks";
      return 1;
    }
    stacks = (char*)memory;
  }
  struct Invocation {
    const Kernel* kernel;
    void** arguments;
  } invocation = {&kernel, arguments};
  run_argument = &invocation;
  run_thread = [](void* argument) {
    const Invocation* const what = (const Invocation*)argument;
    what->kernel->run(what->arguments);
  };
  std::vector<uint64_t> blocks((uint64_t)grid[0] * grid[1] * grid[2]);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), rng);
  for (const uint64_t i : blocks) {
    blockIdx = {(unsigned)(i % grid[0]), (unsigned)(i / grid[0] % grid[1]), (unsigned)(i / grid[0] / grid[1])};
    run_block();
    if (!error.empty()) return 1;
  }
  return 0;
}

float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  float value;
  if (exponent == 0) {
    value = std::ldexp((float)mantissa, -24);
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.f)) return sign | (magnitude != magnitude ? 0x7e00 : 0x7c00);
  if (magnitude == 0.f) return sign;
  // Scaled so that a unit is the last place of the result; nearbyint rounds halves to even, as the device does.
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -13);
  const uint32_t units = (uint32_t)std::nearbyint(std::ldexp(magnitude, 11 - exponent));
  return sign | (uint16_t)(units + ((uint32_t)(exponent + 13) << 10));  // a carry out of the mantissa lands in the exponent
}

int lane() { return current % 32; }
uint64_t exchange(unsigned mask, uint64_t value, int source) { return meet(mask, Operation::kShuffle, value, source); }
void synchronize(unsigned mask) { meet(mask, Operation::kSync, 0, lane()); }
void register_kernel(const char* name, void (*run)(void**), const char* signature) { kernels()[name] = {run, signature}; }

}  // namespace simt

// What Python calls. Arguments are as for cuLaunchKernel: the address of each parameter's value. Returns 0, or 1 with a
// message in simt_error(); -1 if there is no such kernel.
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int simt_launch(const char* name, const unsigned* grid, const unsigned* block, void** arguments, unsigned seed) {
  const auto found = simt::kernels().find(name);
  return found == simt::kernels().end() ? -1 : simt::launch(found->second, grid, block, arguments, seed);
}
EXPORT const char* simt_error() { return simt::error.c_str(); }
EXPORT const char* simt_signature(const char* name) {
  const auto found = simt::kernels().find(name);
  return found == simt::kernels().end() ? nullptr : found->second.signature;
}
