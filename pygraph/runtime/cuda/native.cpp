// The Python module: capture sessions, regions that are replayed, and transient memory.

#include "../native/generator.h"
#include "allocator.h"
#include "region.h"
#include "transient.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <pybind11/conduit/pybind11_conduit_v1.h>

namespace pygraph {

// Where the seed and the offset of the default generator lie for kernels that are captured now.
std::pair<uintptr_t, uintptr_t> random_memory(c10::DeviceIndex device) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  auto* own = at::check_generator<at::CUDAGeneratorImpl>(generator);
  auto state = own->philox_cuda_state(0);
  TORCH_CHECK(state.captured_, "random_memory is for captures");
  return {reinterpret_cast<uintptr_t>(state.seed_.ptr), reinterpret_cast<uintptr_t>(state.offset_.ptr)};
}

// As a C++ object: it lives for as long as the Python object does, which is kept.
template <>
struct Cast<std::shared_ptr<at::cuda::CUDAGraph>> {
  static std::shared_ptr<at::cuda::CUDAGraph> from(PyObject* object) {
    auto* graph = pybind11_conduit_v1::get_type_pointer_ephemeral<at::cuda::CUDAGraph>(object);
    if (graph == nullptr) {
      if (PyErr_Occurred()) throw PythonError();
      raise(PyExc_TypeError, "a CUDA graph was expected");
    }
    return {std::make_shared<Object>(Object::borrowed(object)), graph};
  }
};

bool advances(const std::shared_ptr<at::cuda::CUDAGraph>& graph) {
  return Generators::advanced_by(*graph);
}

void enter(const std::shared_ptr<Session>& session) {
  CaptureAllocator::get().enter(*session);
}

void leave() {
  CaptureAllocator::get().leave();
}

// A turn during which Python code runs, as a context manager; entered, it says whether the turn began.
struct PythonTurn {
  RandomTurn turn;

  PythonTurn(c10::DeviceIndex device, uintptr_t stream)
      : turn(&RandomOrder::of(device), reinterpret_cast<cudaStream_t>(stream)) {}

  bool enter() {
    WithoutGil released;
    return turn.begin(/*runs_python=*/true);
  }

  void exit(const Object&, const Object&, const Object&) {
    WithoutGil released;
    turn.end();
  }
};

void close_pool(TransientPool& pool) {
  WithoutGil released;
  pool.close();
}

void bind(PyObject* m) {
  def<&random_memory>(m, "random_memory");
  def<&exchange_state>(m, "exchange_state");
  def<&advances>(m, "advances");
  def<&enter>(m, "enter");
  def<&leave>(m, "leave");
  Type<Session>(m, "Session")
      .init<c10::DeviceIndex, uintptr_t, uintptr_t, uintptr_t, size_t, Object>()
      .def<&Session::nodes>("nodes")
      .def<&Session::alive>("alive")
      .def<&Session::pieces>("pieces")
      .def<&Session::close>("close")
      .finish();
  Type<PythonTurn>(m, "RandomTurn")
      .init<c10::DeviceIndex, uintptr_t>()
      .def<&PythonTurn::enter>("__enter__")
      .def<&PythonTurn::exit>("__exit__")
      .finish();
  Type<TransientPool>(m, "TransientPool")
      .init<c10::DeviceIndex>()
      .def<&TransientPool::enter>("enter")
      .def<&TransientPool::leave>("leave")
      .def<&close_pool>("close")
      .finish();
  bind_output_kinds(m);
  Type<CudaRegion>(m, "CudaRegion")
      .init<std::shared_ptr<at::cuda::CUDAGraph>, c10::DeviceIndex, bool>()
      .def_directly<&CudaRegion::replay>("replay")
      .def_directly<&CudaRegion::consume>("consume")
      .def<&CudaRegion::add_tensor_argument>("add_tensor_argument")
      .def<&CudaRegion::add_value_argument>("add_value_argument")
      .def<&CudaRegion::set_name>("set_name")
      .def<&CudaRegion::add_segment>("add_segment")
      .def<&CudaRegion::add_piece>("add_piece")
      .def<&CudaRegion::add_fresh>("add_fresh")
      .def<&CudaRegion::add_block>("add_block")
      .def<&CudaRegion::add_dead>("add_dead")
      .def<&CudaRegion::add_kernel>("add_kernel")
      .def<&CudaRegion::add_copy>("add_copy")
      .def<&CudaRegion::add_fill>("add_fill")
      .def<&CudaRegion::add_patch>("add_patch")
      .def<&CudaRegion::add_output>("add_output")
      .def<&CudaRegion::patched>("patched")
      .def<&CudaRegion::close>("close")
      .finish();
}

} // namespace pygraph

PyMODINIT_FUNC PyInit__pygraph_cuda() {
  return pygraph::make_module<&pygraph::bind>("_pygraph_cuda");
}
