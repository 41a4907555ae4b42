// A second kind of device on any machine, for tests: `card:0` and `card:1`, whose memory is the host's. Operations run
// on the CPU and refuse tensors of several devices, as those of an accelerator do. No streams, nothing is late.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using c10::SymIntArrayRef;

constexpr auto CARD = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_CARDS = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? 0 : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CARD;
  c10::DeviceType type() const override { return CARD; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(CARD, current);
    current = index_of(device);
    return before;
  }
  c10::Device getDevice() const override { return {CARD, current}; }
  void setDevice(c10::Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index_of(device); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_CARDS; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = num_bytes ? std::aligned_alloc(64, (num_bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, c10::Device(CARD, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
} allocator;
REGISTER_ALLOCATOR(CARD, &allocator);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_CARDS; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Device getDeviceFromPtr(void*) const override { return {CARD, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(num_bytes);
    std::memcpy(memory.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    auto& changed = const_cast<c10::Storage&>(storage);
    changed.set_data_ptr_noswap(std::move(memory));
    changed.set_nbytes(num_bytes);
  }
} hooks;

// The same memory, taken for the host's.
Tensor on_host(const Tensor& tensor) {
  if (tensor.device().type() != CARD) return tensor;
  const auto& held = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), held.nbytes(), at::DataPtr(held.mutable_data(), at::kCPU),
                       nullptr, false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return host;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(CARD, current)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, type.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(CARD, current)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, type.value_or(at::kFloat));
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  size_t num_bytes = c10::multiply_integers(size) * self.element_size();
  if (self.storage().nbytes() < num_bytes) hooks.resizePrivateUse1Bytes(self.storage(), num_bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  on_host(to).copy_(on_host(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// Places may be given on the host.
bool takes_places(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> seen;
  const auto& schema = op.schema();
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.device().is_cpu())) return;
    TORCH_CHECK(!seen || *seen == tensor.device(), "Expected all tensors to be on the same device, but found ", *seen,
                " and ", tensor.device(), " in ", schema.name());
    seen = tensor.device();
  };
  if (!takes_places(schema.name())) {
    for (const auto& value : torch::jit::last(*stack, schema.arguments().size())) {
      if (value.isTensor()) look(value.toTensor());
      if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorList()) look(tensor);
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& self) { return on_host(self).item(); });
  m.impl("view", [](const Tensor& self, SymIntArrayRef size) { return at::cpu::view_symint(self, size); });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::cpu::unfold(self, dim, size, step);
  });
  m.impl("as_strided", [](const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, size, stride, offset);
  });
  m.impl("_reshape_alias", [](const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
    return at::cpu::_reshape_alias_symint(self, size, stride);
  });
  m.impl("set_.source_Storage_storage_offset", [](Tensor& self, at::Storage storage, c10::SymInt offset,
                                                  SymIntArrayRef size, SymIntArrayRef stride) -> Tensor& {
    return at::cpu::set__symint(self, storage, offset, size, stride);
  });
}

}  // namespace

extern "C" {
void register_cards() { at::RegisterPrivateUse1HooksInterface(&hooks); }
void set_card(int index) { current = static_cast<c10::DeviceIndex>(index); }
int current_card() { return current; }
}
