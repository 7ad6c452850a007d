// What CUDA's kernels refuse that the CPU's take, and what is worth a note (rules.cpp).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace rehearsal {

// Raise what CUDA raises for these arguments, and note float64, TF32 and changed layouts. `name` has the overload.
void look_at_arguments(const std::string& name, const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

// Does this operator, or its caller on CUDA, read a result back before it goes on? In words; empty if it does not.
std::string waiting(
    const std::string& name, const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

// The tensors of a list, or the one tensor.
std::vector<at::Tensor> tensors_of(const c10::IValue& value);

}  // namespace rehearsal
