// What one argument of a region has to be at each replay, and tensors over memory that is there already.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace pygraph {

namespace py = pybind11;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

inline PyObject* parameter_type = nullptr;

inline Tensor tensor_over(
    c10::Storage storage,
    DispatchKeySet keys,
    caffe2::TypeMeta dtype,
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return tensor;
}

inline const c10::Storage& storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

// The keys that an ordinary dense CUDA tensor may have. With any other, operators treat it in their own way.
inline uint64_t plain_keys() {
  static const uint64_t keys =
      (DispatchKeySet({DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView}) |
       c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset)
          .raw_repr() &
      ~(c10::full_backend_mask & ~DispatchKeySet(DispatchKey::CUDA).raw_repr());
  return keys;
}

inline bool is_plain(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto keys = impl->key_set();
  return keys.has(DispatchKey::CUDA) && (keys.raw_repr() & ~plain_keys()) == 0 && !impl->is_wrapped_number() &&
      !impl->has_symbolic_sizes_strides() && impl->has_storage();
}

// Bytes from element 0 to the end of the last one.
inline size_t extent(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

struct Range {
  uintptr_t begin, end;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// All that a tensor's storage spans: what two tensors share can lie outside of both.
inline Range storage_range(const Tensor& tensor) {
  auto begin = reinterpret_cast<uintptr_t>(storage_of(tensor).data());
  return {begin, begin + storage_of(tensor).nbytes()};
}

// Whether something watches or transforms the operators of this thread, which a replay would pass by.
inline bool modes_active() {
  auto included = c10::impl::tls_local_dispatch_key_set().included_;
  auto watching = DispatchKeySet(
      {DispatchKey::Python,
       DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::Functionalize,
       DispatchKey::PythonDispatcher});
  return included.has_any(watching) || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

struct Argument {
  bool is_tensor = false;
  bool written = false;
  py::object value;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> size, stride;
  int64_t offset = -1; // the storage offset that it must have; -1: any
  size_t nbytes = 0, alignment = 1, residue = 0;

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

  bool accepts_tensor(PyObject* object, c10::DeviceIndex device) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != THPVariableClass && type != parameter_type) return false;
    const auto& t = THPVariable_Unpack(object);
    return is_plain(t) && t.device().index() == device && t.dtype() == dtype && t.sizes() == size &&
        t.strides() == stride && (offset < 0 || t.storage_offset() == offset) && is_backed(t);
  }

  // Whether every element lies inside the storage: one that was resized to nothing leaves the tensor its sizes.
  bool is_backed(const Tensor& tensor) const {
    auto begin = static_cast<size_t>(tensor.storage_offset()) * dtype.itemsize();
    return begin + nbytes <= storage_of(tensor).nbytes();
  }

  bool aligned(uintptr_t address) const { return nbytes == 0 || address % alignment == residue; }
};

} // namespace pygraph
