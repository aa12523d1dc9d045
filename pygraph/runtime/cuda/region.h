// CudaRegion: a captured region, replayed in one call. What is an address, and of what, is decided in Python.
#pragma once

#include "../native/region.h"
#include "nodes.h"
#include "random_order.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <memory>
#include <utility>
#include <vector>

namespace pygraph {

namespace cached = c10::cuda::CUDACachingAllocator;

// Whether torch's replay of a graph advances a generator.
struct Generators : at::cuda::CUDAGraph {
  static bool advanced_by(const at::cuda::CUDAGraph& graph) {
    for (const auto& state : graph.*(&Generators::captured_generator_states_)) {
      if (state.second != 0) return true;
    }
    return false;
  }
};

// Memory that is taken when a segment is launched: an output's, which stays, or of intermediates, up to a segment.
struct Memory {
  size_t source, nbytes;
  size_t died = 0; // intermediates only
};

// A part of the region that is launched on its own. The first is torch's graph itself; others are owned.
struct Segment {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  std::vector<Memory> fresh, blocks; // taken before it is launched
  std::vector<size_t> dead; // arguments that are not needed once it was launched
  std::vector<Node*> dirty;
};

// What lives for one replay only.
struct Call : Operands {
  c10::SmallVector<std::pair<size_t, at::DataPtr>, 4> blocks; // with the segment that they die in
  c10::SmallVector<c10::Storage, 8> fresh; // in the order in which they were added
};

class CudaRegion final : public Region<DispatchKey::CUDA, Patch> {
 public:
  CudaRegion(std::shared_ptr<at::cuda::CUDAGraph> graph, c10::DeviceIndex device, bool random)
      : Region(device),
        graph_(std::move(graph)),
        device_(device),
        random_(random) {}

  ~CudaRegion() override { release(); }

  // The first segment is torch's graph; any other is handed over.
  void add_segment(uintptr_t graph, uintptr_t exec) {
    Segment segment;
    segment.graph = reinterpret_cast<CUgraph>(graph);
    segment.exec = reinterpret_cast<CUgraphExec>(segments_.empty() ? graph_->raw_cuda_graph_exec() : nullptr);
    if (!segments_.empty()) segment.exec = reinterpret_cast<CUgraphExec>(exec);
    segments_.push_back(std::move(segment));
  }

  size_t add_fresh(size_t nbytes, size_t segment) {
    fresh_.push_back(new_source());
    segments_.at(segment).fresh.push_back({fresh_.size() - 1, nbytes});
    return fresh_.back();
  }

  // Intermediates, from the segment `born` to `died`.
  size_t add_block(size_t nbytes, size_t born, size_t died) {
    auto source = new_source();
    segments_.at(born).blocks.push_back({source, nbytes, died});
    return source;
  }

  void add_dead(size_t segment, size_t argument) { segments_.at(segment).dead.push_back(argument); }

  // The number of the node.
  size_t add(std::unique_ptr<Node> node, size_t segment) {
    node->segment = segment;
    TORCH_CHECK(segment < segments_.size(), "there is no such segment");
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
  }

  void add_patch(size_t node, size_t place, size_t source, int64_t delta) {
    sources_.at(source).patches.push_back({nodes_.at(node).get(), place, delta});
  }

  // Lets go of each argument as soon as it is dead, and empties the list in the end. None: `args` is as it was.
  py::object replay(py::handle args) {
    if (!may_replay(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    if (!arguments_.match(args.ptr(), call)) return py::none();
    Range range(*this);
    bool launched = false;
    {
      WithoutGil released;
      c10::cuda::CUDAGuard guard(device_);
      launched = launch(call, args.ptr());
    }
    if (!launched) return py::none();
    empty(args);
    return make_outputs(call, call.fresh);
  }

 private:
  static bool capturing() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  // False, with nothing launched, where the graph cannot run on this stream, at these addresses, or in this turn. Once a
  // segment was launched, no address is refused any more; errors of allocations and of launches are thrown as they are,
  // as an uncaptured run that fails half-way throws them. Called without the GIL.
  bool launch(Call& call, PyObject* args) {
    if (capturing()) return false;
    auto* allocator = cached::get();
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    call.fresh.resize(fresh_.size());
    for (auto i : call.misaligned) copy_aligned(call, i, *allocator, stream);
    for (size_t i = 0; i < arguments_.size(); ++i) move(sources_[argument_sources_[i]], call.addresses[i]);
    RandomTurn turn(random_ ? &RandomOrder::of(device_) : nullptr, stream);
    for (size_t s = 0; s < segments_.size(); ++s) {
      auto& segment = segments_[s];
      take(call, segment, *allocator);
      if (s == 0) {
        if (!apply(segment) || !turn.begin(/*runs_python=*/segments_.size() > 1)) return false;
      } else if (!apply(segment)) {
        renew(segment);
      }
      run(s, stream);
      if (s + 1 < segments_.size()) let_go(call, s, args);
    }
    turn.end();
    call.blocks.clear();
    call.temporaries.clear();
    return true;
  }

  // Allocates what a segment needs from now on, and moves what it replaces.
  void take(Call& call, Segment& segment, c10::Allocator& allocator) {
    for (const auto& memory : segment.blocks) {
      if (memory.nbytes == 0) continue;
      call.blocks.emplace_back(memory.died, allocator.allocate(memory.nbytes));
      move(sources_[memory.source], reinterpret_cast<uintptr_t>(call.blocks.back().second.get()));
    }
    for (const auto& memory : segment.fresh) {
      auto& storage = call.fresh[memory.source];
      storage = new_storage(memory.nbytes, allocator);
      move(sources_[fresh_[memory.source]], reinterpret_cast<uintptr_t>(storage.data()));
    }
  }

  // Gives back what no later segment needs: later allocations on this stream may have it.
  void let_go(Call& call, size_t s, PyObject* args) {
    for (auto& [died, memory] : call.blocks) {
      if (died == s) memory.clear();
    }
    if (segments_[s].dead.empty()) return;
    py::gil_scoped_acquire gil;
    for (auto argument : segments_[s].dead) {
      auto position = static_cast<Py_ssize_t>(argument);
      if (position < PyList_GET_SIZE(args)) PyList_SetItem(args, position, py::none().release().ptr());
      call.held[argument] = py::object();
    }
  }

  void move(Source<Patch>& source, uintptr_t to) {
    source.move_to(to, [&](const Patch& patch) {
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

  // Launches on the current stream. Where the region draws, torch launches its own graph, the first segment.
  void run(size_t s, c10::cuda::CUDAStream stream) {
    const auto& api = DriverApi::get();
    if (s > 0) {
      api.check(api.launch(segments_[s].exec, stream.stream()), "a segment cannot be launched");
    } else if (random_) {
      graph_->replay();
    } else {
      C10_CUDA_CHECK(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(segments_[s].exec), stream));
    }
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
    graph_.reset();
  }

  std::shared_ptr<at::cuda::CUDAGraph> graph_;
  c10::DeviceIndex device_;
  bool random_;
  std::vector<size_t> fresh_; // sources of the outputs' memory
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Segment> segments_;
};

} // namespace pygraph
