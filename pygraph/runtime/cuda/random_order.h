// Order across streams between whatever fills or reads a generator's memory on the device.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>
#include <utility>

namespace pygraph {

// Seed and offset of a generator lie in memory that every capture shares and every replay refills: what fills or reads
// them takes turns, and is ordered across streams.
class RandomOrder {
 public:
  static RandomOrder& of(c10::DeviceIndex device) {
    static std::array<RandomOrder, C10_COMPILE_TIME_MAX_GPUS> orders;
    return orders.at(static_cast<size_t>(device));
  }

 private:
  friend class RandomTurn;
  std::mutex mutex_; // never held while Python code runs
  bool taken_ = false; // by a turn during which Python code runs
  cudaEvent_t event_ = nullptr;
  cudaStream_t last_ = nullptr;
};

// One turn, from `begin` to `end`, at the latest when it is destroyed. A turn during which Python code runs turns others
// away, which wait for any other turn: that code may wait for them, or be them.
class RandomTurn {
 public:
  // Without an `order` there is nothing to wait for.
  RandomTurn(RandomOrder* order, cudaStream_t stream) : order_(order), stream_(stream) {}

  RandomTurn(const RandomTurn&) = delete;

  ~RandomTurn() {
    try {
      end();
    } catch (...) { // why it failed is being thrown already
    }
  }

  // Called with the device current: the stream waits for the last turn. False, with nothing done, where it is turned away.
  bool begin(bool runs_python) {
    if (order_ == nullptr) return true;
    std::unique_lock<std::mutex> lock(order_->mutex_);
    if (order_->taken_) return false;
    auto* event = order_->event_;
    if (event != nullptr && order_->last_ != stream_) C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, event, 0));
    order_->taken_ = runs_python;
    if (!runs_python) lock_ = std::move(lock);
    begun_ = true;
    return true;
  }

  // The next turn waits for what the stream was given in this one.
  void end() {
    if (!std::exchange(begun_, false)) return;
    auto lock = lock_.owns_lock() ? std::move(lock_) : std::unique_lock<std::mutex>(order_->mutex_);
    order_->taken_ = false;
    if (order_->event_ == nullptr) C10_CUDA_CHECK(cudaEventCreateWithFlags(&order_->event_, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(order_->event_, stream_));
    order_->last_ = stream_;
  }

 private:
  RandomOrder* order_;
  cudaStream_t stream_;
  bool begun_ = false;
  std::unique_lock<std::mutex> lock_;
};

} // namespace pygraph
