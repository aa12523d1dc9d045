// CudaRegion: a captured region, replayed in one call. What is an address, and of what, is decided in Python.

#include "allocator.h"
#include "nodes.h"
#include "tensors.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <atomic>

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

enum class OutputKind { argument, view, fresh, object, same };

struct OutputSpec {
  OutputKind kind;
  int64_t index, offset;
  std::vector<int64_t> size, stride;
  caffe2::TypeMeta dtype;
  py::object object;
};

// A provider of one address, and every place that it was baked into.
struct Source {
  uintptr_t address = 0;
  bool known = false;
  std::vector<Patch> patches;
};

// What lives for one replay only. The arguments' tuple holds the tensors.
struct Call {
  c10::SmallVector<const Tensor*, 32> tensors; // by argument; null for Python values
  c10::SmallVector<uintptr_t, 32> addresses;
  c10::SmallVector<size_t, 4> misaligned;
  std::vector<at::DataPtr> temporaries;
  c10::SmallVector<c10::Storage, 8> fresh;
  at::DataPtr workspace;
};

class CudaRegion {
 public:
  CudaRegion(std::shared_ptr<at::cuda::CUDAGraph> graph, c10::DeviceIndex device, size_t workspace, bool random)
      : graph_(std::move(graph)),
        exec_(reinterpret_cast<CUgraphExec>(graph_->raw_cuda_graph_exec())),
        device_(device),
        workspace_(workspace),
        random_(random),
        sources_(1) {}

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

  size_t add_fresh(size_t nbytes) {
    fresh_.push_back(nbytes);
    sources_.emplace_back();
    return sources_.size() - 1;
  }

  size_t add_kernel(uintptr_t node, const py::bytes& blob, const std::vector<std::pair<size_t, size_t>>& layout) {
    return add(std::make_unique<KernelNode>(node, std::string(blob), layout));
  }

  size_t add_copy(uintptr_t node) { return add(std::make_unique<CopyNode>(node)); }
  size_t add_fill(uintptr_t node) { return add(std::make_unique<FillNode>(node)); }

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

  py::object replay(py::handle args) {
    if (closed_ || busy_ || modes_active() || !PyList_CheckExact(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    auto held = py::reinterpret_steal<py::tuple>(PyList_AsTuple(args.ptr()));
    if (!match(held, call)) return py::none();
    bool launched = false;
    {
      py::gil_scoped_release released;
      c10::cuda::CUDAGuard guard(device_);
      launched = launch(call);
    }
    if (!launched) return py::none();
    return outputs(held, call);
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

  size_t add(Argument argument) {
    arguments_.push_back(std::move(argument));
    sources_.emplace_back();
    return sources_.size() - 1;
  }

  size_t add(std::unique_ptr<Node> node) {
    nodes_.push_back(std::move(node));
    return nodes_.size() - 1;
  }

  // Nothing is written here, and no argument changes: the caller may still run uncaptured.
  bool match(const py::tuple& args, Call& call) const {
    if (args.size() != arguments_.size()) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& expected = arguments_[i];
      auto* object = PyTuple_GET_ITEM(args.ptr(), i);
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
  // allocations and of the launch are thrown as they are.
  bool launch(Call& call) {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
    auto* allocator = cached::get();
    auto stream = c10::cuda::getCurrentCUDAStream(device_);
    if (workspace_ != 0) call.workspace = allocator->allocate(workspace_);
    for (auto nbytes : fresh_) {
      call.fresh.emplace_back(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator, /*resizable=*/true));
    }
    for (auto i : call.misaligned) call.addresses[i] = copy_aligned(call, i, *allocator, stream);
    size_t source = 0;
    move(sources_[source++], reinterpret_cast<uintptr_t>(call.workspace.get()));
    for (auto address : call.addresses) move(sources_[source++], address);
    for (const auto& storage : call.fresh) move(sources_[source++], reinterpret_cast<uintptr_t>(storage.data()));
    if (!apply()) return false;
    run(stream);
    call.workspace.clear();
    call.temporaries.clear();
    return true;
  }

  void move(Source& source, uintptr_t to) {
    if (source.known && source.address == to) return;
    for (const auto& patch : source.patches) {
      patch.node->write(patch.place, to + static_cast<uintptr_t>(patch.delta));
      if (patch.node->dirty) continue;
      patch.node->dirty = true;
      dirty_.push_back(patch.node);
    }
    source.address = to;
    source.known = true;
  }

  // Hands what changed to the graph. A node that refuses an address (a copy, of memory of another kind) would do so
  // again: the region is then never replayed any more.
  bool apply() {
    patched_ = dirty_.size();
    for (auto* node : dirty_) {
      if (node->apply(exec_) != CUDA_SUCCESS) {
        closed_ = true;
        return false;
      }
      node->dirty = false;
    }
    dirty_.clear();
    return true;
  }

  // Launches on the current stream; torch itself fills in seed and offset, and advances the generator.
  void run(c10::cuda::CUDAStream stream) {
    if (!random_) return graph_->replay();
    auto& order = RandomOrder::of(device_);
    std::lock_guard<std::mutex> lock(order.mutex);
    order.enter(stream);
    graph_->replay();
    order.leave(stream);
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

  py::list outputs(const py::tuple& args, const Call& call) const {
    py::list results(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) results[i] = output(outputs_[i], args, call, results);
    return results;
  }

  py::object output(const OutputSpec& spec, const py::tuple& args, const Call& call, const py::list& before) const {
    auto index = static_cast<size_t>(spec.index);
    switch (spec.kind) {
      case OutputKind::argument:
        return args[index];
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
    dirty_.clear();
    arguments_.clear();
    outputs_.clear();
    graph_.reset();
  }

  std::shared_ptr<at::cuda::CUDAGraph> graph_;
  CUgraphExec exec_;
  c10::DeviceIndex device_;
  size_t workspace_;
  bool random_;
  std::vector<Source> sources_; // the workspace, each argument, each fresh allocation
  std::vector<Argument> arguments_;
  std::vector<size_t> fresh_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Node*> dirty_;
  std::vector<OutputSpec> outputs_;
  size_t patched_ = 0;
  bool busy_ = false;
  std::atomic<bool> closed_{false}; // also set while a replay runs without the GIL
};

py::object replay(CudaRegion& region, py::handle args) {
  HANDLE_TH_ERRORS
  return region.replay(args);
  END_HANDLE_TH_ERRORS_PYBIND
}

// Where the seed and the offset of the default generator lie for kernels that are captured now.
std::pair<uintptr_t, uintptr_t> random_memory(c10::DeviceIndex device) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto* own = at::check_generator<at::CUDAGeneratorImpl>(generator);
  auto state = own->philox_cuda_state(0);
  TORCH_CHECK(state.captured_, "random_memory is for captures");
  return {reinterpret_cast<uintptr_t>(state.seed_.ptr), reinterpret_cast<uintptr_t>(state.offset_.ptr)};
}

void order_random(c10::DeviceIndex device, uintptr_t stream, bool entering) {
  py::gil_scoped_release released;
  auto& order = RandomOrder::of(device);
  std::lock_guard<std::mutex> lock(order.mutex);
  auto raw = reinterpret_cast<cudaStream_t>(stream);
  entering ? order.enter(raw) : order.leave(raw);
}

void bind(py::module_& m) {
  m.def("random_memory", &random_memory);
  m.def("order_random", &order_random);
  m.def("enter", [](const std::shared_ptr<Session>& session) { CaptureAllocator::get().enter(*session); });
  m.def("leave", [] { CaptureAllocator::get().leave(); });
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init<c10::DeviceIndex, uintptr_t, uintptr_t, uintptr_t, size_t, py::function>())
      .def("nodes", &Session::nodes)
      .def("alive", &Session::alive)
      .def("pieces", &Session::pieces)
      .def("close", &Session::close);
  py::enum_<OutputKind>(m, "OutputKind")
      .value("ARGUMENT", OutputKind::argument)
      .value("VIEW", OutputKind::view)
      .value("FRESH", OutputKind::fresh)
      .value("OBJECT", OutputKind::object)
      .value("SAME", OutputKind::same);
  py::class_<CudaRegion>(m, "CudaRegion")
      .def(py::init<std::shared_ptr<at::cuda::CUDAGraph>, c10::DeviceIndex, size_t, bool>())
      .def("add_tensor_argument", &CudaRegion::add_tensor_argument)
      .def("add_value_argument", &CudaRegion::add_value_argument)
      .def("add_fresh", &CudaRegion::add_fresh)
      .def("add_kernel", &CudaRegion::add_kernel)
      .def("add_copy", &CudaRegion::add_copy)
      .def("add_fill", &CudaRegion::add_fill)
      .def("add_patch", &CudaRegion::add_patch)
      .def("add_output", &CudaRegion::add_output)
      .def("patched", &CudaRegion::patched)
      .def("close", &CudaRegion::close)
      .def("replay", &replay);
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_cuda, m) {
  pybind11::object parameter = pybind11::module_::import("torch.nn.parameter").attr("Parameter");
  pygraph::parameter_type = parameter.release().ptr();
  pygraph::bind(m);
}
