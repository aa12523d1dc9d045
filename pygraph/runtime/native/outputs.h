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

template <DispatchKey backend>
class Outputs {
 public:
  void add(OutputSpec spec) { specs_.push_back(std::move(spec)); }
  void clear() { specs_.clear(); }

  // `fresh`: memory that was allocated for this call.
  py::object make(const Operands& call, c10::ArrayRef<c10::Storage> fresh) const {
    auto results = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(specs_.size())));
    if (!results) throw py::error_already_set();
    for (size_t i = 0; i < specs_.size(); ++i) {
      auto made = make_one(specs_[i], call, fresh, results.ptr());
      PyList_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
    }
    return results;
  }

 private:
  // `before`: the list of outputs, up to this one.
  static py::object make_one(
      const OutputSpec& spec, const Operands& call, c10::ArrayRef<c10::Storage> fresh, PyObject* before) {
    auto index = static_cast<size_t>(spec.index);
    switch (spec.kind) {
      case OutputKind::argument:
        return call.held[index];
      case OutputKind::same:
        return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(before, spec.index));
      case OutputKind::object:
        return spec.object;
      case OutputKind::fresh:
        return make_tensor(spec, fresh[index], spec.offset);
      default: // element 0 of a view lies `offset` elements of its own type behind that of the argument
        const auto& base = *call.tensors[index];
        auto bytes = base.storage_offset() * static_cast<int64_t>(base.itemsize());
        return make_tensor(spec, storage_of(base), bytes / static_cast<int64_t>(spec.dtype.itemsize()) + spec.offset);
    }
  }

  static py::object make_tensor(const OutputSpec& spec, c10::Storage storage, int64_t offset) {
    auto tensor = tensor_over(std::move(storage), DispatchKeySet(backend), spec.dtype, spec.size, spec.stride, offset);
    auto* object = THPVariable_Wrap(std::move(tensor));
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
  }

  std::vector<OutputSpec> specs_;
};

} // namespace pygraph
