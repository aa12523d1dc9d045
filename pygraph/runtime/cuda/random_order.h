// Order across streams between whatever fills or reads a generator's memory on the device.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>
#include <utility>

namespace pygraph {

// Seed and offset of a generator lie in memory that every capture shares and every replay refills: what fills or reads
// them is ordered across streams.
class RandomOrder {
 public:
  static RandomOrder& of(c10::DeviceIndex device) {
    static std::array<RandomOrder, C10_COMPILE_TIME_MAX_GPUS> orders;
    return orders.at(static_cast<size_t>(device));
  }

  std::mutex mutex;

  // Both are called with `mutex` held and the device current.
  void enter(cudaStream_t stream) {
    if (event_ != nullptr && last_ != stream) C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
  }

  void leave(cudaStream_t stream) {
    if (event_ == nullptr) C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(event_, stream));
    last_ = stream;
  }

 private:
  cudaEvent_t event_ = nullptr;
  cudaStream_t last_ = nullptr;
};

// Enters on construction, where there is an order, and leaves: at the latest when what was submitted meanwhile failed.
class InOrder {
 public:
  InOrder(RandomOrder* order, cudaStream_t stream) : order_(order), stream_(stream) {
    if (order_ == nullptr) return;
    lock_ = std::unique_lock<std::mutex>(order_->mutex);
    order_->enter(stream_);
  }

  InOrder(const InOrder&) = delete;

  ~InOrder() {
    try {
      leave();
    } catch (...) { // why it failed is being thrown already
    }
  }

  void leave() {
    auto* order = std::exchange(order_, nullptr);
    if (order != nullptr) order->leave(stream_);
  }

 private:
  RandomOrder* order_;
  cudaStream_t stream_;
  std::unique_lock<std::mutex> lock_;
};

} // namespace pygraph
