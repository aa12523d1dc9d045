// What the arguments of a region have to be at each replay, and those of one call, checked and with their addresses.
#pragma once

#include "tensors.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace pygraph {

// Element by element: a call of `memcmp` costs more than the few that there are.
inline bool same_list(c10::IntArrayRef actual, const std::vector<int64_t>& expected) {
  if (actual.size() != expected.size()) return false;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] != expected[i]) return false;
  }
  return true;
}

// A field of an object that Python describes something by (description.py).
template <typename T>
T field(py::handle described, const char* name) {
  return described.attr(name).cast<T>();
}

struct Argument {
  py::object value; // of one that is no tensor
  bool written = false;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> size, stride;
  int64_t offset = -1; // the storage offset that it must have; -1: any
  size_t nbytes = 0, alignment = 1, residue = 0;

  // From an Argument of Python's. `alignment` is a power of two.
  explicit Argument(py::handle described) {
    auto captured = field<py::object>(described, "captured");
    if (!THPVariable_Check(captured.ptr())) {
      value = std::move(captured);
      return;
    }
    const auto& tensor = THPVariable_Unpack(captured.ptr());
    written = field<bool>(described, "written");
    dtype = tensor.dtype();
    size = tensor.sizes().vec();
    stride = tensor.strides().vec();
    offset = field<int64_t>(described, "offset");
    nbytes = field<size_t>(described, "nbytes");
    alignment = field<size_t>(described, "alignment");
    residue = field<uintptr_t>(described, "address") & (alignment - 1);
  }

  bool is_tensor() const { return !value; }

  bool accepts_value(PyObject* object) const {
    auto* captured = value.ptr();
    if (object == captured) return true;
    if (Py_TYPE(object) != Py_TYPE(captured)) return false;
    if (PyFloat_CheckExact(object)) {
      double now = PyFloat_AS_DOUBLE(object), then = PyFloat_AS_DOUBLE(captured);
      return std::memcmp(&now, &then, sizeof now) == 0;
    }
    return PyLong_CheckExact(object) && PyObject_RichCompareBool(object, captured, Py_EQ) == 1;
  }

  // `device`: the index that the tensor's device must have; -1: any.
  template <DispatchKey backend>
  bool accepts_tensor(PyObject* object, c10::DeviceIndex device) const {
    if (!THPVariable_CheckExact(object)) return false;
    const auto& t = THPVariable_Unpack(object);
    return is_plain<backend>(t) && (device < 0 || t.device().index() == device) && t.dtype() == dtype &&
        same_list(t.sizes(), size) && same_list(t.strides(), stride) &&
        (offset < 0 || t.storage_offset() == offset) && is_inside(t);
  }

  // Whether every element lies inside the storage: one that was resized to nothing leaves the tensor its sizes.
  bool is_inside(const Tensor& tensor) const {
    auto begin = static_cast<size_t>(tensor.storage_offset()) * dtype.itemsize();
    return begin + nbytes <= storage_of(tensor).nbytes();
  }

  bool aligned(uintptr_t address) const { return nbytes == 0 || next_place(address) == address; }

  // The first address from `begin` on that is congruent to the captured one.
  uintptr_t next_place(uintptr_t begin) const { return begin + ((residue - begin) & (alignment - 1)); }
};

// The arguments of one call. What `tensors` points to lives as long as `held`.
struct Operands {
  c10::SmallVector<py::object, 32> held;
  c10::SmallVector<const Tensor*, 32> tensors; // null for Python values
  c10::SmallVector<uintptr_t, 32> addresses; // of element 0; null for Python values, and where there is no element
  c10::SmallVector<size_t, 4> misaligned;
  std::vector<at::DataPtr> temporaries; // what stands for misaligned arguments
};

template <DispatchKey backend>
class Arguments {
 public:
  // `apart`: only lists are accepted in which no written argument shares memory with another.
  Arguments(c10::DeviceIndex device, py::handle described, bool apart) : device_(device), apart_(apart) {
    for (auto each : described) {
      expected_.emplace_back(each);
      writes_ |= expected_.back().written;
    }
  }

  void clear() { expected_.clear(); }
  size_t size() const { return expected_.size(); }
  const Argument& operator[](size_t i) const { return expected_[i]; }

  // Whether `list` is what is expected; then `call` holds it. Nothing is written, and no argument changes: the caller
  // may still run uncaptured.
  bool match(PyObject* list, Operands& call) const {
    if (static_cast<size_t>(PyList_GET_SIZE(list)) != size()) return false;
    call.held.reserve(size());
    call.tensors.reserve(size());
    call.addresses.resize(size());
    for (size_t i = 0; i < size(); ++i) {
      auto* object = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
      if (!accepts(expected_[i], object)) return false;
      call.held.push_back(py::reinterpret_borrow<py::object>(object));
      call.tensors.push_back(expected_[i].is_tensor() ? &THPVariable_Unpack(object) : nullptr);
      if (!writes_) locate(call, i);
    }
    for (size_t i = 0; writes_ && i < size(); ++i) locate(call, i); // once all fit: memory that is to be written may move
    return copyable(call) && (!apart_ || are_apart(call));
  }

  // Bytes from element 0 on.
  Range elements(const Operands& call, size_t i) const {
    return {call.addresses[i], call.addresses[i] + expected_[i].nbytes};
  }

  bool shares_with_written(const Operands& call, size_t i) const {
    auto range = storage_range(*call.tensors[i]);
    for (size_t w = 0; w < size(); ++w) {
      if (w != i && expected_[w].written && range.meets(storage_range(*call.tensors[w]))) return true;
    }
    return false;
  }

  // Memory for a copy of a misaligned argument, which is used from now on. Returns where the argument itself lies.
  const void* relocate(Operands& call, size_t i, c10::Allocator& allocator) const {
    const auto& argument = expected_[i];
    auto from = call.addresses[i];
    call.temporaries.push_back(allocator.allocate(argument.nbytes + argument.alignment));
    call.addresses[i] = argument.next_place(reinterpret_cast<uintptr_t>(call.temporaries.back().get()));
    return reinterpret_cast<const void*>(from);
  }

 private:
  bool accepts(const Argument& argument, PyObject* object) const {
    return argument.is_tensor() ? argument.accepts_tensor<backend>(object, device_) : argument.accepts_value(object);
  }

  void locate(Operands& call, size_t i) const {
    const auto* tensor = call.tensors[i];
    if (tensor == nullptr) return;
    const void* data = expected_[i].written ? tensor->mutable_data_ptr() : tensor->const_data_ptr();
    call.addresses[i] = reinterpret_cast<uintptr_t>(data);
    if (!expected_[i].aligned(call.addresses[i])) call.misaligned.push_back(i);
  }

  // A copy stands for a misaligned argument only if nothing can write to the original meanwhile, nor look around it.
  bool copyable(const Operands& call) const {
    for (auto i : call.misaligned) {
      const auto& argument = expected_[i];
      if (argument.written || argument.offset >= 0 || shares_with_written(call, i)) return false;
    }
    return true;
  }

  // Whether no element of a written argument is another's as well.
  bool are_apart(const Operands& call) const {
    if (std::equal(apart_at_.begin(), apart_at_.end(), call.addresses.begin(), call.addresses.end())) return true;
    c10::SmallVector<std::pair<Range, bool>, 32> ranges;
    for (size_t i = 0; i < size(); ++i) {
      if (expected_[i].nbytes != 0) ranges.emplace_back(elements(call, i), expected_[i].written);
    }
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    uintptr_t end = 0, end_of_written = 0; // of those that begin before
    for (const auto& [range, written] : ranges) {
      if (range.begin < (written ? end : end_of_written)) return false;
      end = std::max(end, range.end);
      if (written) end_of_written = std::max(end_of_written, range.end);
    }
    apart_at_.assign(call.addresses.begin(), call.addresses.end());
    return true;
  }

  c10::DeviceIndex device_;
  bool apart_;
  bool writes_ = false;
  mutable std::vector<uintptr_t> apart_at_; // addresses that were found apart; one replay at a time looks
  std::vector<Argument> expected_;
};

} // namespace pygraph
