// A stand-in accelerator for tests: devices of torch's PrivateUse1 whose memory is host memory.
//
// Tensors of the device have the dispatch keys, storages, streams, generators and pinned memory of an accelerator, but
// each operation computes on the CPU. A tensor of the CPU and one of the device do not mix, as on hardware.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;
constexpr int64_t BYTES_OF_A_DEVICE = int64_t(64) << 30;

DeviceIndex device_count() {
  const char* text = std::getenv("STAND_IN_DEVICES");
  return static_cast<DeviceIndex>(text == nullptr ? 2 : std::atoi(text));
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, MOST_DEVICES> current_streams{};

// -------------------------------------------------------------------------------------------------- memory

struct Used {
  int64_t now = 0, peak = 0, sum = 0, freed = 0;
};

std::mutex memory_mutex;
std::array<Used, MOST_DEVICES> used;
std::unordered_map<void*, std::pair<DeviceIndex, size_t>> blocks;
std::unordered_set<void*> pinned;

void free_device(void* data) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  const auto block = blocks.find(data);
  if (block == blocks.end()) return;
  Used& of_device = used[block->second.first];
  of_device.now -= static_cast<int64_t>(block->second.second);
  of_device.freed += static_cast<int64_t>(block->second.second);
  blocks.erase(block);
  std::free(data);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(KIND, current_device);
    if (bytes == 0) return {nullptr, nullptr, &free_device, device};
    std::lock_guard<std::mutex> guard(memory_mutex);
    Used& of_device = used[current_device];
    const auto size = static_cast<int64_t>(bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, of_device.now + size <= BYTES_OF_A_DEVICE, "NPU out of memory: ", size, " bytes");
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    blocks[data] = {current_device, bytes};
    of_device.now += size;
    of_device.sum += size;
    of_device.peak = std::max(of_device.peak, of_device.now);
    return {data, data, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& stat = (*kind)[0];
      stat.current = used[device].now;
      stat.peak = used[device].peak;
      stat.allocated = used[device].sum;
      stat.freed = used[device].freed;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override { used[device].sum = used[device].freed = 0; }
  void resetPeakStats(DeviceIndex device) override { used[device].peak = used[device].now; }
};

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, c10::DeviceType::CPU};
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard<std::mutex> guard(memory_mutex);
    pinned.insert(data);
    return {data, data, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

// -------------------------------------------------------------------------------------------------- random numbers

struct StandInGenerator final : c10::GeneratorImpl {
  explicit StandInGenerator(DeviceIndex index)
      : GeneratorImpl(Device(KIND, index), c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}
  at::Generator host;  // draws the numbers
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }

 protected:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new StandInGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (int number = 0; number < MOST_DEVICES; ++number)
      all.push_back(at::make_generator<StandInGenerator>(static_cast<DeviceIndex>(number)));
    return all;
  }();
  return generators[index < 0 ? current_device : index];
}

at::Generator on_host(const at::Generator& generator) {
  return static_cast<StandInGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// -------------------------------------------------------------------------------------------------- devices, streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    const Device before(KIND, current_device);
    current_device = device.index() < 0 ? current_device : device.index();
    return before;
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(Device device) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index), current_streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    const auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index), ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  // Work is finished when its call returns, so events and streams never wait.
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<StandInGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(memory_mutex);
    return pinned.count(const_cast<void*>(data)) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto data = device_memory.allocate(bytes);
    if (bytes > 0 && impl->nbytes() > 0) std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

// -------------------------------------------------------------------------------------------------- operations

at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const auto options = tensor.options().device(c10::DeviceType::CPU);
  // A tensor without elements may be an output that the operation resizes.
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_device(const at::Tensor& host, Device device) {
  if (!host.defined() || !host.is_cpu()) return host;
  const c10::DeviceGuard guard(device);
  auto tensor = at::empty_strided(host.sizes(), host.strides(), host.options().device(device));
  if (host.numel() > 0) host_alias(tensor).copy_(host);
  return tensor;
}

// These read and write sizes, strides and storages alone, so the kernels of the CPU serve any tensor.
const std::unordered_set<std::string> METADATA = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_", "aten::resize_",
    "aten::view_as_real", "aten::view_as_complex", "aten::_unsafe_view",
};

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (METADATA.count(schema.name())) {
    op.callBoxedForDispatchKey(DispatchKey::CPU, *stack);
    return;
  }
  at::AutoDispatchBelowAutograd guard;
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  stack->resize(stack->size() - count);
  Device device(KIND, current_device);
  bool mixed = false;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) device = tensor.device();
    mixed = mixed || (tensor.is_cpu() && tensor.dim() > 0);
  };
  std::vector<at::Tensor> hosts(count);
  for (size_t number = 0; number < count; ++number) {
    const auto& value = arguments[number];
    if (value.isTensor()) {
      see(value.toTensor());
      hosts[number] = host_alias(value.toTensor());
      stack->emplace_back(hosts[number]);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        see(tensor);
        list.push_back(host_alias(tensor));
      }
      stack->emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(host_alias(*tensor)) : std::nullopt);
      }
      stack->emplace_back(std::move(list));
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      if (value.toDevice().has_index()) device = value.toDevice();
      stack->emplace_back(Device(c10::DeviceType::CPU));
    } else if (value.isGenerator() && value.toGenerator().device().type() == KIND) {
      stack->emplace_back(on_host(value.toGenerator()));
    } else if (value.isNone() && schema.arguments()[number].type()->str() == "Generator?") {
      stack->emplace_back(on_host(default_generator(device.index())));
    } else {
      stack->emplace_back(value);
    }
  }
  TORCH_CHECK(
      !mixed || schema.name() == "aten::copy_" || schema.name() == "aten::index_put_",
      "Expected all tensors to be on the same device, but got tensors of the CPU and of the device: ",
      schema.name());
  op.callBoxed(stack);
  const size_t returned = schema.returns().size();
  const size_t first = stack->size() - returned;
  for (size_t number = 0; number < returned; ++number) {
    auto& value = (*stack)[first + number];
    const auto* alias = schema.returns()[number].alias_info();
    if (alias != nullptr && value.isTensor()) {
      for (size_t argument = 0; argument < count; ++argument) {
        const auto* other = schema.arguments()[argument].alias_info();
        if (other == nullptr || *other != *alias || !arguments[argument].isTensor()) continue;
        auto original = arguments[argument].toTensor();
        if (original.is_privateuseone() && original.sizes() != hosts[argument].sizes()) {
          original.resize_(hosts[argument].sizes());
          host_alias(original).copy_(hosts[argument]);
        }
        value = original;
      }
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, device));
      value = std::move(list);
    }
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool>) {
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  const auto on_cpu = bias ? std::optional<at::Tensor>(host_alias(*bias)) : std::nullopt;
  return on_device(
      at::convolution(host_alias(input), host_alias(weight), on_cpu, stride, padding, dilation, transposed,
                      output_padding, groups),
      input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t of_bias[] = {weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto all = at::convolution_backward(
      host_alias(grad), host_alias(input), host_alias(weight), at::IntArrayRef(of_bias), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  const auto device = input.device();
  return {on_device(std::get<0>(all), device), on_device(std::get<1>(all), device), on_device(std::get<2>(all), device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  for (const char* name : {"copy_", "_fused_adamw_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

// -------------------------------------------------------------------------------------------------- collectives

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors aliases(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_privateuseone(), "hccl takes tensors of its device, not of ", tensor.device());
    TORCH_CHECK(tensor.scalar_type() != at::kDouble, "hccl does not support float64");
    all.push_back(host_alias(tensor));
  }
  return all;
}

std::vector<Tensors> aliases(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& list : lists) all.push_back(aliases(list));
  return all;
}

// Passes the host memory of its tensors to gloo.
struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}
  c10::intrusive_ptr<c10d::Backend> gloo;

  const std::string getBackendName() const override { return "hccl"; }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = aliases(tensors);
    return gloo->broadcast(host, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = aliases(tensors);
    return gloo->allreduce(host, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = aliases(tensors);
    return gloo->allreduce_coalesced(host, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = aliases(tensors);
    return gloo->reduce(host, options);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_out = aliases(out);
    auto host_in = aliases(in);
    return gloo->allgather(host_out, host_in, options);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto host = aliases({out, in});
    return gloo->_allgather_base(host[0], host[1], options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_out = aliases(out), host_in = aliases(in);
    return gloo->allgather_into_tensor_coalesced(host_out, host_in, options);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto host_out = aliases(out);
    auto host_in = aliases(in);
    return gloo->gather(host_out, host_in, options);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto host_out = aliases(out);
    auto host_in = aliases(in);
    return gloo->scatter(host_out, host_in, options);
  }
  WorkPtr reduce_scatter(
      Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto host_out = aliases(out);
    auto host_in = aliases(in);
    return gloo->reduce_scatter(host_out, host_in, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto host = aliases({out, in});
    return gloo->_reduce_scatter_base(host[0], host[1], options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    auto host_out = aliases(out), host_in = aliases(in);
    return gloo->reduce_scatter_tensor_coalesced(host_out, host_in, options);
  }
  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto host = aliases({out, in});
    return gloo->alltoall_base(host[0], host[1], out_sizes, in_sizes, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = aliases(tensors);
    return gloo->send(host, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = aliases(tensors);
    return gloo->recv(host, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return gloo->barrier(c10d::BarrierOptions{{}, options.timeout});
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("count", &device_count);
  m.def("current", [] { return current_device; });
  m.def("set", [](DeviceIndex device) { current_device = device; });
  m.def("generator", [](DeviceIndex index) { return default_generator(index); });
  m.def("total", [] { return BYTES_OF_A_DEVICE; });
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(gloo);
  });
}
