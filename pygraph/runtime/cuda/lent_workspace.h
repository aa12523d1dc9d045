// Memory that torch keeps for cuBLAS on the current stream. It lies idle while a graph runs there, and can hold a part
// of the graph's intermediates, which would otherwise be allocated beside it.
#pragma once

#include <c10/cuda/CUDAStream.h>

// What torch's header needs besides CUDA's own ones, and an environment made of wheels may lack.
#if __has_include(<cublasLt.h>) && __has_include(<cublas_v2.h>) && __has_include(<cusolverDn.h>) && __has_include(<cusparse.h>)
#define PYGRAPH_LENDS 1
#include <ATen/cuda/CUDAContextLight.h>
#endif

#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>

namespace pygraph {

#ifdef PYGRAPH_LENDS

// Looked up at most once, and from then on kept from being given back, for as long as this object lives. What is
// submitted to the stream meanwhile comes before whatever uses the memory next: that is work of the same stream, as
// torch gives each stream memory of its own.
class LentWorkspace {
 public:
  explicit LentWorkspace(c10::cuda::CUDAStream stream) : stream_(stream) {}

  // An address of at least `nbytes` bytes; null where torch keeps none, or less. The same one whenever asked.
  void* get(size_t nbytes) {
    if (!lock_.owns_lock()) find();
    return nbytes <= nbytes_ ? address_ : nullptr;
  }

 private:
  void find() {
    auto& kept = at::cuda::cublas_handle_stream_to_workspace();
    lock_ = std::shared_lock<std::shared_mutex>(kept.mutex);
    for (const auto& [key, memory] : kept.map) {
      if (std::get<1>(key) == static_cast<void*>(stream_.stream())) note(memory);
    }
  }

  void note(const at::DataPtr& memory) { note(memory, at::cuda::getChosenWorkspaceSize()); }
  void note(const std::pair<at::DataPtr, size_t>& memory) { note(memory.first, memory.second); } // torch 2.13

  // All devices have a default stream of the same name.
  void note(const at::DataPtr& memory, size_t nbytes) {
    if (memory.device() != stream_.device() || nbytes <= nbytes_) return;
    address_ = memory.get();
    nbytes_ = nbytes;
  }

  c10::cuda::CUDAStream stream_;
  std::shared_lock<std::shared_mutex> lock_;
  void* address_ = nullptr;
  size_t nbytes_ = 0;
};

#else

struct LentWorkspace {
  explicit LentWorkspace(c10::cuda::CUDAStream) {}
  void* get(size_t) { return nullptr; }
};

#endif

} // namespace pygraph
