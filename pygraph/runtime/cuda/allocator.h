// Memory that a region asks for while it is captured: addresses of an arena, each handed out once, with nothing behind.
#pragma once

#include "driver_api.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pygraph {

namespace py = pybind11;

constexpr size_t kAddressAlignment = 512;

// One allocation: its address, how many bytes it has, how many nodes the graph had before it, whether it is held.
using Piece = std::tuple<uintptr_t, size_t, size_t, bool>;

// The allocations of one capture. Outlives the capture for as long as any of its memory is held.
class Session : public std::enable_shared_from_this<Session> {
 public:
  // `gap` bytes stay free behind each allocation. `grow(next, nbytes)` makes room in the arena, used up to `next`, and
  // returns the free part as (next, end).
  Session(c10::DeviceIndex device, uintptr_t stream, uintptr_t next, uintptr_t end, size_t gap, py::function grow)
      : device_(device),
        stream_(reinterpret_cast<CUstream>(stream)),
        next_(next),
        end_(end),
        gap_(gap),
        grow_(std::move(grow)) {}

  ~Session() {
    if (grow_) close();
  }

  // Lets go of the arena: nothing is allocated any more.
  void close() {
    py::gil_scoped_acquire gil;
    grow_ = py::function();
    next_ = end_ = 0;
  }

  c10::DeviceIndex device() const { return device_; }
  std::optional<size_t> nodes() const { return DriverApi::get().captured_nodes(stream_); }
  bool idle() const { return alive_ == 0; } // nobody holds any of it

  // The address, and the number of the allocation.
  std::pair<void*, size_t> allocate(size_t nbytes) {
    if (next_ + nbytes + kAddressAlignment + gap_ > end_) grow(nbytes + 2 * kAddressAlignment + gap_);
    auto address = (next_ + kAddressAlignment - 1) / kAddressAlignment * kAddressAlignment;
    next_ = address + nbytes + gap_;
    std::lock_guard<std::mutex> lock(mutex_);
    pieces_.emplace_back(address, nbytes, nodes().value_or(0), true);
    ++alive_;
    return {reinterpret_cast<void*>(address), pieces_.size() - 1};
  }

  void release(size_t index) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::get<bool>(pieces_.at(index)) = false;
    --alive_;
  }

  std::vector<Piece> pieces() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pieces_;
  }

 private:
  void grow(size_t nbytes) {
    TORCH_CHECK(grow_, "the capture is over");
    py::gil_scoped_acquire gil;
    std::tie(next_, end_) = grow_(next_, nbytes).cast<std::pair<uintptr_t, uintptr_t>>();
  }

  c10::DeviceIndex device_;
  CUstream stream_;
  uintptr_t next_, end_;
  size_t gap_;
  py::function grow_;
  std::mutex mutex_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> alive_{0};
};

// The session that allocations of this thread belong to, while it captures.
inline thread_local Session* current_session = nullptr;

// What a tensor's memory holds on to.
struct Ticket {
  std::shared_ptr<Session> session;
  size_t index;
  ~Ticket() { session->release(index); }
};

inline void release_ticket(void* ticket) {
  delete static_cast<Ticket*>(ticket);
}

using c10::cuda::CUDAStream;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
namespace cached = c10::cuda::CUDACachingAllocator;

// Hands everything on to another allocator.
class Delegate : public CUDAAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override { return base_->allocate(nbytes); }
  void* raw_alloc(size_t nbytes) override { return base_->raw_alloc(nbytes); }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    return base_->raw_alloc_with_stream(nbytes, stream);
  }
  void raw_delete(void* pointer) override { base_->raw_delete(pointer); }
  void copy_data(void* to, const void* from, size_t nbytes) const override { base_->copy_data(to, from, nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  void recordStream(const c10::DataPtr& pointer, CUDAStream stream) override { base_->recordStream(pointer, stream); }
  void init(int count) override { base_->init(count); }
  bool initialized() override { return base_->initialized(); }
  double getMemoryFraction(c10::DeviceIndex d) override { return base_->getMemoryFraction(d); }
  void setMemoryFraction(double fraction, c10::DeviceIndex d) override { base_->setMemoryFraction(fraction, d); }
  std::vector<cached::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex d) override {
    return base_->getExpandableSegmentSizes(d);
  }
  void enable(bool value) override { base_->enable(value); }
  bool isEnabled() const override { return base_->isEnabled(); }
  void emptyCache(c10::MempoolId_t pool) override { base_->emptyCache(pool); }
  void cacheInfo(c10::DeviceIndex d, size_t* largest) override { base_->cacheInfo(d, largest); }
  void* getBaseAllocation(void* pointer, size_t* size) override { return base_->getBaseAllocation(pointer, size); }
  cached::DeviceStats getDeviceStats(c10::DeviceIndex d) override { return base_->getDeviceStats(d); }
  void resetAccumulatedStats(c10::DeviceIndex d) override { base_->resetAccumulatedStats(d); }
  void resetPeakStats(c10::DeviceIndex d) override { base_->resetPeakStats(d); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override { return base_->getMemoryInfo(d); }
  cached::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) override { return base_->snapshot(pool, traces); }
  void beginAllocateToPool(c10::DeviceIndex d, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    base_->beginAllocateToPool(d, pool, std::move(filter));
  }
  void endAllocateToPool(c10::DeviceIndex d, c10::MempoolId_t pool) override { base_->endAllocateToPool(d, pool); }
  void releasePool(c10::DeviceIndex d, c10::MempoolId_t pool) override { base_->releasePool(d, pool); }
  int getPoolUseCount(c10::DeviceIndex d, c10::MempoolId_t pool) override { return base_->getPoolUseCount(d, pool); }
  void createOrIncrefPool(c10::DeviceIndex d, c10::MempoolId_t pool, std::shared_ptr<CUDAAllocator> own) override {
    base_->createOrIncrefPool(d, pool, std::move(own));
  }
  void setUseOnOOM(c10::DeviceIndex d, c10::MempoolId_t pool, bool use) override { base_->setUseOnOOM(d, pool, use); }
  void setNoSplit(c10::DeviceIndex d, c10::MempoolId_t pool) override { base_->setNoSplit(d, pool); }
  bool checkPoolLiveAllocations(
      c10::DeviceIndex d, c10::MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    return base_->checkPoolLiveAllocations(d, pool, expected);
  }
  cached::ShareableHandle shareIpcHandle(void* pointer) override { return base_->shareIpcHandle(pointer); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return base_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return base_->isHistoryEnabled(); }
  void recordHistory(
      bool enabled,
      cached::CreateContextFn recorder,
      size_t entries,
      cached::RecordContext when,
      bool clear,
      const std::vector<std::string>& skip) override {
    base_->recordHistory(enabled, recorder, entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& facts) override {
    base_->recordAnnotation(facts);
  }
  void pushCompileContext(std::string& text) override { base_->pushCompileContext(text); }
  void popCompileContext() override { base_->popCompileContext(); }
  void setUserMetadata(const std::string& text) override { base_->setUserMetadata(text); }
  std::string getUserMetadata() override { return base_->getUserMetadata(); }
  void attachOutOfMemoryObserver(cached::OutOfMemoryObserver observer) override {
    base_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(cached::AllocatorTraceTracker tracker) override {
    base_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex from, c10::DeviceIndex to) override { base_->enablePeerAccess(from, to); }
  cudaError_t memcpyAsync(
      void* to, int to_device, const void* from, int from_device, size_t count, cudaStream_t stream, bool p2p) override {
    return base_->memcpyAsync(to, to_device, from, from_device, count, stream, p2p);
  }
  std::shared_ptr<cached::AllocatorState> getCheckpointState(c10::DeviceIndex d, c10::MempoolId_t pool) override {
    return base_->getCheckpointState(d, pool);
  }
  cached::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex d, std::shared_ptr<cached::AllocatorState> state) override {
    return base_->setCheckpointPoolState(d, std::move(state));
  }
  std::string name() override { return base_->name(); }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return base_->getContextForPointer(pointer);
  }
  void attachOomRejectionObserver(cached::OomRejectionObserver observer) override {
    base_->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(c10::DeviceIndex d) override { base_->markCaptureBegin(d); }
  void markCaptureEnd(c10::DeviceIndex d) override { base_->markCaptureEnd(d); }
  c10::DataPtr allocateWithAddress(size_t nbytes, void* address) override {
    return base_->allocateWithAddress(nbytes, address);
  }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  bool supportsUserMetadata() override { return base_->supportsUserMetadata(); }
  void annotateMemory(const void* pointer, const std::string& text) override { base_->annotateMemory(pointer, text); }
#endif

 protected:
  CUDAAllocator* base_ = nullptr; // read without a lock; written anew only where torch's allocator was exchanged
};

// Stands before the ordinary allocator while captures are under way, or raw memory of a capture is out: it answers the
// capturing thread from that thread's session and hands everything else on. It lives for ever, as memory may remember
// which allocator it is from.
class CaptureAllocator final : public Delegate {
 public:
  static CaptureAllocator& get() {
    static auto* allocator = new CaptureAllocator();
    return *allocator;
  }

  void enter(Session& session) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(current_session == nullptr, "this thread captures already");
    auto* ordinary = cached::allocator.load();
    if (entered_++ == 0 && ordinary != this) { // raw memory of an earlier capture may have kept this one in place
      if (base_ != ordinary) base_ = ordinary;
      cached::allocator.store(this);
    }
    current_session = &session;
  }

  void leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (current_session == nullptr) return;
    current_session = nullptr;
    --entered_;
    step_back();
  }

  c10::DataPtr allocate(size_t nbytes) override {
    auto* session = capturing();
    if (session == nullptr || nbytes == 0) return base_->allocate(nbytes);
    auto [address, index] = session->allocate(nbytes);
    auto* ticket = new Ticket{session->shared_from_this(), index};
    return {address, ticket, &release_ticket, c10::Device(c10::DeviceType::CUDA, session->device())};
  }

  void* raw_alloc(size_t nbytes) override {
    auto* session = capturing();
    return session == nullptr || nbytes == 0 ? base_->raw_alloc(nbytes) : take_raw(*session, nbytes);
  }

  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    auto* session = capturing();
    if (session == nullptr || nbytes == 0) return base_->raw_alloc_with_stream(nbytes, stream);
    return take_raw(*session, nbytes);
  }

  void raw_delete(void* pointer) override {
    std::unique_ptr<Ticket> ticket;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = raw_.find(pointer);
      if (found != raw_.end()) {
        ticket = std::move(found->second);
        raw_.erase(found);
        step_back();
      }
    }
    if (!ticket) base_->raw_delete(pointer);
  }

  c10::DeleterFnPtr raw_deleter() const override { return capturing() == nullptr ? base_->raw_deleter() : nullptr; }
  void recordStream(const c10::DataPtr& pointer, CUDAStream stream) override {
    if (pointer.get_deleter() != &release_ticket) base_->recordStream(pointer, stream);
  }

 private:
  // Called with `mutex_` held. Raw memory that is still out has to find its way back here.
  void step_back() {
    if (entered_ == 0 && raw_.empty() && cached::allocator.load() == this) cached::allocator.store(base_);
  }

  static Session* capturing() {
    auto* session = current_session;
    return session != nullptr && c10::cuda::current_device() == session->device() ? session : nullptr;
  }

  void* take_raw(Session& session, size_t nbytes) {
    auto [address, index] = session.allocate(nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    raw_.emplace(address, std::unique_ptr<Ticket>(new Ticket{session.shared_from_this(), index}));
    return address;
  }

  size_t entered_ = 0;
  std::mutex mutex_;
  std::unordered_map<void*, std::unique_ptr<Ticket>> raw_;
};

} // namespace pygraph
