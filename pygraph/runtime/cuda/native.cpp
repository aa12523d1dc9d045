// The Python module: capture sessions, regions that are replayed, and pools for what nobody keeps.

#include "allocator.h"
#include "region.h"
#include "scratch_pool.h"

#include <cstring>

namespace pygraph {

// Where the seed and the offset of the default generator lie for kernels that are captured now, and how far the launches
// so far advance it.
std::tuple<uintptr_t, uintptr_t, uint64_t> random_memory(c10::DeviceIndex device) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto* own = at::check_generator<at::CUDAGeneratorImpl>(generator);
  auto state = own->philox_cuda_state(0);
  TORCH_CHECK(state.captured_, "random_memory is for captures");
  return {
      reinterpret_cast<uintptr_t>(state.seed_.ptr),
      reinterpret_cast<uintptr_t>(state.offset_.ptr),
      state.offset_intragraph_};
}

// Overwrites the stack that the next call is going to use: an operator takes less than 64 KiB to launch.
__attribute__((noinline)) void wipe_stack() {
  unsigned char bytes[1 << 16];
  std::memset(bytes, 0, sizeof bytes);
  asm volatile("" : : "r"(bytes) : "memory"); // or it would be left out, as nobody reads it
}

void bind(py::module_& m) {
  m.def("wipe_stack", &wipe_stack);
  m.def("random_memory", &random_memory);
  m.def("end_broken_capture", &end_broken_capture);
  m.def("advances", [](const std::shared_ptr<at::cuda::CUDAGraph>& graph) { return Generators::advanced_by(*graph); });
  py::class_<Session, std::shared_ptr<Session>>(m, "Session")
      .def(py::init<c10::DeviceIndex, uintptr_t, uintptr_t, uintptr_t, size_t, py::function>())
      .def("nodes", &Session::nodes)
      .def("idle", &Session::idle)
      .def("pieces", &Session::pieces)
      .def("begin", [](Session& session) { CaptureAllocator::get().enter(session); })
      .def("end", [](Session& session) {
        CaptureAllocator::get().leave();
        session.close();
      });
  using ReleasedGil = py::call_guard<py::gil_scoped_release>;
  // A context manager; entered, it says whether the turn began.
  py::class_<RandomTurn>(m, "RandomTurn")
      .def(py::init([](c10::DeviceIndex device, uintptr_t stream) {
        return std::make_unique<RandomTurn>(&RandomOrder::of(device), reinterpret_cast<cudaStream_t>(stream));
      }))
      .def("__enter__", [](RandomTurn& turn) { return turn.begin(/*runs_python=*/true); }, ReleasedGil())
      .def("__exit__", [](RandomTurn& turn, const py::args&) { turn.end(); }, ReleasedGil());
  py::class_<ScratchPool>(m, "ScratchPool")
      .def(py::init<c10::DeviceIndex>())
      .def("__enter__", &ScratchPool::enter)
      .def("__exit__", [](ScratchPool& pool, const py::args&) { pool.leave(); })
      .def("close", &ScratchPool::close, ReleasedGil());
  bind_nodes(m);
  py::class_<Stop, std::shared_ptr<Stop>>(m, "Stop").def(py::init<>()).def_property_readonly("address", &Stop::address);
  using Segments = std::vector<std::pair<uintptr_t, uintptr_t>>;
  using Nodes = std::vector<std::shared_ptr<Node>>;
  using Graph = std::shared_ptr<at::cuda::CUDAGraph>;
  bind_region<CudaRegion>(m, "CudaRegion")
      .def(
          py::init<
              const py::object&,
              Graph,
              c10::DeviceIndex,
              bool,
              uintptr_t,
              const Segments&,
              Nodes,
              std::pair<uintptr_t, uintptr_t>,
              bool,
              std::shared_ptr<Stop>>(),
          py::arg("described"),
          py::kw_only(),
          py::arg("graph"),
          py::arg("device"),
          py::arg("random"),
          py::arg("offset"),
          py::arg("segments"),
          py::arg("nodes"),
          py::arg("advancing"),
          py::arg("advances"),
          py::arg("stop"));
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_cuda, m) {
  pygraph::bind(m);
}
