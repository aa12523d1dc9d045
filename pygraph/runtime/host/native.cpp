// HostGraph: a captured region, replayed in one call. What is recorded, and why, is decided in Python (recorder.py).

#include "launches.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <sys/mman.h>

#include <cstring>

namespace pygraph {

PyObject* parameter_type = nullptr;

// What one argument has to be at each replay.
struct Argument {
  bool is_tensor = false;
  bool written = false;
  py::object value;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> size, stride;
  int64_t offset = -1; // the storage offset that it must have; -1: any
  size_t nbytes = 0, alignment = 1, residue = 0;

  bool accepts_value(PyObject* object) const {
    auto* captured = value.ptr();
    if (object == captured) return true;
    if (Py_TYPE(object) != Py_TYPE(captured)) return false;
    if (PyFloat_CheckExact(object)) {
      double now = PyFloat_AS_DOUBLE(object), then = PyFloat_AS_DOUBLE(captured);
      return std::memcmp(&now, &then, sizeof now) == 0;
    }
    return PyLong_CheckExact(object) && PyObject_RichCompareBool(object, captured, Py_EQ) == 1;
  }

  bool accepts_tensor(PyObject* object) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type != THPVariableClass && type != parameter_type) return false;
    const auto& t = THPVariable_Unpack(object);
    return is_plain(t) && t.dtype() == dtype && t.sizes() == size && t.strides() == stride &&
        (offset < 0 || t.storage_offset() == offset) && is_backed(t);
  }

  bool aligned(uintptr_t address) const { return nbytes == 0 || address % alignment == residue; }
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

  void move_to(uintptr_t to) {
    if (known && address == to) return;
    for (const auto& patch : patches) patch.apply(to);
    address = to;
    known = true;
  }
};

// What lives for one replay only.
struct Call {
  c10::SmallVector<Tensor, 16> tensors; // by argument; undefined for Python values
  c10::SmallVector<uintptr_t, 16> addresses;
  c10::SmallVector<size_t, 4> misaligned;
  std::vector<at::DataPtr> temporaries;
  std::vector<c10::Storage> fresh;
  at::DataPtr workspace;
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

class HostGraph {
 public:
  explicit HostGraph(size_t workspace) : workspace_(workspace), sources_(1) {}

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

  void add_kernel(uintptr_t entry, std::vector<int64_t> words, const std::vector<float>& floats) {
    launches_.push_back(std::make_unique<Kernel>(entry, std::move(words), floats));
  }

  void add_operator(
      const OperatorCall& call,
      const std::vector<bool>& moves,
      const std::vector<std::optional<Tensor>>& outputs,
      bool below) {
    c10::InferenceMode ordinary(false); // its tensors serve replays inside and outside of inference mode
    launches_.push_back(std::make_unique<Operator>(call, moves, outputs, below));
  }

  void add_patch(size_t launch, size_t word, size_t source, int64_t delta) {
    sources_.at(source).patches.push_back(launches_.at(launch)->patch(word, delta));
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

  void add_exclusive(size_t written, size_t other) { exclusive_.emplace_back(written, other); }

  void set_order(const std::vector<size_t>& order, bool reordered) {
    reordered_ = reordered;
    for (auto index : order) order_.push_back(launches_.at(index).get());
  }

  py::object replay(py::handle args) {
    if (closed_ || busy_ || modes_active() || !PyList_CheckExact(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    auto held = py::reinterpret_steal<py::tuple>(PyList_AsTuple(args.ptr()));
    if (!match(held, call)) return py::none();
    {
      WithoutGil released;
      launch(call);
    }
    return outputs(held, call);
  }

  void close() {
    closed_ = true;
    if (!busy_) release();
  }

 private:
  // Entered and left under the GIL: a replay that finds another one under way is turned away.
  struct Busy {
    HostGraph& graph;
    explicit Busy(HostGraph& g) : graph(g) { graph.busy_ = true; }
    ~Busy() {
      graph.busy_ = false;
      if (graph.closed_) graph.release();
    }
  };

  size_t add(Argument argument) {
    arguments_.push_back(std::move(argument));
    sources_.emplace_back();
    return sources_.size() - 1;
  }

  // Nothing is written here, and no argument changes: the caller may still run uncaptured.
  bool match(const py::tuple& args, Call& call) const {
    if (args.size() != arguments_.size()) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& expected = arguments_[i];
      auto* object = PyTuple_GET_ITEM(args.ptr(), i);
      if (!(expected.is_tensor ? expected.accepts_tensor(object) : expected.accepts_value(object))) return false;
      call.tensors.push_back(expected.is_tensor ? THPVariable_Unpack(object) : Tensor());
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& tensor = call.tensors[i];
      const void* data = nullptr;
      if (tensor.defined()) data = arguments_[i].written ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
      call.addresses.push_back(reinterpret_cast<uintptr_t>(data));
      if (tensor.defined() && !arguments_[i].aligned(call.addresses[i])) call.misaligned.push_back(i);
    }
    return (!reordered_ || !any_written_shared(call)) && exclusive(call) && copyable(call);
  }

  bool shares_with_written(const Call& call, size_t i) const {
    auto range = storage_range(call.tensors[i]);
    for (size_t w = 0; w < arguments_.size(); ++w) {
      if (w != i && arguments_[w].written && range.meets(storage_range(call.tensors[w]))) return true;
    }
    return false;
  }

  Range elements(const Call& call, size_t i) const {
    return {call.addresses[i], call.addresses[i] + arguments_[i].nbytes};
  }

  bool exclusive(const Call& call) const {
    for (const auto& pair : exclusive_) {
      if (elements(call, pair.first).meets(elements(call, pair.second))) return false;
    }
    return true;
  }

  bool any_written_shared(const Call& call) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].is_tensor && shares_with_written(call, i)) return true;
    }
    return false;
  }

  // A copy stands for a misaligned argument only if nothing can write to the original meanwhile, nor look around it.
  bool copyable(const Call& call) const {
    for (auto i : call.misaligned) {
      const auto& argument = arguments_[i];
      if (argument.written || argument.offset >= 0 || shares_with_written(call, i)) return false;
    }
    return true;
  }

  void launch(Call& call) {
    auto* allocator = c10::GetCPUAllocator();
    for (auto i : call.misaligned) call.addresses[i] = copy_aligned(call, i, *allocator);
    size_t source = 0;
    call.workspace = allocator->allocate(workspace_);
    sources_[source++].move_to(reinterpret_cast<uintptr_t>(call.workspace.get()));
    for (auto address : call.addresses) sources_[source++].move_to(address);
    for (auto nbytes : fresh_) {
      call.fresh.emplace_back(c10::make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator, /*resizable=*/true));
      sources_[source++].move_to(reinterpret_cast<uintptr_t>(call.fresh.back().data()));
    }
    for (auto* each : order_) each->run();
  }

  uintptr_t copy_aligned(Call& call, size_t i, c10::Allocator& allocator) const {
    const auto& argument = arguments_[i];
    call.temporaries.push_back(allocator.allocate(argument.nbytes + argument.alignment));
    auto begin = reinterpret_cast<uintptr_t>(call.temporaries.back().get());
    auto shift = (argument.residue + argument.alignment - begin % argument.alignment) % argument.alignment;
    auto to = begin + shift;
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(call.addresses[i]), argument.nbytes);
    return to;
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
        const auto& base = call.tensors[index];
        auto bytes = static_cast<size_t>(base.storage_offset()) * base.itemsize();
        auto offset = static_cast<int64_t>(bytes / spec.dtype.itemsize()) + spec.offset;
        return wrap(tensor_over(storage_of(base), base.key_set(), spec.dtype, spec.size, spec.stride, offset));
      }
      default:
        return wrap(tensor_over(
            call.fresh[index], DispatchKeySet(DispatchKey::CPU), spec.dtype, spec.size, spec.stride, spec.offset));
    }
  }

  static py::object wrap(Tensor tensor) {
    auto* object = THPVariable_Wrap(std::move(tensor));
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
  }

  void release() {
    sources_.clear();
    order_.clear();
    launches_.clear();
    arguments_.clear();
    outputs_.clear();
  }

  size_t workspace_;
  std::vector<Source> sources_; // the workspace, each argument, each fresh allocation
  std::vector<Argument> arguments_;
  std::vector<size_t> fresh_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<Launch*> order_;
  std::vector<OutputSpec> outputs_;
  std::vector<std::pair<size_t, size_t>> exclusive_; // arguments that must not overlap
  bool reordered_ = false;
  bool busy_ = false;
  bool closed_ = false;
};

// Address space without memory behind it: any access faults.
uintptr_t reserve(size_t nbytes) {
  void* start = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "cannot reserve ", nbytes, " bytes of address space: ", std::strerror(errno));
  return reinterpret_cast<uintptr_t>(start);
}

void unreserve(uintptr_t start, size_t nbytes) {
  munmap(reinterpret_cast<void*>(start), nbytes);
}

py::object replay(HostGraph& graph, py::handle args) {
  HANDLE_TH_ERRORS
  return graph.replay(args);
  END_HANDLE_TH_ERRORS_PYBIND
}

void bind(py::module_& m) {
  m.def("reserve", &reserve);
  m.def("unreserve", &unreserve);
  m.def("tensor_at", &tensor_at);
  m.def("is_plain", &is_plain);
  m.def("is_backed", &is_backed);
  m.def("modes_active", &modes_active);
  m.def("storage_base", &storage_base);
  m.def("element_address", &element_address);
  m.def("extent", &extent);
  m.attr("NO_MEMORY") = kNoMemory;
  m.attr("MAX_WORDS") = kMaxWords;
  m.attr("MAX_FLOATS") = kMaxFloats;
  py::enum_<OutputKind>(m, "OutputKind")
      .value("ARGUMENT", OutputKind::argument)
      .value("VIEW", OutputKind::view)
      .value("FRESH", OutputKind::fresh)
      .value("OBJECT", OutputKind::object)
      .value("SAME", OutputKind::same);
  py::class_<OperatorCall>(m, "OperatorCall")
      .def(py::init<const std::string&, const std::string&, const py::tuple&, const py::dict&>())
      .def("tensors", &OperatorCall::tensors);
  py::class_<HostGraph>(m, "HostGraph")
      .def(py::init<size_t>())
      .def("add_tensor_argument", &HostGraph::add_tensor_argument)
      .def("add_value_argument", &HostGraph::add_value_argument)
      .def("add_fresh", &HostGraph::add_fresh)
      .def("add_kernel", &HostGraph::add_kernel)
      .def("add_operator", &HostGraph::add_operator)
      .def("add_patch", &HostGraph::add_patch)
      .def("add_output", &HostGraph::add_output)
      .def("add_exclusive", &HostGraph::add_exclusive)
      .def("set_order", &HostGraph::set_order)
      .def("close", &HostGraph::close)
      .def("replay", &replay);
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_host, m) {
  pybind11::object parameter = pybind11::module_::import("torch.nn.parameter").attr("Parameter");
  pygraph::parameter_type = parameter.release().ptr();
  pygraph::bind(m);
}
