// CudaRegion: a captured region, replayed in one call. What is an address, and of what, is decided in Python.
#pragma once

#include "../native/region.h"
#include "nodes.h"
#include "random_order.h"
#include "stop.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <memory>
#include <utility>
#include <vector>

namespace pygraph {

namespace cached = c10::cuda::CUDACachingAllocator;

// How far torch's replay of a graph advances generators.
struct Generators : at::cuda::CUDAGraph {
  static uint64_t advanced_by(const at::cuda::CUDAGraph& graph) {
    uint64_t sum = 0;
    for (const auto& state : graph.*(&Generators::captured_generator_states_)) sum += state.second;
    return sum;
  }
};

// A part of the region that is launched on its own. The first is torch's graph itself; others are owned.
struct Segment {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  std::vector<Node*> dirty;
};

class CudaRegion final : public Region<DispatchKey::CUDA, Patch> {
 public:
  // `segments`: each one's graph and instance, which are handed over; both 0 for the first, if that is torch's `graph`.
  // `nodes`: those that are patched. `offset`: where the generator's offset lies on the device, for a region with eager
  // calls between launches that draw; else 0. `advancing`: where seed and offset lie, if torch's graph is not launched,
  // and launches draw; else both 0. `advances`: the device advances the offset, in a loop that draws. `stop`: of a loop,
  // by which a signal ends it.
  CudaRegion(
      const py::object& described,
      std::shared_ptr<at::cuda::CUDAGraph> graph,
      c10::DeviceIndex device,
      bool random,
      uintptr_t offset,
      const std::vector<std::pair<uintptr_t, uintptr_t>>& segments,
      std::vector<std::shared_ptr<Node>> nodes,
      std::pair<uintptr_t, uintptr_t> advancing,
      bool advances,
      std::shared_ptr<Stop> stop)
      : Region(
            device,
            described,
            [&](size_t node, size_t place, int64_t delta) { return Patch{nodes.at(node).get(), place, delta}; }),
        graph_(std::move(graph)),
        device_(device),
        random_(random),
        advancing_(advancing),
        advances_(advances),
        stop_(std::move(stop)),
        nodes_(std::move(nodes)) {
    draws_.address = offset;
    for (const auto& node : nodes_) TORCH_CHECK(node->segment < segments.size(), "there is no such segment");
    for (const auto& [own, exec] : segments) {
      Segment segment;
      if (own == 0) {
        segment.exec = reinterpret_cast<CUgraphExec>(graph_->raw_cuda_graph_exec());
      } else {
        segment.graph = reinterpret_cast<CUgraph>(own);
        segment.exec = reinterpret_cast<CUgraphExec>(exec);
      }
      segments_.push_back(std::move(segment));
    }
  }

  ~CudaRegion() override { release(); }

  // Empties the list in the end. None: `args` is as it was. `answer` is called in the place of operators.
  py::object replay(py::handle args, PyObject* answer = nullptr) {
    if (!may_replay(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    call.answer = answer;
    if (!arguments_.match(args.ptr(), call)) return py::none();
    note_use();
    if (stop_) stop_->listen();
    Range range(*this);
    bool launched = false;
    {
      WithoutGil released;
      c10::cuda::CUDAGuard guard(device_);
      launched = launch_all(call, args.ptr());
    }
    if (!launched) return py::none();
    empty(args);
    return make_outputs(call);
  }

 private:
  static bool capturing() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  // False, with nothing launched, where the graph cannot run on this stream, at these addresses, or in this turn. Called
  // without the GIL.
  bool launch_all(Call& call, PyObject* args) {
    if (capturing()) return false;
    auto* allocator = cached::get();
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    for (auto i : call.misaligned) copy_aligned(call, i, *allocator, stream);
    RandomTurn turn(random_ ? &RandomOrder::of(device_) : nullptr, stream);
    if (!turn.begin(/*runs_python=*/steps_.size() > 1)) return false;
    draws_.begun = false;
    if (stop_) stop_->begin();
    if (!run(call, args, *allocator)) return false;
    if (stop_) stop_->end(stream);
    if (draws_.begun) set_offset(draws_.start + draws_.total + draws_.shift);
    turn.end();
    call.blocks.clear();
    call.temporaries.clear();
    return true;
  }

  // On the current stream, which an eager call leaves as it was. Where the region draws, torch launches its own graph, the
  // first segment. Once something ran, no address is refused any more.
  bool launch(size_t number, bool begun) override {
    auto& segment = segments_[number];
    if (!apply(segment)) {
      if (!begun) return false;
      renew(segment);
    }
    const auto& api = DriverApi::get();
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    if (number > 0) {
      api.check(api.launch(segment.exec, stream.stream()), "a segment cannot be launched");
    } else if (advancing_.second != 0) {
      launch_advancing(segment.exec, stream);
    } else if (random_) {
      auto start = draws_.address == 0 ? 0 : offset();
      graph_->replay();
      if (draws_.address != 0) draws_ = {draws_.address, start, offset() - start, /*shift=*/0, /*begun=*/true};
    } else {
      C10_CUDA_CHECK(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(segment.exec), stream));
    }
    return true;
  }

  // As torch, fills in seed and offset. Where the device advances that, it alone knows how far: this waits for it.
  void launch_advancing(CUgraphExec exec, cudaStream_t stream) {
    auto start = offset();
    auto seed = at::cuda::detail::getDefaultCUDAGenerator(device_).current_seed();
    auto* offset_at = reinterpret_cast<void*>(advancing_.second);
    auto* seed_at = reinterpret_cast<void*>(advancing_.first);
    C10_CUDA_CHECK(cudaMemcpyAsync(seed_at, &seed, sizeof seed, cudaMemcpyHostToDevice, stream)); // staged, as below
    C10_CUDA_CHECK(cudaMemcpyAsync(offset_at, &start, sizeof start, cudaMemcpyHostToDevice, stream));
    C10_CUDA_CHECK(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(exec), stream));
    if (!advances_) return set_offset(start + Generators::advanced_by(*graph_));
    uint64_t end = start;
    C10_CUDA_CHECK(cudaMemcpyAsync(&end, offset_at, sizeof end, cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    set_offset(end);
  }

  // Torch advances the generator by all that the region draws when it launches the first segment. What an eager call draws
  // comes in between, as in the program: it finds the generator where the launches before it leave it, and the launches
  // behind it go on where it leaves that.
  void before_call(uint64_t drawn) override {
    if (draws_.begun) set_offset(draws_.start + drawn + draws_.shift);
  }

  void after_call(uint64_t drawn) override {
    if (!draws_.begun) return;
    auto more = offset() - (draws_.start + drawn + draws_.shift);
    if (more == 0) return;
    draws_.shift += more;
    auto from = static_cast<int64_t>(draws_.start + draws_.shift);
    auto* to = reinterpret_cast<void*>(draws_.address);
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, &from, sizeof from, cudaMemcpyHostToDevice, stream)); // staged before it returns
  }

  uint64_t offset() const {
    auto generator = at::cuda::detail::getDefaultCUDAGenerator(device_);
    std::lock_guard<std::mutex> lock(generator.mutex());
    return at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_offset_per_thread();
  }

  void set_offset(uint64_t to) const {
    auto generator = at::cuda::detail::getDefaultCUDAGenerator(device_);
    std::lock_guard<std::mutex> lock(generator.mutex());
    at::check_generator<at::CUDAGeneratorImpl>(generator)->set_philox_offset_per_thread(to);
  }

  void move(size_t source, uintptr_t to) override {
    sources_[source].move_to(to, [&](const Patch& patch) {
      patch.node->write(patch.place, to + static_cast<uintptr_t>(patch.delta));
      if (patch.node->dirty) return;
      patch.node->dirty = true;
      segments_[patch.node->segment].dirty.push_back(patch.node);
    });
  }

  // Hands what changed to the instance. False where a node refuses an address: a copy accepts only memory of the kind
  // that it was instantiated with.
  bool apply(Segment& segment) {
    for (; !segment.dirty.empty(); segment.dirty.pop_back()) {
      auto* node = segment.dirty.back();
      if (node->apply(segment.exec) != CUDA_SUCCESS) return false;
      node->dirty = false;
    }
    return true;
  }

  // Instantiates a segment of its own graph once more, for the addresses of this call. The instance so far may be running:
  // the driver frees it when it is done.
  void renew(Segment& segment) {
    const auto& api = DriverApi::get();
    TORCH_CHECK(segment.graph != nullptr, "a copy behind an eager call refuses an address");
    c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed); // it allocates
    for (const auto& node : nodes_) {
      if (&segments_[node->segment] == &segment) api.check(node->set(), "a node cannot be set");
    }
    CUgraphExec renewed = nullptr;
    api.check(api.instantiate(&renewed, segment.graph, 0), "a segment cannot be instantiated");
    api.destroy_exec(std::exchange(segment.exec, renewed));
    for (auto* node : segment.dirty) node->dirty = false;
    segment.dirty.clear();
  }

  void copy_aligned(Call& call, size_t i, c10::Allocator& allocator, cudaStream_t stream) const {
    const auto* from = arguments_.relocate(call, i, allocator);
    auto* to = reinterpret_cast<void*>(call.addresses[i]);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, arguments_[i].nbytes, cudaMemcpyDeviceToDevice, stream));
  }

  void release() override {
    nodes_.clear();
    Region::release();
    for (const auto& segment : segments_) {
      if (segment.graph == nullptr) continue;
      DriverApi::get().destroy_exec(segment.exec);
      DriverApi::get().destroy_graph(segment.graph);
    }
    segments_.clear();
    stop_.reset();
    graph_.reset();
  }

  std::shared_ptr<at::cuda::CUDAGraph> graph_;
  c10::DeviceIndex device_;
  bool random_;
  std::pair<uintptr_t, uintptr_t> advancing_;
  bool advances_;
  std::shared_ptr<Stop> stop_;
  struct Draws {
    uintptr_t address = 0; // of the offset on the device
    uint64_t start = 0, total = 0, shift = 0; // where this replay began, what its launches draw, what eager calls drew
    bool begun = false;
  } draws_;
  std::vector<std::shared_ptr<Node>> nodes_;
  std::vector<Segment> segments_;
};

} // namespace pygraph
