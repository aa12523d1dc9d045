// A scratch pool is memory of one thread for what nobody keeps: a private pool of torch's allocator, given back to the
// system afterwards.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pygraph {

// The ordinary pool's name.
constexpr c10::MempoolId_t kOrdinary{0, 0};

// Frees every segment that no tensor lies in. What one lies in goes back when torch next empties its whole cache.
inline bool emptied(c10::MempoolId_t pool) {
  try {
    c10::cuda::CUDACachingAllocator::emptyCache(pool);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Empties the ordinary pool and those that were given up. Torch refuses to empty one while any thread captures, or
// allocates from another pool of the same device; such a pool waits here for the next call. (Torch's own MemPool empties
// in its destructor, where the refusal would end the process.)
inline void give_up(c10::MempoolId_t pool) {
  static auto* mutex = new std::mutex();
  static auto* waiting = new std::vector<c10::MempoolId_t>();
  std::lock_guard<std::mutex> lock(*mutex);
  waiting->push_back(pool);
  // Threads that capture in the global mode forbid others to free memory.
  c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  emptied(kOrdinary);
  waiting->erase(std::remove_if(waiting->begin(), waiting->end(), emptied), waiting->end());
}

// Ends what a capture that broke has begun in torch's allocators, for device and pinned memory. Where capture_end() throws
// before it does so (torch 2.11), they take the capture to be under way for ever: memory that several streams used is not
// used again, none is given back, and the end of a MemPool ends the process. Does nothing where torch has ended it.
inline void end_broken_capture(c10::DeviceIndex device, c10::MempoolId_t pool) {
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
    c10::cuda::CUDACachingAllocator::releasePool(device, pool);
    auto* pinned = at::getHostAllocator(at::kCUDA);
    pinned->end_allocate_to_pool(pool);
    pinned->release_pool(pool);
  } catch (const c10::Error&) { // it is not recorded to the pool
  }
}

class ScratchPool {
 public:
  // Throws where torch's allocator has no private pools.
  explicit ScratchPool(c10::DeviceIndex device) : device_(device), id_(at::cuda::MemPool::graph_pool_handle()) {
    c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_, id_);
  }

  ScratchPool(const ScratchPool&) = delete;

  // This thread allocates from the pool until it leaves. Pools nest: the one entered last counts.
  void enter() {
    auto thread = std::this_thread::get_id();
    auto mine = [thread](cudaStream_t) { return std::this_thread::get_id() == thread; };
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(device_, id_, mine);
    ++entered_;
  }

  // Does nothing if it was not entered.
  void leave() {
    if (entered_ == 0) return;
    --entered_;
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, id_);
    c10::cuda::CUDACachingAllocator::releasePool(device_, id_);
  }

  // Called once, outside of the pool. Memory is freed here, not handed on in the order of a stream: what ran on it has
  // to be over. What the ordinary pool keeps for later goes back as well: a replay needs its memory in other pieces than
  // the uncaptured program, whose pieces would lie idle beside it.
  void close() {
    c10::cuda::CUDACachingAllocator::releasePool(device_, id_);
    c10::cuda::getCurrentCUDAStream(device_).synchronize();
    give_up(id_);
  }

 private:
  c10::DeviceIndex device_;
  c10::MempoolId_t id_;
  size_t entered_ = 0;
};

} // namespace pygraph
