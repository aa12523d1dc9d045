// Tensors over addresses with nothing behind them, and where the elements of any tensor lie. No graph here.
#pragma once

#include "../native/tensors.h"

#include <vector>

namespace pygraph {

// A storage that neither owns nor may resize its memory.
inline c10::Storage raw_storage(void* data, size_t nbytes) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(),
      nbytes,
      at::DataPtr(data, c10::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
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

// Whether every element lies inside the storage: one that was resized to nothing leaves the tensor its sizes.
inline bool is_backed(const Tensor& tensor) {
  auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return begin + extent(tensor) <= storage_of(tensor).nbytes();
}

} // namespace pygraph
