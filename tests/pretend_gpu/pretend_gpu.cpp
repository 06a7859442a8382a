// SPDX-License-Identifier: Apache-2.0
// What a PyTorch without CUDA lacks to believe in one GPU: a device guard for autograd's threads, the hooks that say
// there is a GPU, and its generators. Nothing here computes: tensors of the device are Python objects (device.py).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kGpu(DeviceType::CUDA, 0);

// One GPU with one stream on which everything is done as soon as it is launched.
struct OneGpu final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kGpu; }
  Device getDevice() const override { return kGpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kGpu); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// A CPU generator that says it is the GPU's: PyTorch's CPU kernels refuse it, device.py lends them another one.
struct GpuGenerator final : at::CPUGeneratorImpl {
  GpuGenerator() { device_ = kGpu; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<GpuGenerator>(); }
};

// PyTorch makes its hooks while it is imported and keeps them for good. These take the place of that object, which has
// no state: so the GPU can be there at any time before the first use of one, and nothing need be preloaded.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

}  // namespace

extern "C" void pretend_gpu_install() {
  static OneGpu guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
