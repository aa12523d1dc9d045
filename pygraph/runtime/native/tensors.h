// What makes a tensor an ordinary one of its device, tensors over storages, and the bytes that a tensor reaches.
// What stands in for a tensor while a region is captured is each driver's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>

namespace pygraph {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;

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

// A storage that owns its memory, as one that an operator makes.
inline c10::Storage new_storage(size_t nbytes, c10::Allocator& allocator) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), nbytes, allocator.allocate(nbytes), &allocator, /*resizable=*/true);
}

// A storage that neither owns nor may resize its memory, which lies on the host.
inline c10::Storage raw_storage(void* data, size_t nbytes) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(),
      nbytes,
      at::DataPtr(data, c10::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
}

inline const c10::Storage& storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

// 0 where there is no storage, as of packed weights.
inline uintptr_t storage_base(const Tensor& tensor) {
  auto* storage = storage_of(tensor).unsafeGetStorageImpl();
  return storage == nullptr ? 0 : reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
}

// Where element 0 lies, also for a tensor that has none.
inline uintptr_t address(const Tensor& tensor) {
  return storage_base(tensor) + static_cast<uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
}

// The keys that an ordinary dense tensor of a backend has none of. With one of them, operators treat it in their own
// way.
template <DispatchKey backend>
inline const uint64_t foreign_keys =
    ~((DispatchKeySet({backend, DispatchKey::ADInplaceOrView}) | c10::autograd_dispatch_keyset |
       c10::autocast_dispatch_keyset)
          .raw_repr() &
      ~(c10::full_backend_mask & ~DispatchKeySet(backend).raw_repr()));

template <DispatchKey backend>
bool is_plain(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto keys = impl->key_set();
  return keys.has(backend) && (keys.raw_repr() & foreign_keys<backend>) == 0 && !impl->is_wrapped_number() &&
      !impl->has_symbolic_sizes_strides() && impl->has_storage();
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

} // namespace pygraph
