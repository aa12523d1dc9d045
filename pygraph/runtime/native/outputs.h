// What a region returns, and how it is made once its kernels are launched.
#pragma once

#include "arguments.h"

#include <c10/util/ArrayRef.h>

#include <vector>

namespace pygraph {

enum class OutputKind { argument, view, fresh, object, same };

struct OutputSpec {
  OutputKind kind;
  int64_t index, offset;
  std::vector<int64_t> size, stride;
  caffe2::TypeMeta dtype;
  py::object object;
};

inline py::object wrap(Tensor tensor) {
  auto* object = THPVariable_Wrap(std::move(tensor));
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Element 0 of a view lies `offset` elements of its own type behind that of the argument.
template <DispatchKey backend>
py::object make_view(const OutputSpec& spec, const Tensor& base) {
  auto bytes = base.storage_offset() * static_cast<int64_t>(base.itemsize());
  auto offset = bytes / static_cast<int64_t>(spec.dtype.itemsize()) + spec.offset;
  return wrap(tensor_over(storage_of(base), DispatchKeySet(backend), spec.dtype, spec.size, spec.stride, offset));
}

// `fresh`: memory that was allocated for this call; `before`: the list of outputs, up to this one.
template <DispatchKey backend>
py::object make_output(
    const OutputSpec& spec, const Operands& call, c10::ArrayRef<c10::Storage> fresh, PyObject* before) {
  auto index = static_cast<size_t>(spec.index);
  switch (spec.kind) {
    case OutputKind::argument:
      return call.held[index];
    case OutputKind::same:
      return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(before, spec.index));
    case OutputKind::object:
      return spec.object;
    case OutputKind::view:
      return make_view<backend>(spec, *call.tensors[index]);
    default:
      return wrap(tensor_over(
          fresh[index], DispatchKeySet(backend), spec.dtype, spec.size, spec.stride, spec.offset));
  }
}

template <DispatchKey backend>
class Outputs {
 public:
  void add(OutputSpec spec) {
    auto position = static_cast<int64_t>(specs_.size());
    TORCH_CHECK(spec.kind != OutputKind::same || (0 <= spec.index && spec.index < position), "no such output before");
    specs_.push_back(std::move(spec));
  }

  void clear() { specs_.clear(); }

  py::object make(const Operands& call, c10::ArrayRef<c10::Storage> fresh) const {
    auto results = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(specs_.size())));
    if (!results) throw py::error_already_set();
    for (size_t i = 0; i < specs_.size(); ++i) {
      auto made = make_output<backend>(specs_[i], call, fresh, results.ptr());
      PyList_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
    }
    return results;
  }

 private:
  std::vector<OutputSpec> specs_;
};

} // namespace pygraph
