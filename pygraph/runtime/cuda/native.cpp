// The Python module: capture sessions, and regions that are replayed.

#include "allocator.h"
#include "region.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <torch/csrc/Exceptions.h>

namespace pygraph {

py::object replay(CudaRegion& region, py::handle args) {
  HANDLE_TH_ERRORS
  return region.replay(args, /*consume=*/false);
  END_HANDLE_TH_ERRORS_PYBIND
}

py::object consume(CudaRegion& region, py::handle args) {
  HANDLE_TH_ERRORS
  return region.replay(args, /*consume=*/true);
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
      .def(py::init<std::shared_ptr<at::cuda::CUDAGraph>, c10::DeviceIndex, bool>())
      .def("add_tensor_argument", &CudaRegion::add_tensor_argument)
      .def("add_value_argument", &CudaRegion::add_value_argument)
      .def("add_segment", &CudaRegion::add_segment)
      .def("add_fresh", &CudaRegion::add_fresh)
      .def("add_block", &CudaRegion::add_block)
      .def("add_dead", &CudaRegion::add_dead)
      .def("add_kernel", &CudaRegion::add_kernel)
      .def("add_copy", &CudaRegion::add_copy)
      .def("add_fill", &CudaRegion::add_fill)
      .def("add_patch", &CudaRegion::add_patch)
      .def("add_output", &CudaRegion::add_output)
      .def("patched", &CudaRegion::patched)
      .def("close", &CudaRegion::close)
      .def("consume", &consume)
      .def("replay", &replay);
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_cuda, m) {
  pybind11::object parameter = pybind11::module_::import("torch.nn.parameter").attr("Parameter");
  pygraph::parameter_type = parameter.release().ptr();
  pygraph::bind(m);
}
