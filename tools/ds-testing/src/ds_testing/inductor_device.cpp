// What a torch for the CPU lacks to trace tensors of a CUDA device that is not there: a guard that does nothing, hooks that say that
// the device is built in, and the choice of an attention kernel. Compiled and loaded by inductor_device.py.

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;

// Streams of one device, so that autograd finds producer and consumer on the same one and records no event.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  static c10::Stream stream() {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0));
  }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

// Flash attention where it takes the format and there is no mask, else the memory-efficient one (at::SDPBackend).
int64_t attention(
    const at::Tensor& query,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>& mask,
    double,
    bool,
    std::optional<double>,
    bool) {
  const auto dtype = query.scalar_type();
  return (dtype == at::kHalf || dtype == at::kBFloat16) && !mask ? 1 : 2;
}

} // namespace

extern "C" void stand_in() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(new Guard());
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}
