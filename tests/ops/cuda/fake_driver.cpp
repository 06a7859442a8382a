// SPDX-License-Identifier: Apache-2.0
// A CUDA driver whose GPUs are this CPU. A "cubin" is the path of a shared library that holds kernels compiled for the
// host of tests/ops/simt; loading opens it, launching runs the kernel before it returns. What the real driver refuses
// and a host would let pass is refused here too: a foreign context, a grid or block beyond the limits, a stale function.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
typedef int (*Launch)(const char*, const unsigned*, const unsigned*, void**, unsigned);
typedef const char* (*Signature)(const char*);
typedef const char* (*Error)();
struct Module { int device; void* library; };
struct Function { int device; std::string name; Launch launch; Error error; };
std::mutex mutex, running;  // the host of the kernels runs one at a time
std::map<void*, Module> modules;
std::map<void*, Function> functions;
char contexts[16];
int devices = 2, fail_next = 0, launches = 0, depth_at_launch = 0;
unsigned seed = 1;
void* last_stream = nullptr;
std::string failure = "as the driver words it";
bool initialised = false;
thread_local std::vector<void*> stack;
int device_of(void* context) {
  char* c = (char*)context;
  return c >= contexts && c < contexts + devices ? int(c - contexts) : -1;
}
int current() { return stack.empty() ? -1 : device_of(stack.back()); }
}  // namespace

extern "C" {
// What tests set and read.
void fake_set(int num_devices, int next_failure, unsigned next_seed) {
  devices = num_devices, fail_next = next_failure, seed = next_seed;
}
int fake_launches() { return launches; }
int fake_depth() { return (int)stack.size(); }
int fake_depth_at_launch() { return depth_at_launch; }
void* fake_last_stream() { return last_stream; }

// A kernel that writes down the parameters it was given.
struct Record { unsigned grid[3], block[3]; void* pointer; void* null; int i; long long l; unsigned long long u; float f; };
const char* simt_signature(const char* name) { return strcmp(name, "record") ? nullptr : "pppiluf"; }
const char* simt_error() { return ""; }
int simt_launch(const char*, const unsigned* grid, const unsigned* block, void** a, unsigned) {
  Record* r = *(Record**)a[0];
  memcpy(r->grid, grid, sizeof r->grid), memcpy(r->block, block, sizeof r->block);
  r->pointer = *(void**)a[1], r->null = *(void**)a[2], r->i = *(int*)a[3], r->l = *(long long*)a[4];
  r->u = *(unsigned long long*)a[5], r->f = *(float*)a[6];
  return 0;
}

int cuInit(unsigned) { return devices == 0 ? NO_DEVICE : (initialised = true, OK); }
int cuDriverGetVersion(int* v) { *v = 12080; return OK; }
int cuDeviceGetCount(int* v) { *v = devices; return initialised ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int* v, int ordinal) { *v = ordinal + 70; return ordinal >= 0 && ordinal < devices ? OK : INVALID_DEVICE; }
int cuDeviceGetName(char* text, int size, int device) { snprintf(text, size, "Fake GPU %d", device - 70); return OK; }
int cuDeviceGetAttribute(int* v, int attribute, int) {
  *v = attribute == 75 ? 9 : 0;
  return attribute == 75 || attribute == 76 ? OK : INVALID_VALUE;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = contexts + (device - 70); return OK; }
int cuCtxPushCurrent_v2(void* context) {
  if (device_of(context) < 0) return INVALID_CONTEXT;
  stack.push_back(context);
  return OK;
}
int cuCtxPopCurrent_v2(void** context) {
  if (stack.empty()) return INVALID_CONTEXT;
  *context = stack.back(), stack.pop_back();
  return OK;
}
int cuModuleLoadData(void** module, const void* image) {
  if (current() < 0) return INVALID_CONTEXT;
  void* library = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
  if (!library) return INVALID_IMAGE;
  std::lock_guard<std::mutex> lock(mutex);
  *module = new char;
  modules[*module] = {current(), library};
  return OK;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = modules.find(module);
  if (found == modules.end() || found->second.device != current()) return INVALID_HANDLE;
  void* library = found->second.library;
  Signature signature = (Signature)dlsym(library, "simt_signature");
  if (!signature || !signature(name)) return NOT_FOUND;
  *function = new char;
  functions[*function] = {found->second.device, name, (Launch)dlsym(library, "simt_launch"),
                          (Error)dlsym(library, "simt_error")};
  return OK;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  Function f;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = functions.find(function);
    if (found == functions.end() || found->second.device != current()) return INVALID_HANDLE;
    f = found->second;
  }
  if (fail_next) { int status = fail_next; fail_next = 0; return status; }
  if (!gx || !gy || !gz || gx > 0x7fffffffu || gy > 65535 || gz > 65535 || !bx || !by || !bz || extra || shared ||
      (unsigned long long)bx * by * bz > 1024)
    return INVALID_VALUE;
  depth_at_launch = (int)stack.size(), last_stream = stream, launches++;
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  std::lock_guard<std::mutex> lock(running);
  if (f.launch(f.name.c_str(), grid, block, parameters, seed++) == 0) return OK;
  failure = f.error();
  return LAUNCH_FAILED;
}
int cuGetErrorName(int status, const char** text) {
  static const std::map<int, const char*> names = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"}};
  auto found = names.find(status);
  *text = found == names.end() ? nullptr : found->second;
  return *text ? OK : INVALID_VALUE;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 12345 ? nullptr : status == LAUNCH_FAILED ? failure.c_str() : "as the driver words it";
  return *text ? OK : INVALID_VALUE;
}
}
