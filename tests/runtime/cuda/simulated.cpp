// The native half of the CUDA driver over host memory, for machines without a device: what it asks of torch's CUDA
// libraries and of the driver is answered here. Graphs are lists of copies and fills, which a launch runs at once.
// The library's SONAME is libcuda.so.1, so that the sources find "the driver" in it.

#include "native.cpp"

#include <algorithm>
#include <cstdlib>
#include <set>

namespace simulated {

using namespace c10::cuda::CUDACachingAllocator;

// Memory of the host, said to be of device 0. What `mapped` holds is of another kind than the rest.
struct HostAllocator final : pygraph::Delegate {
  std::set<void*> mapped, alive;
  std::set<c10::MempoolId_t> recording, held; // pools that allocations go to, and those that somebody refers to
  size_t refuse_after = SIZE_MAX; // allocations until one fails

  void* take(size_t nbytes) {
    if (refuse_after-- == 0) TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory is left");
    auto* memory = std::calloc(1, nbytes + 1);
    alive.insert(memory);
    return memory;
  }
  static void give(void* memory);

  c10::DataPtr allocate(size_t nbytes) override {
    auto* memory = take(nbytes);
    return {memory, memory, &give, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  void* raw_alloc(size_t nbytes) override { return take(nbytes); }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t) override { return take(nbytes); }
  void raw_delete(void* memory) override { give(memory); }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t pool) override {
    TORCH_CHECK(recording.erase(pool) == 1, "not currently recording");
  }
  void releasePool(c10::DeviceIndex, c10::MempoolId_t pool) override { held.erase(pool); }
  bool initialized() override { return true; }
  bool isEnabled() const override { return true; }
  std::string name() override { return "simulated"; }
};

HostAllocator& host() {
  static auto* own = new HostAllocator();
  return *own;
}

// Pinned memory, of which there is none.
struct PinnedAllocator final : at::HostAllocator {
  std::set<c10::MempoolId_t> recording, held;

  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    TORCH_CHECK(recording.erase(pool) == 1, "not currently recording");
  }
  void release_pool(c10::MempoolId_t pool) override { held.erase(pool); }
  c10::DataPtr allocate(size_t) override { TORCH_CHECK(false, "none is left"); }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned() {
  static auto* own = new PinnedAllocator();
  return *own;
}

// What torch 2.11 leaves of a capture that broke.
void break_capture(c10::MempoolId_t pool) {
  at::setHostAllocator(at::kCUDA, &pinned());
  for (auto* pools : {&host().recording, &host().held, &pinned().recording, &pinned().held}) pools->insert(pool);
}

// Pools that are recorded to or referred to.
size_t pools() {
  return host().recording.size() + host().held.size() + pinned().recording.size() + pinned().held.size();
}

void HostAllocator::give(void* memory) {
  TORCH_CHECK(host().alive.erase(memory) == 1, "memory that nobody allocated");
  host().mapped.erase(memory);
  std::free(memory);
}

// A node is a copy, or a fill where it has no source. Instances hold copies of nodes.
struct Node {
  CUDA_MEMCPY3D copy{};
  CUDA_MEMSET_NODE_PARAMS fill{};
  bool is_copy = false;

  bool kind_of(CUdeviceptr address) const { return host().mapped.count(reinterpret_cast<void*>(address)) != 0; }

  // As the driver does, a copy refuses memory of another kind than it was instantiated with.
  bool accepts(const CUDA_MEMCPY3D& other) const {
    return kind_of(copy.dstDevice) == kind_of(other.dstDevice) && kind_of(copy.srcDevice) == kind_of(other.srcDevice);
  }

  void run() const {
    if (is_copy) {
      std::memcpy(reinterpret_cast<void*>(copy.dstDevice), reinterpret_cast<void*>(copy.srcDevice), copy.WidthInBytes);
    } else {
      std::memset(reinterpret_cast<void*>(fill.dst), static_cast<int>(fill.value), fill.width);
    }
  }
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;

  uintptr_t add(Node node) {
    nodes.push_back(std::make_unique<Node>(node));
    return reinterpret_cast<uintptr_t>(nodes.back().get());
  }
};

struct Instance {
  std::vector<std::pair<Node*, Node>> nodes;

  explicit Instance(const Graph& graph) {
    for (const auto& node : graph.nodes) nodes.emplace_back(node.get(), *node);
  }

  Node& of(CUgraphNode node) {
    for (auto& [original, own] : nodes) {
      if (original == reinterpret_cast<Node*>(node)) return own;
    }
    throw std::runtime_error("a node of another graph");
  }

  void run() const {
    for (const auto& each : nodes) each.second.run();
  }
};

size_t launches = 0, waits = 0;
CUgraph captured = nullptr; // that of the capture under way
auto status = CU_STREAM_CAPTURE_STATUS_NONE;
constexpr size_t kMarked = 1 << 15; // bytes of the stack

__attribute__((noinline)) void mark_stack() {
  unsigned char bytes[kMarked];
  std::memset(bytes, 0xA5, kMarked);
  asm volatile("" : : "r"(bytes) : "memory");
}

// Bytes that are left of what `mark_stack` put there.
__attribute__((noinline)) size_t marks() {
  unsigned char bytes[kMarked];
  asm volatile("" : : "r"(bytes) : "memory");
  return std::count(bytes, bytes + kMarked, 0xA5);
}
bool ended = true; // what was launched

uintptr_t add_copy(uintptr_t graph, uintptr_t to, uintptr_t from, size_t nbytes) {
  Node node;
  node.is_copy = true;
  node.copy.dstDevice = to;
  node.copy.srcDevice = from;
  node.copy.WidthInBytes = nbytes;
  return reinterpret_cast<Graph*>(graph)->add(node);
}

uintptr_t add_fill(uintptr_t graph, uintptr_t to, unsigned value, size_t nbytes) {
  Node node;
  node.fill.dst = to;
  node.fill.value = value;
  node.fill.width = nbytes;
  return reinterpret_cast<Graph*>(graph)->add(node);
}

// Bytes of the "device", as a tensor.
at::Tensor tensor(size_t nbytes, bool mapped) {
  auto storage = pygraph::new_storage(nbytes, host());
  if (mapped) host().mapped.insert(storage.mutable_data());
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return pygraph::tensor_over(storage, keys, caffe2::TypeMeta::Make<uint8_t>(), {int64_t(nbytes)}, {1}, 0);
}

} // namespace simulated

// -- torch's CUDA libraries ------------------------------------------------------------------------------------------

namespace c10::cuda {

std::atomic<CUDACachingAllocator::CUDAAllocator*> CUDACachingAllocator::allocator{&simulated::host()};

DeviceIndex device_count() noexcept { return 1; }
DeviceIndex current_device() { return 0; }
DeviceIndex ExchangeDevice(DeviceIndex) { return 0; }
cudaError_t GetDevice(DeviceIndex* device) { return *device = 0, cudaSuccess; }
cudaError_t SetDevice(DeviceIndex, const bool) { return cudaSuccess; }
cudaError_t MaybeSetDevice(DeviceIndex) { return cudaSuccess; }
cudaStream_t CUDAStream::stream() const { return nullptr; }
CUDAStream getCurrentCUDAStream(DeviceIndex) {
  return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)));
}
void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const uint32_t, const bool) {
  TORCH_CHECK(error == 0, "CUDA error ", error);
}

} // namespace c10::cuda

namespace at::cuda {

CUDAGraph::CUDAGraph(bool) : capture_stream_(c10::cuda::getCurrentCUDAStream(0)) {}
CUDAGraph::~CUDAGraph() { delete reinterpret_cast<simulated::Graph*>(graph_); }
cudaGraph_t CUDAGraph::raw_cuda_graph() {
  if (graph_ == nullptr) graph_ = reinterpret_cast<cudaGraph_t>(new simulated::Graph());
  return graph_;
}
cudaGraphExec_t CUDAGraph::raw_cuda_graph_exec() {
  if (graph_exec_ == nullptr) {
    auto* instance = new simulated::Instance(*reinterpret_cast<simulated::Graph*>(raw_cuda_graph()));
    graph_exec_ = reinterpret_cast<cudaGraphExec_t>(instance);
  }
  return graph_exec_;
}
void CUDAGraph::replay() { cudaGraphLaunch(raw_cuda_graph_exec(), nullptr); }

} // namespace at::cuda

// -- the CUDA runtime and driver -------------------------------------------------------------------------------------

using simulated::Graph;
using simulated::Instance;
using simulated::Node;

template <typename T, typename Handle>
T& as(Handle handle) {
  return *reinterpret_cast<T*>(handle);
}

extern "C" {

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t) {
  return ++simulated::launches, as<Instance>(instance).run(), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return simulated::ended ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return ++simulated::waits, cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t nbytes, unsigned) {
  return *memory = std::calloc(1, nbytes), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, enum cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, nbytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t) {
  return std::memset(to, value, nbytes), cudaSuccess;
}

CUresult cuCtxGetCurrent(CUcontext*) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "simulated", CUDA_SUCCESS; }
CUresult cuStreamGetCaptureInfo(
    CUstream,
    CUstreamCaptureStatus* status,
    cuuint64_t*,
    CUgraph* graph,
    const CUgraphNode**,
    const CUgraphEdgeData**,
    size_t*) {
  return *status = simulated::status, *graph = simulated::captured, CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* count) {
  return *count = as<Graph>(graph).nodes.size(), CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphKernelNodeSetParams(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* params) {
  return *params = as<Node>(node).copy, CUDA_SUCCESS;
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D* params) {
  return as<Node>(node).copy = *params, CUDA_SUCCESS;
}
CUresult cuGraphExecMemcpyNodeSetParams(
    CUgraphExec instance, CUgraphNode node, const CUDA_MEMCPY3D* params, CUcontext) {
  auto& own = as<Instance>(instance).of(node);
  return own.accepts(*params) ? (own.copy = *params, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* params) {
  return *params = as<Node>(node).fill, CUDA_SUCCESS;
}
CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params) {
  return as<Node>(node).fill = *params, CUDA_SUCCESS;
}
CUresult cuGraphExecMemsetNodeSetParams(
    CUgraphExec instance, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  return as<Instance>(instance).of(node).fill = *params, CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec* instance, CUgraph graph, unsigned long long) {
  return *instance = reinterpret_cast<CUgraphExec>(new Instance(as<Graph>(graph))), CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec instance, CUstream) {
  return ++simulated::launches, as<Instance>(instance).run(), CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec instance) { return delete &as<Instance>(instance), CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { return delete &as<Graph>(graph), CUDA_SUCCESS; }

} // extern "C"

// -- what tests do with it -------------------------------------------------------------------------------------------

PYBIND11_MODULE(simulated, m) {
  namespace cached = c10::cuda::CUDACachingAllocator;
  pygraph::bind(m);
  py::class_<at::cuda::CUDAGraph, std::shared_ptr<at::cuda::CUDAGraph>>(m, "Graph")
      .def(py::init<bool>())
      .def("raw", [](at::cuda::CUDAGraph& graph) { return reinterpret_cast<uintptr_t>(graph.raw_cuda_graph()); });
  m.def("graph", [] { return reinterpret_cast<uintptr_t>(new Graph()); });
  m.def("instance", [](uintptr_t graph) { return reinterpret_cast<uintptr_t>(new Instance(as<Graph>(graph))); });
  m.def("add_copy", &simulated::add_copy);
  m.def("add_fill", &simulated::add_fill);
  m.def("tensor", &simulated::tensor);
  m.def("capturing", [](uintptr_t graph, bool broken) {
    simulated::captured = reinterpret_cast<CUgraph>(graph);
    simulated::status = broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  });
  m.def("mark_stack", &simulated::mark_stack);
  m.def("marks", &simulated::marks);
  m.def("launches", [] { return simulated::launches; });
  m.def("waits", [] { return simulated::waits; });
  m.def("ended", [](bool ended) { simulated::ended = ended; });
  m.def("break_capture", &simulated::break_capture);
  m.def("pools", &simulated::pools);
  m.def("alive", [] { return simulated::host().alive.size(); });
  m.def("refuse_after", [](size_t count) { simulated::host().refuse_after = count; });
  m.def("read", [](const at::Tensor& t) {
    return py::bytes(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  });
  m.def("write", [](const at::Tensor& t, int value) { std::memset(t.mutable_data_ptr(), value, t.nbytes()); });
  m.def("raw_alloc", [](size_t nbytes) { return reinterpret_cast<uintptr_t>(cached::raw_alloc(nbytes)); });
  m.def("raw_delete", [](uintptr_t memory) { cached::raw_delete(reinterpret_cast<void*>(memory)); });
  m.def("installed", [] { return cached::get() != &simulated::host(); });
}
