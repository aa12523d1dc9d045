// CudaRegion: a captured region, replayed in one call. What is an address, and of what, is decided in Python.
#pragma once

#include "plan.h"
#include "random_order.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

namespace pygraph {

namespace cached = c10::cuda::CUDACachingAllocator;

class CudaRegion {
 public:
  CudaRegion(std::shared_ptr<at::cuda::CUDAGraph> graph, c10::DeviceIndex device, bool random)
      : graph_(std::move(graph)), device_(device), random_(random) {}

  CudaRegion(const CudaRegion&) = delete;
  ~CudaRegion() { release(); }

  // The number of the source of its workspace. The first segment is torch's graph; any other is handed over.
  size_t add_segment(size_t workspace, uintptr_t graph, uintptr_t exec) {
    Segment segment;
    segment.workspace = workspace;
    segment.graph = reinterpret_cast<CUgraph>(graph);
    segment.exec = reinterpret_cast<CUgraphExec>(segments_.empty() ? graph_->raw_cuda_graph_exec() : nullptr);
    if (!segments_.empty()) segment.exec = reinterpret_cast<CUgraphExec>(exec);
    segment.source = new_source();
    segments_.push_back(std::move(segment));
    return segments_.back().source;
  }

  size_t add_tensor_argument(
      const Tensor& captured, bool written, int64_t offset, size_t nbytes, size_t alignment, uintptr_t address) {
    Argument argument;
    argument.is_tensor = true;
    argument.written = written;
    argument.dtype = captured.dtype();
    argument.size = captured.sizes().vec();
    argument.stride = captured.strides().vec();
    argument.offset = offset;
    argument.nbytes = nbytes;
    argument.alignment = alignment;
    argument.residue = address % alignment;
    return add(std::move(argument));
  }

  size_t add_value_argument(py::object value) {
    Argument argument;
    argument.value = std::move(value);
    return add(std::move(argument));
  }

  size_t add_fresh(size_t nbytes, size_t segment) {
    fresh_.push_back(new_source());
    segments_.at(segment).fresh.push_back({fresh_.size() - 1, nbytes});
    return fresh_.back();
  }

  size_t add_block(size_t nbytes, size_t born, size_t died) {
    auto source = new_source();
    segments_.at(born).blocks.push_back({source, nbytes, died});
    return source;
  }

  void add_dead(size_t segment, size_t argument) { segments_.at(segment).dead.push_back(argument); }

  size_t add_kernel(
      uintptr_t node, const py::bytes& blob, const std::vector<std::pair<size_t, size_t>>& layout, size_t segment) {
    return add(std::make_unique<KernelNode>(node, std::string(blob), layout), segment);
  }

  size_t add_copy(uintptr_t node, size_t segment) { return add(std::make_unique<CopyNode>(node), segment); }
  size_t add_fill(uintptr_t node, size_t segment) { return add(std::make_unique<FillNode>(node), segment); }

  void add_patch(size_t node, size_t place, size_t source, int64_t delta) {
    sources_.at(source).patches.push_back({nodes_.at(node).get(), place, delta});
  }

  void add_output(
      OutputKind kind,
      int64_t index,
      int64_t offset,
      std::vector<int64_t> size,
      std::vector<int64_t> stride,
      std::optional<at::ScalarType> dtype,
      py::object object) {
    auto meta = c10::scalarTypeToTypeMeta(dtype.value_or(at::kByte));
    outputs_.push_back({kind, index, offset, std::move(size), std::move(stride), meta, std::move(object)});
  }

  // With `consume`, arguments are let go of as soon as they are dead, and the list is emptied in the end.
  py::object replay(py::handle args, bool consume) {
    if (closed_ || busy_ || modes_active() || !PyList_CheckExact(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args.ptr()); ++i) {
      call.held.push_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(args.ptr(), i)));
    }
    if (!match(call)) return py::none();
    bool launched = false;
    {
      py::gil_scoped_release released;
      c10::cuda::CUDAGuard guard(device_);
      launched = launch(call, consume ? args.ptr() : nullptr);
    }
    if (!launched) return py::none();
    if (consume) PyList_SetSlice(args.ptr(), 0, PyList_GET_SIZE(args.ptr()), nullptr);
    return outputs(call);
  }

  void close() {
    closed_ = true;
    if (!busy_) release();
  }

  size_t patched() const { return patched_; }

 private:
  // Entered and left under the GIL: a replay that finds another one under way is turned away.
  struct Busy {
    CudaRegion& region;
    explicit Busy(CudaRegion& r) : region(r) { region.busy_ = true; }
    ~Busy() {
      region.busy_ = false;
      if (region.closed_) region.release();
    }
  };

  size_t new_source() {
    sources_.emplace_back();
    return sources_.size() - 1;
  }

  size_t add(Argument argument) {
    arguments_.push_back(std::move(argument));
    argument_sources_.push_back(new_source());
    return argument_sources_.back();
  }

  size_t add(std::unique_ptr<Node> node, size_t segment) {
    node->segment = segment;
    TORCH_CHECK(segment < segments_.size(), "there is no such segment");
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
  }

  // Nothing is written here, and no argument changes: the caller may still run uncaptured.
  bool match(Call& call) const {
    if (call.held.size() != arguments_.size()) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& expected = arguments_[i];
      auto* object = call.held[i].ptr();
      if (!(expected.is_tensor ? expected.accepts_tensor(object, device_) : expected.accepts_value(object))) return false;
      call.tensors.push_back(expected.is_tensor ? &THPVariable_Unpack(object) : nullptr);
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* tensor = call.tensors[i];
      const void* data = nullptr;
      if (tensor != nullptr) data = arguments_[i].written ? tensor->mutable_data_ptr() : tensor->const_data_ptr();
      call.addresses.push_back(reinterpret_cast<uintptr_t>(data));
      if (tensor != nullptr && !arguments_[i].aligned(call.addresses[i])) call.misaligned.push_back(i);
    }
    return copyable(call);
  }

  // A copy stands for a misaligned argument only if nothing can write to the original meanwhile, nor look around it.
  bool copyable(const Call& call) const {
    for (auto i : call.misaligned) {
      const auto& argument = arguments_[i];
      if (argument.written || argument.offset >= 0 || shares_with_written(call, i)) return false;
    }
    return true;
  }

  bool shares_with_written(const Call& call, size_t i) const {
    auto range = storage_range(*call.tensors[i]);
    for (size_t w = 0; w < arguments_.size(); ++w) {
      if (w != i && arguments_[w].written && range.meets(storage_range(*call.tensors[w]))) return true;
    }
    return false;
  }

  // False, with nothing launched, where the graph cannot run on this stream or at these addresses. Errors of
  // allocations and of the launch are thrown as they are. Called without the GIL.
  bool launch(Call& call, PyObject* consumed) {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
    auto* allocator = cached::get();
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    patched_ = 0;
    call.fresh.resize(fresh_.size());
    for (auto i : call.misaligned) call.addresses[i] = copy_aligned(call, i, *allocator, stream);
    for (size_t i = 0; i < arguments_.size(); ++i) move(sources_[argument_sources_[i]], call.addresses[i]);
    auto& order = RandomOrder::of(device_);
    std::unique_lock<std::mutex> lock;
    if (random_) {
      lock = std::unique_lock<std::mutex>(order.mutex);
      order.enter(stream);
    }
    for (size_t s = 0; s < segments_.size(); ++s) {
      auto& segment = segments_[s];
      at::DataPtr workspace;
      take(call, segment, workspace, *allocator);
      if (!apply(segment)) {
        TORCH_CHECK(s == 0, "a node of segment ", s, " cannot be patched");
        return false;
      }
      run(s, stream);
      if (s + 1 < segments_.size()) let_go(call, s, consumed);
    }
    if (random_) order.leave(stream);
    call.blocks.clear();
    call.temporaries.clear();
    return true;
  }

  // Allocates what a segment needs from now on, and moves what it replaces.
  void take(Call& call, Segment& segment, at::DataPtr& workspace, c10::Allocator& allocator) {
    if (segment.workspace != 0) {
      workspace = allocator.allocate(segment.workspace);
      move(sources_[segment.source], reinterpret_cast<uintptr_t>(workspace.get()));
    }
    for (const auto& memory : segment.blocks) {
      call.blocks.emplace_back(memory.died, allocator.allocate(memory.nbytes));
      move(sources_[memory.source], reinterpret_cast<uintptr_t>(call.blocks.back().second.get()));
    }
    for (const auto& memory : segment.fresh) {
      auto& storage = call.fresh[memory.source];
      storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), memory.nbytes, allocator.allocate(memory.nbytes), &allocator, /*resizable=*/true);
      move(sources_[fresh_[memory.source]], reinterpret_cast<uintptr_t>(storage.data()));
    }
  }

  // Gives back what no later segment needs: later allocations on this stream may have it.
  void let_go(Call& call, size_t s, PyObject* consumed) {
    for (auto& [died, memory] : call.blocks) {
      if (died == s) memory.clear();
    }
    if (consumed == nullptr || segments_[s].dead.empty()) return;
    py::gil_scoped_acquire gil;
    for (auto argument : segments_[s].dead) {
      auto position = static_cast<Py_ssize_t>(argument);
      if (position < PyList_GET_SIZE(consumed)) PyList_SetItem(consumed, position, py::none().release().ptr());
      call.held[argument] = py::object();
    }
  }

  void move(Source& source, uintptr_t to) {
    if (source.known && source.address == to) return;
    for (const auto& patch : source.patches) {
      patch.node->write(patch.place, to + static_cast<uintptr_t>(patch.delta));
      if (patch.node->dirty) continue;
      patch.node->dirty = true;
      segments_[patch.node->segment].dirty.push_back(patch.node);
    }
    source.address = to;
    source.known = true;
  }

  // Hands what changed to the graph. A node that refuses an address (a copy, of memory of another kind) would do so
  // again: the region is then never replayed any more.
  bool apply(Segment& segment) {
    patched_ += segment.dirty.size();
    for (auto* node : segment.dirty) {
      if (node->apply(segment.exec) != CUDA_SUCCESS) {
        closed_ = true;
        return false;
      }
      node->dirty = false;
    }
    segment.dirty.clear();
    return true;
  }

  // Launches on the current stream. With its own graph, the first segment, torch fills in seed and offset, and
  // advances the generator.
  void run(size_t s, c10::cuda::CUDAStream stream) {
    const auto& api = DriverApi::get();
    if (s == 0) return graph_->replay();
    api.check(api.launch(segments_[s].exec, stream.stream()), "a segment cannot be launched");
  }

  uintptr_t copy_aligned(Call& call, size_t i, c10::Allocator& allocator, cudaStream_t stream) const {
    const auto& argument = arguments_[i];
    call.temporaries.push_back(allocator.allocate(argument.nbytes + argument.alignment));
    auto begin = reinterpret_cast<uintptr_t>(call.temporaries.back().get());
    auto shift = (argument.residue + argument.alignment - begin % argument.alignment) % argument.alignment;
    auto* to = reinterpret_cast<void*>(begin + shift);
    auto* from = reinterpret_cast<const void*>(call.addresses[i]);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, argument.nbytes, cudaMemcpyDeviceToDevice, stream));
    return begin + shift;
  }

  py::list outputs(const Call& call) const {
    py::list results(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) results[i] = output(outputs_[i], call, results);
    return results;
  }

  py::object output(const OutputSpec& spec, const Call& call, const py::list& before) const {
    auto index = static_cast<size_t>(spec.index);
    switch (spec.kind) {
      case OutputKind::argument:
        return call.held[index];
      case OutputKind::same:
        return before[index];
      case OutputKind::object:
        return spec.object;
      case OutputKind::view: {
        const auto& base = *call.tensors[index];
        auto offset = base.storage_offset() * static_cast<int64_t>(base.itemsize()) / static_cast<int64_t>(spec.dtype.itemsize());
        auto keys = DispatchKeySet(DispatchKey::CUDA);
        return wrap(tensor_over(storage_of(base), keys, spec.dtype, spec.size, spec.stride, offset + spec.offset));
      }
      default:
        return wrap(tensor_over(
            call.fresh[index], DispatchKeySet(DispatchKey::CUDA), spec.dtype, spec.size, spec.stride, spec.offset));
    }
  }

  static py::object wrap(Tensor tensor) {
    auto* object = THPVariable_Wrap(std::move(tensor));
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
  }

  void release() {
    sources_.clear();
    nodes_.clear();
    arguments_.clear();
    outputs_.clear();
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
  std::vector<Source> sources_;
  std::vector<Argument> arguments_;
  std::vector<size_t> argument_sources_; // by argument
  std::vector<size_t> fresh_; // sources of the outputs' memory
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Segment> segments_;
  std::vector<OutputSpec> outputs_;
  size_t patched_ = 0;
  bool busy_ = false;
  std::atomic<bool> closed_{false}; // also set while a replay runs without the GIL
};

} // namespace pygraph
