// Operators that a replay calls through the dispatcher, between what it launches: their arguments over the memory of the
// call, and what becomes of their results.
#pragma once

#include "arguments.h"
#include "collectives.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pygraph {

using torch::jit::Stack;

// Applies `f` to every defined tensor in `value`, lists included, and returns what it made of them.
template <typename F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& t : value.toTensorVector()) mapped.push_back(f(t));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& t : value.toOptionalTensorVector()) {
      mapped.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// Every defined tensor in `values`, those inside lists included, in order.
inline std::vector<Tensor> tensors_of(const Stack& values) {
  std::vector<Tensor> found;
  auto note = [&](const Tensor& t) {
    found.push_back(t);
    return t;
  };
  for (const auto& value : values) map_tensors(value, note);
  return found;
}

// One operator with its arguments as they were when it was recorded.
struct OperatorCall {
  c10::OperatorHandle op;
  Stack stack;

  OperatorCall(const std::string& name, const std::string& overload, const py::tuple& args, const py::dict& kwargs)
      : op(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())) {
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
    auto named = py::reinterpret_borrow<py::kwargs>(kwargs);
    stack = torch::jit::createStackForSchema(op.schema(), torch::jit::tuple_slice(args), named, std::nullopt);
  }

  // Lets go of its tensors: something else stands in their places.
  void drop_tensors() {
    auto keys = DispatchKeySet(DispatchKey::CPU);
    auto placeholder = tensor_over(raw_storage(nullptr, 0), keys, caffe2::TypeMeta::Make<float>(), {0}, {1}, 0);
    for (auto& value : stack) value = map_tensors(value, [&](const Tensor&) { return placeholder; });
  }
};

// A replay cannot be what it was captured as. Called without the GIL.
[[noreturn]] inline void break_contract(const std::string& said) {
  py::gil_scoped_acquire gil;
  PyErr_SetString(py::module_::import("pygraph.errors").attr("ReplayError").ptr(), said.c_str());
  throw py::error_already_set();
}

// Memory of one call that has a storage of its own: an output's, what an eager call is given, or what it returned.
struct Owned {
  c10::Storage storage;
  size_t start = 0; // bytes from where the storage begins to where the allocation does

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(storage.data()) + start; }
};

// What lives for one replay only.
struct Call : Operands {
  c10::SmallVector<std::pair<size_t, at::DataPtr>, 4> blocks; // with the step that they die in
  std::vector<Owned> owned;
  PyObject* answer = nullptr; // called in the place of each operator
  size_t waited = 0; // so many of the next steps are waits for what has been waited for
};

struct Layout {
  std::vector<int64_t> size, stride;
  caffe2::TypeMeta dtype;

  // From a TensorLayout or an Output of Python's, which may have no dtype.
  explicit Layout(py::handle described)
      : size(field<std::vector<int64_t>>(described, "size")),
        stride(field<std::vector<int64_t>>(described, "stride")),
        dtype(c10::scalarTypeToTypeMeta(field<std::optional<at::ScalarType>>(described, "dtype").value_or(at::kByte))) {}

  template <DispatchKey backend>
  Tensor over(const c10::Storage& storage, int64_t bytes) const {
    auto at = bytes / static_cast<int64_t>(dtype.itemsize());
    return tensor_over(storage, DispatchKeySet(backend), dtype, size, stride, at);
  }

  bool same_size(const Tensor& tensor) const { return tensor.dtype() == dtype && same_list(tensor.sizes(), size); }

  // Strides of dimensions with one element, or of a tensor with none, address nothing.
  bool same_stride(const Tensor& tensor) const {
    for (size_t i = 0; i < size.size() && tensor.numel() != 0; ++i) {
      if (size[i] > 1 && tensor.stride(static_cast<int64_t>(i)) != stride[i]) return false;
    }
    return true;
  }
};

// What the `kind` of a description is, an enumeration of Python's with these values.
template <typename Kind>
Kind kind_of(py::handle described, std::initializer_list<std::pair<const char*, Kind>> kinds) {
  auto value = described.attr("kind").attr("value").cast<std::string>();
  for (const auto& [name, kind] : kinds) {
    if (name == value) return kind;
  }
  TORCH_CHECK(false, "there is no kind ", value);
}

enum class OperandKind { itself, argument, owned, constant, empty };

// A tensor that an eager call is given: an argument of the region itself, a view of one or of owned memory, a constant.
struct EagerOperand {
  OperandKind kind;
  size_t index; // of the argument, or of the owned memory
  int64_t offset; // in bytes
  Layout layout;
  std::optional<Tensor> constant;

  explicit EagerOperand(py::handle described)
      : kind(kind_of<OperandKind>(
            described,
            {{"itself", OperandKind::itself},
             {"argument", OperandKind::argument},
             {"owned", OperandKind::owned},
             {"constant", OperandKind::constant},
             {"empty", OperandKind::empty}})),
        index(field<size_t>(described, "index")),
        offset(field<int64_t>(described, "offset")),
        layout(described.attr("layout")),
        constant(field<std::optional<Tensor>>(described, "constant")) {}
};

// A tensor that an eager call returns: in memory of its own, or in that of an operand.
struct EagerResult {
  bool owned;
  int64_t index; // of the owned memory, or of the operand; -1: nobody looks for it
  int64_t offset; // in bytes, from the operand's first element
  size_t nbytes;
  Layout layout;

  explicit EagerResult(py::handle described)
      : owned(field<bool>(described, "owned")),
        index(field<int64_t>(described, "index")),
        offset(field<int64_t>(described, "offset")),
        nbytes(field<size_t>(described, "nbytes")),
        layout(described.attr("layout")) {}
};

template <DispatchKey backend>
struct EagerCall {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<size_t> leaves; // the operand that stands in the place of each tensor of the stack
  std::vector<EagerOperand> operands;
  std::vector<EagerResult> results;
  size_t alignment; // of results' addresses, in bytes
  uint64_t drawn; // how far the launches before it advance the generator
  size_t waits; // so many steps directly behind it, and they alone, wait for all of its results
  std::optional<Collective> collective; // if it can be sent and waited for at once

  explicit EagerCall(py::handle described) : EagerCall(described.attr("operator").cast<const OperatorCall&>(), described) {}

  static constexpr auto kDevice = backend == DispatchKey::CPU ? c10::kCPU : c10::kCUDA;

  std::vector<Tensor> given(const Call& call) const {
    std::vector<Tensor> made;
    for (const auto& each : operands) made.push_back(operand(each, call));
    return made;
  }

  // As the program calls it uncaptured: nothing of the thread's state is changed. But where waits stand directly behind a
  // collective, it is waited for here, and they do nothing.
  std::vector<Tensor> run(const std::vector<Tensor>& tensors, Call& call) const {
    if (call.waited > 0) {
      --call.waited;
      return tensors;
    }
    Stack values;
    values.reserve(stack.size());
    size_t next = 0;
    auto put = [&](const Tensor&) { return tensors[leaves[next++]]; };
    for (const auto& value : stack) values.push_back(map_tensors(value, put));
    if (collective) {
      if (auto group = collective->group(tensors)) {
        at::RecordFunction range(at::RecordScope::FUNCTION);
        c10::ArrayRef<const c10::IValue> told(values.data(), values.size());
        if (range.isActive()) range.before(std::cref(op.schema()), told); // as the dispatcher tells profilers
        auto inputs = values[0].isTensor() ? std::vector<Tensor>{values[0].toTensor()} : values[0].toTensorVector();
        auto outputs = unset(tensors);
        collective->send(*group, tensors, inputs, outputs);
        call.waited = waits;
        return outputs;
      }
    }
    op.callBoxed(&values);
    return tensors_of(values);
  }

  // Keeps what was returned where later steps look for it.
  void adopt(
      const std::vector<Tensor>& returned,
      const std::vector<Tensor>& tensors,
      Call& call,
      c10::Allocator& allocator) const {
    const auto& name = op.schema().name();
    if (returned.size() != results.size()) break_contract(name + " returned another number of tensors than when captured");
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& expected = results[i];
      if (!expected.owned) {
        const auto& operand = tensors.at(static_cast<size_t>(expected.index));
        if (address(returned[i]) != address(operand) + static_cast<uintptr_t>(expected.offset)) {
          break_contract(name + " returned other memory than when captured");
        }
        continue;
      }
      const auto& result = returned[i];
      if (!is_plain<backend>(result) || !expected.layout.same_size(result)) {
        break_contract(name + " returned another size or dtype than when captured");
      }
      if (expected.index >= 0) call.owned[static_cast<size_t>(expected.index)] = placed(result, expected, allocator);
    }
  }

 private:
  EagerCall(const OperatorCall& call, py::handle described)
      : op(call.op),
        stack(call.stack),
        leaves(field<std::vector<size_t>>(described, "leaves")),
        alignment(field<size_t>(described, "alignment")),
        drawn(field<uint64_t>(described, "drawn")),
        waits(field<size_t>(described, "waits")) {
    TORCH_CHECK(tensors_of(stack).size() == leaves.size(), "an operator's tensors do not match");
    for (auto each : described.attr("operands")) operands.emplace_back(each);
    for (auto each : described.attr("results")) results.emplace_back(each);
    auto own = op.hasKernelForDispatchKey(backend); // somebody else's: torch's serve all devices
    if (waits > 0 && !own) collective = Collective::of(op, stack);
  }

  static Tensor operand(const EagerOperand& each, const Call& call) {
    switch (each.kind) {
      case OperandKind::itself:
        return *call.tensors[each.index];
      case OperandKind::argument: {
        const auto& base = *call.tensors[each.index];
        auto bytes = base.storage_offset() * static_cast<int64_t>(base.itemsize());
        return each.layout.template over<backend>(storage_of(base), bytes + each.offset);
      }
      case OperandKind::owned: {
        const auto& memory = call.owned[each.index];
        return each.layout.template over<backend>(memory.storage, static_cast<int64_t>(memory.start) + each.offset);
      }
      case OperandKind::empty:
        return at::empty_strided(each.layout.size, each.layout.stride, at::device(kDevice).dtype(each.layout.dtype));
      default:
        return *each.constant;
    }
  }

  // What a collective fills: operands, or new memory.
  std::vector<Tensor> unset(const std::vector<Tensor>& tensors) const {
    std::vector<Tensor> made;
    for (const auto& each : results) {
      auto index = static_cast<size_t>(each.index);
      auto options = at::device(tensors[0].device()).dtype(each.layout.dtype);
      made.push_back(each.owned ? at::empty(each.layout.size, options) : tensors[index]);
    }
    return made;
  }

  // The result's own memory, if the launches that were captured can use it as it is; else a copy.
  Owned placed(const Tensor& result, const EagerResult& expected, c10::Allocator& allocator) const {
    auto start = static_cast<size_t>(result.storage_offset()) * result.itemsize();
    auto aligned = expected.nbytes == 0 || (start % alignment == 0 && address(result) % alignment == 0);
    if (aligned && expected.layout.same_stride(result)) return {storage_of(result), start};
    Owned copy{new_storage(expected.nbytes, allocator)};
    expected.layout.template over<backend>(copy.storage, 0).copy_(result);
    return copy;
  }
};

} // namespace pygraph
