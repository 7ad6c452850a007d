// The device's operators: each runs the CPU's kernel on the same bytes, once CUDA's rules are met.
//
// An argument on the device is handed on as a CPU tensor over the same memory; results that are views of an argument
// become views on the device, and new ones move there with their memory. A NaN that is computed has CUDA's bits, all ones
// but for the sign, which a processor does not make. What CUDA refuses is refused: tensors of two
// devices in one operator (but for numbers, tensors of dimension 0 on the CPU), host indices where there is no
// kernel that takes them, a dtype that the CUDA kernel does not know. Operators that make the host wait are noted.
#include "device.h"
#include "rules.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/to.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace rehearsal {

bool half_convolutions_are_broken = false;
std::map<std::string, Fault> faults;

namespace {

using torch::jit::Stack;

// Operators that take tensors of the host beside the device's: indices, lengths.
const std::set<std::string> kMeeting = {
    "aten::index.Tensor",        "aten::index.Tensor_out",       "aten::_index_put_impl_",
    "aten::index_put_",          "aten::_pack_padded_sequence",  "aten::_unsafe_index.Tensor",
    "aten::index_put",           "aten::_unsafe_index_put"};

const std::set<std::string> kMatrixProducts = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv",
    "aten::addmm_", "aten::baddbmm_", "aten::addmv_"};

struct Call {
  const c10::OperatorHandle& op;
  int device = -1;
  // CPU storage made for this call -> the device's storage whose bytes it shows.
  std::unordered_map<c10::StorageImpl*, c10::Storage> shown;
  // CPU tensor made for this call -> the device's tensor.
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases;
  // Alive as long as the call, or another tensor at the same address would be taken for one of them.
  std::vector<at::Tensor> kept;

  explicit Call(const c10::OperatorHandle& operator_) : op(operator_) {}

  std::string name() const {
    const auto& full = op.schema();
    return full.overload_name().empty() ? full.name() : full.name() + "." + full.overload_name();
  }

  c10::Storage alias_of(const c10::Storage& storage) {
    auto& made = aliases[storage.unsafeGetStorageImpl()];
    if (!made) {
      auto* address = storage.nbytes() ? storage.mutable_data() : nullptr;
      made = c10::Storage(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(),
              storage.nbytes(),
              c10::DataPtr(address, c10::Device(c10::kCPU)),
              c10::GetAllocator(c10::kCPU),
              true));
      shown.emplace(made.unsafeGetStorageImpl(), storage);
    }
    return made;
  }

  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_here(tensor)) {
      return tensor;
    }
    TORCH_INTERNAL_ASSERT(
        at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset()) <=
            tensor.storage().nbytes(),
        name(),
        ": a tensor of ",
        tensor.sizes(),
        " does not lie in its ",
        tensor.storage().nbytes(),
        " bytes");
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        alias_of(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    alias.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
    alias.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    originals.emplace(alias.unsafeGetTensorImpl(), tensor);
    kept.push_back(alias);
    return alias;
  }

  c10::Storage storage_on_device(const c10::Storage& storage) {
    const auto found = shown.find(storage.unsafeGetStorageImpl());
    if (found != shown.end()) {
      return found->second;
    }
    // Two results may share what a kernel has just made.
    auto moved = adopt(storage, device, op.schema().name().c_str());
    shown.emplace(storage.unsafeGetStorageImpl(), moved);
    return moved;
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) {
      return tensor;
    }
    const auto found = originals.find(tensor.unsafeGetTensorImpl());
    if (found != originals.end()) {
      return found->second;
    }
    c10::DispatchKeySet keys(kKey);
    if (tensor._is_zerotensor()) {  // zeros that autograd has not written anywhere
      keys = keys.add(c10::DispatchKey::ZeroTensor);
    }
    auto result =
        at::detail::make_tensor<c10::TensorImpl>(storage_on_device(tensor.storage()), keys, tensor.dtype());
    auto* made = result.unsafeGetTensorImpl();
    made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    made->_set_neg(tensor.is_neg());
    made->_set_conj(tensor.is_conj());
    return result;
  }

  // Let a tensor of the device follow what the kernel did to its CPU twin: another size, or other memory.
  void follow(const at::Tensor& alias) {
    const auto found = originals.find(alias.unsafeGetTensorImpl());
    if (found == originals.end()) {
      return;
    }
    auto* original = found->second.unsafeGetTensorImpl();
    const auto twin = shown.find(alias.storage().unsafeGetStorageImpl());
    if (twin == shown.end()) {
      original->set_storage_keep_dtype(adopt(alias.storage(), device, op.schema().name().c_str()));
    } else {
      const auto& storage = twin->second;
      if (storage.unsafeGetStorageImpl() != original->storage().unsafeGetStorageImpl()) {
        original->set_storage_keep_dtype(storage);
      }
      if (alias.storage().data() != storage.data() && alias.storage().nbytes()) {
        auto grown = adopt(alias.storage(), device, op.schema().name().c_str());
        auto data = storage.unsafeGetStorageImpl()->set_data_ptr(
            grown.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, grown.device())));
        storage.unsafeGetStorageImpl()->set_nbytes(alias.storage().nbytes());
      }
    }
    if (original->sizes() != alias.sizes() || original->strides() != alias.strides() ||
        original->storage_offset() != alias.storage_offset()) {
      original->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  [[noreturn]] void refuse(const std::string& other) const {
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, " REHEARSED_NAME ":",
        device < 0 ? current_device() : device,
        " and ",
        other,
        "! (when checking arguments of ",
        name(),
        ")");
  }

  // Check one argument's place; `number`: a tensor of dimension 0 may stay on the host.
  void meet(const at::Tensor& tensor, bool number) {
    if (!tensor.defined()) {
      return;
    }
    if (is_here(tensor)) {
      device = device < 0 ? tensor.get_device() : device;
      if (device != tensor.get_device()) {
        refuse(tensor.device().str());
      }
    } else if (tensor.is_cpu() && !(number && tensor.dim() == 0)) {
      refuse("cpu");
    }
  }

  // Check indices: on the host, or where the indexed tensor is.
  void meet_indices(const at::Tensor& self, const std::vector<at::Tensor>& indices) const {
    for (const auto& index : indices) {
      TORCH_CHECK(
          !index.defined() || index.is_cpu() || index.device() == self.device(),
          "indices should be either on cpu or on the same device as the indexed tensor (",
          self.device(),
          ")");
    }
  }
};

bool is_tensor_list(const c10::IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Intel's Arc cards of the first generation compute nothing in float64.
void refuse_float64(const at::Tensor& tensor) {
#ifdef REHEARSE_XPU
  TORCH_CHECK(
      !tensor.defined() || !is_here(tensor) || tensor.scalar_type() != at::kDouble,
      "Required aspect fp64 is not supported on the device");
#endif
}

// Operators that move bits and compute none.
const std::set<std::string> kMoving = {
    "aten::clone", "aten::cat", "aten::cat.out", "aten::_foreach_copy_", "aten::index_select", "aten::gather", "aten::set_",
    "aten::flip",  "aten::roll"};

template <typename Bits>
void give_nan_its_bits(void* address, int64_t count, Bits infinity, Bits nan) {
  auto* bits = static_cast<Bits*>(address);
  for (int64_t i = 0; i < count; ++i) {
    bits[i] = (bits[i] & nan) > infinity ? nan : bits[i];
  }
}

// Give every NaN the bits that CUDA's arithmetic gives it: 0x7FFFFFFF, and 0x7FFF in half.
void give_nan_its_bits(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage() || !tensor.numel() || tensor._is_zerotensor()) {
    return;  // the zeros of autograd that are written nowhere have no memory
  }
  const auto kind = tensor.scalar_type();
  if (kind != at::kFloat && kind != at::kHalf && kind != at::kBFloat16) {
    return;
  }
  if (!tensor.is_non_overlapping_and_dense()) {
    const auto bits = tensor.view(kind == at::kFloat ? at::kInt : at::kShort);
    bits.masked_fill_(tensor.isnan(), kind == at::kFloat ? 0x7FFFFFFF : 0x7FFF);
  } else if (kind == at::kFloat) {
    give_nan_its_bits<uint32_t>(tensor.mutable_data_ptr(), tensor.numel(), 0x7F800000, 0x7FFFFFFF);
  } else {
    const uint16_t infinity = kind == at::kHalf ? 0x7C00 : 0x7F80;
    give_nan_its_bits<uint16_t>(tensor.mutable_data_ptr(), tensor.numel(), infinity, 0x7FFF);
  }
}

// A test may have asked that an operator fails once.
void fail_if_told(const std::string& name) {
  const auto fault = faults.find(name);
  if (fault == faults.end() || fault->second.calls_before-- > 0) {
    return;
  }
  const auto words = fault->second.words;
  const bool out_of_memory = fault->second.out_of_memory;
  faults.erase(fault);
  TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory, words);
  TORCH_CHECK(false, words);
}

// Draws of an operator without a generator among its arguments come from the CPU's default one: lend it a seed.
struct LentNumbers {
  at::Generator numbers = at::detail::getDefaultCPUGenerator();
  at::Tensor before;

  explicit LentNumbers(uint64_t seed) {
    const std::lock_guard<std::mutex> held(numbers.mutex());
    before = numbers.get_state();
    numbers.set_current_seed(seed);
  }
  ~LentNumbers() {
    const std::lock_guard<std::mutex> held(numbers.mutex());
    numbers.set_state(before);
  }
};

// CUDA's softmax reads float16 and writes float32, and its backward the reverse; the CPU's converts beforehand. Return
// whether the result is to be made float16.
bool widen_softmax(const std::string& name, Stack& stack, size_t first) {
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack[first + 2].toBool()) {
    stack[first] = stack[first].toTensor().to(at::kFloat);
    stack[first + 2] = false;
  }
  if (name != "aten::_softmax_backward_data" && name != "aten::_log_softmax_backward_data") {
    return false;
  }
  const bool mixed = stack[first + 3].toScalarType() == at::kHalf && stack[first].toTensor().scalar_type() == at::kFloat;
  if (mixed) {
    stack[first + 3] = at::kFloat;
  }
  return mixed;
}

// Tensor cores multiply float16 and add in float32, and so does this: the CPU's own kernels for it take up to seventy
// times as long. Return whether the results are to be made float16.
bool widen_convolution(const std::string& name, Stack& stack, size_t first) {
  if (name != "aten::convolution" && name != "aten::convolution_backward") {
    return false;
  }
  bool widened = false;
  for (size_t i = first; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kHalf) {
      value = value.toTensor().to(at::kFloat);
      widened = true;
    }
  }
  return widened;
}

// Operators that show memory in another way, or change what a tensor shows, touch no bytes.
bool touches_bytes(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::set_" || schema.name() == "aten::resize_" || schema.name() == "aten::is_set_to") {
    return false;
  }
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      return false;
    }
  }
  return true;
}

// Enter an operator into its stream's work, with the memory that it reads and writes.
void note_uses(const c10::FunctionSchema& schema, int device, const Stack& stack, size_t first) {
  if (!touches_bytes(schema)) {
    return;
  }
  Work work(device, schema.name().c_str());
  const auto& arguments = schema.arguments();
  for (const bool writes : {false, true}) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (is_written(arguments[i]) != writes) {
        continue;
      }
      for (const auto& tensor : tensors_of(stack[first + i])) {
        if (tensor.defined() && is_here(tensor) && tensor.has_storage()) {
          auto* block = accesses_of(tensor.storage());
          writes ? work.writes(block, range_of(tensor)) : work.reads(block, range_of(tensor));
        }
      }
    }
  }
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Call call(op);
  const auto name = call.name();
  if (name.rfind("aten::_use_", 0) == 0) {  // whether another library's kernel is to be taken
    stack->resize(first);
    stack->emplace_back(false);
    return;
  }

  bool wants_device = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = (*stack)[first + i];
    if (value.isDevice() && is_here(value.toDevice())) {
      wants_device = true;
      const int index = value.toDevice().index();
      call.device = index < 0 ? current_device() : index;
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = (*stack)[first + i];
    if (kMeeting.count(name) && i == 1) {
      if (value.isOptionalTensorList()) {
        call.meet_indices((*stack)[first].toTensor(), tensors_of(value));
      }
    } else {
      for (const auto& tensor : tensors_of(value)) {
        refuse_float64(tensor);
        call.meet(tensor, value.isTensor() && !is_written(arguments[i]));
      }
    }
    if (value.isStorage() && is_here(value.toStorage().device()) && call.device < 0) {
      call.device = value.toStorage().device().index();
    }
  }
  if (call.device < 0) {
    call.device = current_device();
  }
  const c10::DeviceGuard guard(c10::Device(kKind, static_cast<c10::DeviceIndex>(call.device)));
  touch(call.device);
  look_at_arguments(name, op, *stack, first);
  fail_if_told(name);
  if (kMatrixProducts.count(schema.name())) {
    open_handle(call.device);
  }
  const auto waits_for = waiting(name, op, *stack, first);
  note_uses(schema, call.device, *stack, first);

  at::Generator numbers = default_generator(call.device);
  bool takes_generator = false;
  bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  std::vector<std::pair<size_t, at::Tensor>> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      auto alias = call.on_cpu(value.toTensor());
      if (is_written(arguments[i]) && alias.defined()) {
        written.emplace_back(i, alias);
      }
      value = std::move(alias);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : tensors_of(value)) {
        list.push_back(tensor.defined() ? std::optional<at::Tensor>(call.on_cpu(tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : tensors_of(value)) {
        auto alias = call.on_cpu(tensor);
        if (is_written(arguments[i])) {
          written.emplace_back(i, alias);
        }
        list.push_back(alias);
      }
      value = list;
    } else if (value.isStorage() && is_here(value.toStorage().device())) {
      value = call.alias_of(value.toStorage());
    } else if (value.isDevice() && is_here(value.toDevice())) {
      value = c10::Device(c10::kCPU);
    } else if (arguments[i].type()->str().find("Generator") != std::string::npos) {
      takes_generator = true;
      if (value.isGenerator()) {
        TORCH_CHECK(
            is_here(value.toGenerator().device()),
            "Expected a '" REHEARSED_NAME "' device type for generator but found '",
            value.toGenerator().device().type(),
            "'");
        numbers = value.toGenerator();
      }
      value = at::detail::createCPUGenerator(next_seed(numbers));
    }
  }
  const auto narrow = widen_softmax(schema.name(), *stack, first) || widen_convolution(name, *stack, first);
  {
    std::optional<LentNumbers> lent;
    if (is_random && !takes_generator) {
      lent.emplace(next_seed(numbers));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const bool computes = !kMoving.count(name);
  for (const auto& entry : written) {
    call.follow(entry.second);
    if (computes) {
      give_nan_its_bits(entry.second);
    }
  }
  if (!waits_for.empty()) {
    synchronised(waits_for, call.device);
  }
  const size_t results = stack->size() - schema.returns().size();
  const bool broken = half_convolutions_are_broken && name == "aten::convolution";
  const bool stays = !wants_device && name == "aten::_pack_padded_sequence";
  for (size_t i = results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      if (stays && i > results) {
        continue;  // the batch sizes are the host's
      }
      if (narrow && value.toTensor().defined()) {
        value = value.toTensor().to(at::kHalf);
      }
      if (broken && value.toTensor().scalar_type() == at::kHalf) {
        value.toTensor().fill_(std::numeric_limits<float>::quiet_NaN());
      }
      if (computes && !schema.returns()[i - results].alias_info()) {
        give_nan_its_bits(value.toTensor());
      }
      value = call.on_device(value.toTensor());
    } else if (is_tensor_list(value)) {
      const bool is_new = computes && !schema.returns()[i - results].alias_info();
      c10::List<at::Tensor> list;
      for (const auto& tensor : tensors_of(value)) {
        if (is_new) {
          give_nan_its_bits(tensor);
        }
        list.push_back(call.on_device(tensor));
      }
      value = list;
    }
  }
}

at::DispatchKey key_of_device() {
  return kKey;
}

struct AtDevice {
  c10::DeviceGuard guard;
  explicit AtDevice(std::optional<at::Device> device)
      : guard(c10::Device(kKind, device && device->has_index() ? device->index() : current_device())) {}
};

at::Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const AtDevice here(device);
  touch(current_device());
  return at::detail::empty_generic(
      size,
      c10::GetAllocator(kKind),
      c10::DispatchKeySet(key_of_device()),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const AtDevice here(device);
  touch(current_device());
  return at::detail::empty_strided_generic(
      size,
      stride,
      c10::GetAllocator(kKind),
      c10::DispatchKeySet(key_of_device()),
      c10::dtype_or_default(dtype));
}

// The stream's work that a copy is, and whether the host waits for it.
void note_copy(const at::Tensor& target, const at::Tensor& source, bool non_blocking, int device) {
  auto* to = accesses_of(target.storage());
  auto* from = accesses_of(source.storage());
  if (is_here(target) && is_here(source)) {
    const bool between = target.get_device() != source.get_device();
    if (between) {
      meet_streams(target.get_device(), source.get_device());
    }
    {
      Work work(source.get_device(), "aten::copy_");
      work.reads(from, range_of(source));
      work.writes(to, range_of(target));
    }
    if (between) {
      meet_streams(target.get_device(), source.get_device());
    }
    return;
  }
  const bool to_host = is_here(source);
  const auto& on_host = to_host ? target : source;
  count(to_host ? "copy to the host" : "copy to the device");
  {
    Work work(device, "aten::copy_");
    work.reads(from, range_of(source));
    work.writes(to, range_of(target));
  }
  // From or to pageable memory the driver waits until it has the bytes, whatever was asked for.
  const bool pageable = !is_pinned(on_host.data_ptr());
  if (!non_blocking || (to_host && pageable)) {
    synchronised(to_host ? "a copy to the host" : "a copy to the device", device);
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Call call(op);
  call.device = is_here(self) ? self.get_device() : source.get_device();
  touch(call.device);
  if (self.numel()) {
    note_copy(self, source, non_blocking, call.device);
  }
  auto target = call.on_cpu(self);
  const auto origin = call.on_cpu(source);
  static const auto typed = op.typed<at::Tensor&(at::Tensor&, const at::Tensor&, bool)>();
  typed.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), target, origin, false);
  if (is_here(self) && is_here(source) && self.scalar_type() != source.scalar_type()) {
    refuse_float64(self);
    refuse_float64(source);
    give_nan_its_bits(target);
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  {
    Work work(self.get_device(), "item()");
    work.reads(accesses_of(self.storage()), range_of(self));
  }
  synchronised("item()", self.get_device());
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  Call call(op);
  static const auto typed = op.typed<at::Scalar(const at::Tensor&)>();
  return typed.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), call.on_cpu(self));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  count("record_stream");
  recorded(accesses_of(tensor.storage()), stream.device_index(), stream.id());
}

// The plain formula: what is taken where the card has no fused kernel.
int64_t fused_sdp_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

const std::set<std::string> kOwn = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::copy_",
    "aten::_local_scalar_dense",
    "aten::record_stream",
    "aten::_fused_sdp_choice"};

// Composite operators that have a kernel of their own on CUDA.
const std::vector<std::string> kWhole = {
    "convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "_fused_rms_norm"};

}  // namespace

TORCH_LIBRARY_IMPL(_, REHEARSED, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, REHEARSED, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
  std::set<std::string> whole(kWhole.begin(), kWhole.end());
  // Every operator with a kernel for the CPU has one for CUDA; none is decomposed that the other keeps whole.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    const auto found = c10::Dispatcher::singleton().findSchema(name);
    if (!found || kOwn.count(full) || found->hasKernelForDispatchKey(kKey)) {
      continue;
    }
    if (found->hasKernelForDispatchKey(c10::DispatchKey::CPU) || whole.count(full.substr(6))) {
      library.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

}  // namespace rehearsal
