// Operators of the host that use page-locked memory: they must not before a copy to or from it is done.
//
// Torch tells its profiler of every operator with its arguments, and this too. Of those that run on the CPU only the
// ones with a kernel there touch memory; the others are made of them, or show the same memory in another way.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "device.h"

namespace rehearsal {

namespace {

// For each argument of an operator whether it is read ('r'), written ('w') or neither; empty where none is.
using Uses = std::string;

Uses uses_of(const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op) {
    return {};
  }
  const bool is_copy = name.name == "aten::copy_";  // has one kernel for all devices
  if (!is_copy && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return {};
  }
  if (name.name == "aten::set_" || name.name == "aten::resize_" || name.name == "aten::is_pinned") {
    return {};
  }
  for (const auto& result : op->schema().returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      return {};  // a view
    }
  }
  Uses uses;
  for (const auto& argument : op->schema().arguments()) {
    uses += argument.alias_info() && argument.alias_info()->isWrite() ? 'w' : 'r';
  }
  return uses;
}

const Uses& known_uses_of(const c10::OperatorName& name) {
  static thread_local std::unordered_map<c10::OperatorName, Uses> known;
  const auto found = known.find(name);
  return found != known.end() ? found->second : known.emplace(name, uses_of(name)).first->second;
}

void look(const at::Tensor& tensor, bool writes, const std::string& op) {
  if (tensor.defined() && tensor.is_cpu() && tensor.has_storage() && tensor.storage().nbytes()) {
    host_touches(range_of(tensor), writes, op);
  }
}

bool is_on_device(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && is_here(value.toTensor());
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name || is_forked()) {
    return nullptr;
  }
  const auto& uses = known_uses_of(*name);
  const auto inputs = call.inputs();
  if (uses.empty() || inputs.size() != uses.size()) {
    return nullptr;
  }
  if (name->name == "aten::copy_" && (is_on_device(inputs[0]) || is_on_device(inputs[1]))) {
    return nullptr;  // the device's own affair
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    if (inputs[i].isTensor()) {
      look(inputs[i].toTensor(), uses[i] == 'w', name->name);
    } else if (inputs[i].isTensorList()) {
      for (const auto& tensor : inputs[i].toTensorVector()) {
        look(tensor, uses[i] == 'w', name->name);
      }
    }
  }
  return nullptr;
}

}  // namespace

void watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&start).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace rehearsal
