// What autograd asks of a CUDA device: torch without CUDA has nobody to answer, not even for fake tensors.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

namespace at {

struct FakeHooks : CUDAHooksInterface {
  FakeHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)

} // namespace at

namespace {

struct FakeGuard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int = 0) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new FakeGuard());

} // namespace
