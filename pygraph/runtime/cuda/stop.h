// Ctrl-C ends loops on the device: each looks at a word of the host's memory, which a handler of SIGINT writes.
//
//   0 goes on ── SIGINT ──► 1 asked to end ── the next launch waits for the end ──► 0
//   2 goes on, whatever comes: a thread launched it whose work no signal ends
//
// The handler stands before Python's while that is the one that raises KeyboardInterrupt, and calls it: another one may
// mean a signal otherwise, and nobody would be told that a loop is not complete.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <torch/csrc/utils/pybind.h>

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <mutex>

namespace pygraph {

// The words of all loops, in memory that the host and all devices address. It is never freed, since a loop may run
// longer than what launched it lives.
class StopWords {
 public:
  using Word = std::atomic<uint32_t>;
  static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "a handler of signals, and the device, look at it");
  static constexpr uint32_t kGoesOn = 0, kAsked = 1, kDeaf = 2;

  static StopWords& get() {
    static auto* own = new StopWords();
    return *own;
  }

  // A word of a loop that `event` follows; that which no signal is for, if all others are in use.
  std::pair<Word*, cudaEvent_t> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!retired_.empty() && cudaEventQuery(retired_.front().second) == cudaSuccess) {
      auto found = retired_.front();
      retired_.pop_front();
      return found;
    }
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    return {&words_[made_ < kMost ? made_++ : 0], event};
  }

  // Its loop may still run.
  void give(Word* word, cudaEvent_t event) {
    if (word == words_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    retired_.emplace_back(word, event);
  }

  // Handle SIGINT before Python does, if that raises KeyboardInterrupt. Called under the GIL.
  void listen() {
    struct sigaction now {};
    if (sigaction(SIGINT, nullptr, &now) != 0 || is_ours(now)) return;
    auto signals = py::module_::import("signal");
    if (!signals.attr("getsignal")(SIGINT).is(signals.attr("default_int_handler"))) return;
    previous_ = now;
    auto ours = now;
    ours.sa_sigaction = &handle;
    ours.sa_flags |= SA_SIGINFO;
    TORCH_CHECK(sigaction(SIGINT, &ours, nullptr) == 0, "SIGINT cannot be handled");
  }

 private:
  static constexpr size_t kMost = 1024;

  StopWords() {
    void* memory = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&memory, kMost * sizeof(Word), cudaHostAllocPortable | cudaHostAllocMapped));
    words_ = static_cast<Word*>(memory);
    for (size_t i = 0; i < kMost; ++i) new (words_ + i) Word(kDeaf);
  }

  static bool is_ours(const struct sigaction& now) {
    return (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &handle;
  }

  static void handle(int number, siginfo_t* info, void* context) {
    auto before = errno;
    auto& own = get();
    for (size_t i = 0; i < kMost; ++i) {
      auto expected = kGoesOn;
      own.words_[i].compare_exchange_strong(expected, kAsked);
    }
    const auto& previous = own.previous_;
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
      previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
      previous.sa_handler(number);
    }
    errno = before;
  }

  Word* words_ = nullptr;
  size_t made_ = 1;
  std::mutex mutex_;
  std::deque<std::pair<Word*, cudaEvent_t>> retired_;
  struct sigaction previous_ {};
};

// The word of one loop. Launches of it follow each other: a graph's instance never runs twice at a time.
class Stop {
 public:
  Stop() { std::tie(word_, event_) = StopWords::get().take(); }
  Stop(const Stop&) = delete;
  ~Stop() { StopWords::get().give(word_, event_); }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(word_); }

  // Before a launch, under the GIL.
  void listen() {
    if (on_main_thread()) StopWords::get().listen();
  }

  // Before a launch. Waits for the end of one that was asked to end. A loop that another thread has launched once hears
  // no signal any more, since such a launch may still run.
  void begin() {
    deaf_ = deaf_ || !on_main_thread();
    auto to = deaf_ ? StopWords::kDeaf : StopWords::kGoesOn;
    for (auto now = word_->load(); now != to;) {
      if (now == StopWords::kAsked) C10_CUDA_CHECK(cudaEventSynchronize(event_));
      if (word_->compare_exchange_strong(now, to)) return;
    }
  }

  void end(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }

 private:
  static bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

  StopWords::Word* word_;
  cudaEvent_t event_;
  bool deaf_ = false;
};

} // namespace pygraph
