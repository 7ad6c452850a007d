// What CUDA's kernels refuse that the CPU's take, and what is worth a note: waits, float64, TF32, changed layouts, sums
// in any order.
//
// The dtypes are those in which torch's own tests (`OpInfo.dtypes` against `dtypesIfCUDA`) try an operator on the CPU
// and not on CUDA. The operators that add in any order are those of `torch.use_deterministic_algorithms`, which says
// which of them it refuses.
#include "rules.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <set>

#include "device.h"

namespace rehearsal {

std::map<std::string, std::pair<at::ScalarType, std::string>> refused_dtypes;
bool has_tf32 = false;

namespace {

using torch::jit::Stack;

// Operators whose CUDA kernel or its caller reads a result back before it goes on. Those of linear algebra that check
// their results copy `info`, which is noted as a copy.
const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero",        "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim",          "aten::unique_consecutive", "aten::bincount",       "aten::repeat_interleave.Tensor",
    "aten::equal",               "aten::is_nonzero",     "aten::_unique",            "aten::argwhere",
    "aten::nonzero.out",         "aten::masked_select.out", "aten::_linalg_svd",     "aten::_linalg_svd.U", "aten::_linalg_eigh", "aten::_linalg_eigh.eigenvalues",
    "aten::linalg_eig",          "aten::linalg_eig.out", "aten::_linalg_eigvals",    "aten::linalg_eigvals.out",
    "aten::_ctc_loss",           "aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor",
    "aten::embedding_renorm_"};

const std::set<std::string> kIndexing = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_",
    "aten::_unsafe_index.Tensor", "aten::index_put", "aten::_unsafe_index_put"};

const std::set<std::string> kProducts = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot", "aten::vdot"};

// Kernels over floating point only; the words before "not implemented".
const std::map<std::string, std::string> kFloatsOnly = {
    {"aten::mm", "addmm_cuda"},
    {"aten::addmm", "addmm_cuda"},
    {"aten::bmm", "baddbmm_cuda"},
    {"aten::baddbmm", "baddbmm_cuda"},
    {"aten::mv", "addmv_impl_cuda"},
    {"aten::addmv", "addmv_impl_cuda"},
    {"aten::dot", "dot"},
    {"aten::vdot", "vdot"},
    {"aten::convolution", "convolution_cuda"},
    {"aten::avg_pool2d", "avg_pool2d_out_cuda_frame"},
    {"aten::avg_pool3d", "avg_pool3d_out_cuda"},
    {"aten::max_pool2d_with_indices", "max_pool2d_with_indices_out_cuda_frame"},
    {"aten::max_pool3d_with_indices", "max_pool3d_with_indices_out_frame"},
    {"aten::upsample_bilinear2d", "upsample_bilinear2d_out_frame"},
    {"aten::_upsample_bilinear2d_aa", "upsample_bilinear2d_out_frame"},
    {"aten::upsample_bicubic2d", "upsample_bicubic2d_out_frame"},
    {"aten::_upsample_bicubic2d_aa", "upsample_bicubic2d_out_frame"},
    {"aten::native_dropout_backward", "masked_scale"}};

// Operators that have no kernel on CUDA at all.
const std::set<std::string> kAbsent = {
    "aten::histogram", "aten::_histogramdd_bin_edges", "aten::_histogramdd_from_bin_cts",
    "aten::_histogramdd_from_bin_tensors"};

// Gradient scaling reads these by their address: a number on the host is none.
const std::map<std::string, std::set<std::string>> kOnDevice = {
    {"aten::_amp_foreach_non_finite_check_and_unscale_", {"found_inf", "inv_scale"}},
    {"aten::_amp_update_scale_", {"self", "growth_tracker", "found_inf"}},
    {"aten::_fused_adam_", {"grad_scale", "found_inf"}},
    {"aten::_fused_adamw_", {"grad_scale", "found_inf"}},
    {"aten::_fused_sgd_", {"grad_scale", "found_inf"}}};

bool is_floating(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

// Refused under `torch.use_deterministic_algorithms(True)`.
bool adds_in_any_order(const std::string& name, const Stack& stack, size_t first) {
  static const std::set<std::string> always = {
      "aten::put_",
      "aten::grid_sampler_2d_backward",
      "aten::grid_sampler_3d_backward",
      "aten::upsample_linear1d_backward",
      "aten::upsample_bilinear2d_backward",
      "aten::upsample_bicubic2d_backward",
      "aten::upsample_trilinear3d_backward",
      "aten::_upsample_bilinear2d_aa_backward",
      "aten::_upsample_bicubic2d_aa_backward",
      "aten::reflection_pad1d_backward",
      "aten::reflection_pad2d_backward",
      "aten::reflection_pad3d_backward",
      "aten::avg_pool3d_backward",
      "aten::_adaptive_avg_pool2d_backward",
      "aten::_adaptive_avg_pool3d_backward",
      "aten::adaptive_max_pool2d_backward",
      "aten::fractional_max_pool2d_backward",
      "aten::fractional_max_pool3d_backward",
      "aten::max_unpool2d",
      "aten::max_unpool3d",
      "aten::nll_loss2d_forward",
      "aten::_ctc_loss_backward"};
  const auto plain = name.substr(0, name.find('.'));
  if (always.count(plain)) {
    return true;
  }
  const auto& self = stack[first];
  if (plain == "aten::histc" || plain == "aten::cumsum") {
    return is_floating(self.toTensor());
  }
  if (plain == "aten::bincount") {
    return stack[first + 1].isTensor() && stack[first + 1].toTensor().defined();
  }
  return (plain == "aten::median" || plain == "aten::nanmedian") && name.find("dim") != std::string::npos;
}

// In any order by default; another kernel is taken under `torch.use_deterministic_algorithms(True)`.
bool may_add_in_any_order(const std::string& name, const Stack& stack, size_t first) {
  static const std::set<std::string> sums = {
      "aten::scatter_add", "aten::scatter_add_", "aten::index_add", "aten::index_add_",
      "aten::replication_pad1d_backward", "aten::replication_pad2d_backward", "aten::replication_pad3d_backward",
      "aten::max_pool3d_with_indices_backward"};
  return sums.count(name.substr(0, name.find('.'))) && is_floating(stack[first].toTensor());
}

void look_at_order(const std::string& name, const Stack& stack, size_t first) {
  const bool is_refused = adds_in_any_order(name, stack, first);
  if (is_refused || (may_add_in_any_order(name, stack, first) && !at::globalContext().deterministicAlgorithms())) {
    host->on_note("order", name.substr(0, name.find('.')));
  }
  if (is_refused) {
    at::globalContext().alertNotDeterministic(name);
  }
}

void refuse_cublas_without_workspaces(const std::string& plain) {
  if (!kProducts.count(plain) || !at::globalContext().deterministicAlgorithms()) {
    return;
  }
  const char* found = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  const std::string setting = found == nullptr ? "" : found;
  TORCH_CHECK(
      setting == ":4096:8" || setting == ":16:8" || at::globalContext().deterministicAlgorithmsWarnOnly(),
      "Deterministic behavior was enabled with torch.use_deterministic_algorithms(True), but this operation is not "
      "deterministic because it uses CuBLAS: set CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8");
}

void refuse_dtypes(const std::string& name, const std::string& plain, const Stack& stack, size_t first) {
  const auto rule = refused_dtypes.find(name);
  if (rule != refused_dtypes.end()) {
    for (const auto& tensor : tensors_of(stack[first])) {
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.scalar_type() != rule->second.first, rule->second.second);
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!kAbsent.count(plain), "Could not run '", name, "' with arguments from the 'CUDA' backend.");
  const auto floats = kFloatsOnly.find(plain);
  if (floats != kFloatsOnly.end() && !is_floating(stack[first].toTensor())) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, '"', floats->second, "\" not implemented for '", c10::toString(stack[first].toTensor().scalar_type()), "'");
  }
}

void refuse_numbers_of_the_host(
    const std::string& plain, const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  const auto rule = kOnDevice.find(plain);
  if (rule == kOnDevice.end()) {
    return;
  }
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[first + i];
    if (rule->second.count(arguments[i].name()) && value.isTensor() && value.toTensor().defined()) {
      TORCH_CHECK(is_here(value.toTensor()), arguments[i].name(), " must be a CUDA tensor.");
      TORCH_CHECK(
          arguments[i].name() == "growth_tracker" || value.toTensor().scalar_type() == at::kFloat,
          arguments[i].name(),
          " must be a float tensor.");
    }
  }
}

void note_float64(const std::string& name, const Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); ++i) {
    for (const auto& tensor : tensors_of(stack[i])) {
      if (tensor.defined() && is_here(tensor) && tensor.numel() > 1 &&
          (tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kComplexDouble)) {
        host->on_note("float64", name);
        return;
      }
    }
  }
}

void note_products(const std::string& plain, const Stack& stack, size_t first) {
  const bool convolves = plain == "aten::convolution";
  if (!convolves && !kProducts.count(plain)) {
    return;
  }
  const auto& self = stack[first].toTensor();
  const auto& context = at::globalContext();
  if (self.scalar_type() == at::kFloat) {
    const bool rounds = has_tf32 && (convolves ? context.allowTF32CuDNN() : context.allowTF32CuBLAS());
    host->on_note(rounds ? "tf32" : "float32", plain);
  }
  if (!convolves || self.dim() != 4) {
    return;
  }
  const auto is_last = [](const at::Tensor& one) {
    return one.is_contiguous(at::MemoryFormat::ChannelsLast) && !one.is_contiguous();
  };
  const auto& weight = stack[first + 1].toTensor();
  const bool is_either = weight.is_contiguous() && weight.is_contiguous(at::MemoryFormat::ChannelsLast);
  const bool is_image_either = self.is_contiguous() && self.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (!is_either && !is_image_either && is_last(weight) != is_last(self)) {
    host->on_note("layout", is_last(weight) ? "an image that is not channels last" : "a weight that is not channels last");
  }
}

}  // namespace

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  if (value.isTensorList()) {
    return value.toTensorVector();
  }
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList()) {
    for (const auto& entry : value.toOptionalTensorVector()) {
      found.push_back(entry.value_or(at::Tensor()));
    }
  }
  return found;
}

std::string waiting(const std::string& name, const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  if (kWaiting.count(name)) {
    return name;
  }
  if (name.find("linalg") != std::string::npos) {
    const auto place = op.schema().argumentIndexWithName("check_errors");
    return place && stack[first + *place].toBool() ? name + " that checks for errors" : "";
  }
  if (name == "aten::histc" && stack[first + 2].toScalar().equal(stack[first + 3].toScalar().toDouble())) {
    return name + " without limits";
  }
  if (name == "aten::multinomial" && (!stack[first + 2].toBool() || stack[first + 1].toInt() == 1)) {
    return name;
  }
  if (!kIndexing.count(name)) {
    return "";
  }
  const bool puts = name.find("put") != std::string::npos;
  for (const auto& index : tensors_of(stack[first + 1])) {
    if (!index.defined()) {
      continue;
    }
    const bool mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    if (index.is_cpu()) {
      return name + " by an index of the host";
    }
    if (mask && !(puts && stack[first + 2].toTensor().numel() == 1)) {
      return name + " by a mask";
    }
  }
  return "";
}

void look_at_arguments(const std::string& name, const c10::OperatorHandle& op, const Stack& stack, size_t first) {
#ifdef REHEARSE_XPU
  return;  // Intel's kernels have rules of their own
#endif
  auto plain = name.substr(0, name.find('.'));
  refuse_numbers_of_the_host(plain, op, stack, first);
  if (plain.back() == '_') {
    plain.pop_back();  // a product in place is the same product; `mv` is addmv_
  }
  refuse_dtypes(name, plain, stack, first);
  refuse_cublas_without_workspaces(plain);
  look_at_order(name, stack, first);
  note_float64(name, stack, first);
  note_products(plain, stack, first);
}

}  // namespace rehearsal
