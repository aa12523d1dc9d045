// Tensors over raw addresses, what makes a tensor an ordinary one, and bytes that tensors reach. No graph here.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace pygraph {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;

// A storage that neither owns nor may resize its memory.
inline c10::Storage raw_storage(void* data, size_t nbytes) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(),
      nbytes,
      at::DataPtr(data, c10::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

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

// What any access to the memory of a stand-in says, whoever tries: there is nothing behind its address.
constexpr const char* kNoMemory = "the memory of a region that is being captured cannot be read or written";

// A tensor whose element 0 lies at `address`, in a storage of `nbytes` that begins `offset` elements before it. Its
// address is for the functions below alone: `data_ptr()`, and with it every kernel, is refused.
inline Tensor tensor_at(
    uintptr_t address,
    size_t nbytes,
    const std::vector<int64_t>& size,
    const std::vector<int64_t>& stride,
    at::ScalarType dtype,
    int64_t offset) {
  auto meta = c10::scalarTypeToTypeMeta(dtype);
  auto base = address - static_cast<uintptr_t>(offset) * meta.itemsize();
  auto storage = raw_storage(reinterpret_cast<void*>(base), nbytes);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  return tensor_over(storage, DispatchKeySet(DispatchKey::CPU), meta, size, stride, offset);
}

inline const c10::Storage& storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

inline uintptr_t storage_base(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(storage_of(tensor).unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

// Where element 0 lies, also for a tensor that has none.
inline uintptr_t element_address(const Tensor& tensor) {
  return storage_base(tensor) + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
}

// Bytes from element 0 to the end of the last one.
inline size_t extent(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

// The keys that an ordinary dense CPU tensor may have. With any other, operators treat it in their own way.
inline uint64_t plain_keys() {
  static const auto cpu = DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::ADInplaceOrView});
  static const auto allowed = cpu | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  static const uint64_t other_backends = c10::full_backend_mask & ~DispatchKeySet(DispatchKey::CPU).raw_repr();
  return allowed.raw_repr() & ~other_backends;
}

inline bool is_plain(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto keys = impl->key_set();
  return keys.has(DispatchKey::CPU) && (keys.raw_repr() & ~plain_keys()) == 0 && !impl->is_wrapped_number() &&
      !impl->has_symbolic_sizes_strides() && impl->has_storage();
}

// Whether every element lies inside the storage: one that was resized to nothing leaves the tensor its sizes.
inline bool is_backed(const Tensor& tensor) {
  auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return begin + extent(tensor) <= storage_of(tensor).nbytes();
}

struct Range {
  uintptr_t begin, end;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// All that a tensor's storage spans: what two tensors share can lie outside of both.
inline Range storage_range(const Tensor& tensor) {
  auto begin = storage_base(tensor);
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

} // namespace pygraph
