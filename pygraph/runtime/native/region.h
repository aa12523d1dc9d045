// What the regions of both drivers are: arguments, outputs, sources of addresses, one replay at a time, and an end.
// Launching is theirs. And what Python sees of both.
#pragma once

#include "arguments.h"

#include <ATen/core/Generator.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace pygraph {

// Whether something watches or transforms the operators of this thread, which a replay would pass by.
inline bool modes_active() {
  auto included = c10::impl::tls_local_dispatch_key_set().included_;
  constexpr auto watching = DispatchKeySet(
      {DispatchKey::Python,
       DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::Functionalize,
       DispatchKey::PythonDispatcher});
  return included.has_any(watching) || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// A provider of one address, and every place that it was baked into. What a place is, is the driver's.
template <typename Patch>
struct Source {
  uintptr_t address = 1; // where nothing lies: none yet
  std::vector<Patch> patches;

  // Hands each place to `write` where the address is another than the last time.
  template <typename F>
  void move_to(uintptr_t to, F&& write) {
    if (address == to) return;
    for (const auto& patch : patches) write(patch);
    address = to;
  }
};

enum class OutputKind { argument, view, fresh, object, same };

// What a region returns, and how it is made.
struct Output {
  OutputKind kind;
  int64_t index, offset;
  std::vector<int64_t> size, stride;
  caffe2::TypeMeta dtype;
  py::object object;

  // `fresh`: memory that was allocated for this call; `before`: the list of outputs, up to this one.
  py::object make(
      DispatchKey backend, const Operands& call, c10::ArrayRef<c10::Storage> fresh, PyObject* before) const {
    auto number = static_cast<size_t>(index);
    switch (kind) {
      case OutputKind::argument:
        return call.held[number];
      case OutputKind::same:
        return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(before, index));
      case OutputKind::object:
        return object;
      case OutputKind::fresh:
        return make_tensor(backend, fresh[number], offset);
      default: // element 0 of a view lies `offset` elements of its own type behind that of the argument
        const auto& base = *call.tensors[number];
        auto bytes = base.storage_offset() * static_cast<int64_t>(base.itemsize());
        return make_tensor(backend, storage_of(base), bytes / static_cast<int64_t>(dtype.itemsize()) + offset);
    }
  }

  py::object make_tensor(DispatchKey backend, c10::Storage storage, int64_t at) const {
    auto* made = THPVariable_Wrap(tensor_over(std::move(storage), DispatchKeySet(backend), dtype, size, stride, at));
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
};

// `Patch`: a place that an address was baked into.
template <DispatchKey backend, typename Patch>
class Region {
 public:
  Region(const Region&) = delete;
  virtual ~Region() = default;

  // The number of the source of the argument's address; so for one that is no tensor, which has none.
  size_t add_tensor_argument(
      const Tensor& captured, bool written, int64_t offset, size_t nbytes, size_t alignment, uintptr_t address) {
    return add_argument({captured, written, offset, nbytes, alignment, address});
  }

  size_t add_value_argument(py::object value) { return add_argument(Argument(std::move(value))); }

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

  // What profilers call a replay.
  void set_name(std::string name) { name_ = std::move(name); }

  // Gives everything back; while a replay is under way, when that is over.
  void close() {
    closed_ = true;
    if (!busy_) release();
  }

 protected:
  explicit Region(c10::DeviceIndex device) : arguments_(device) {}

  // Entered and left under the GIL: a replay that finds another one under way is turned away.
  struct Busy {
    Region& region;
    explicit Busy(Region& r) : region(r) { region.busy_ = true; }
    ~Busy() {
      region.busy_ = false;
      if (region.closed_) region.release();
    }
  };

  // A range in the profile, as record_function makes: where nobody profiles, a look at a list that is empty.
  struct Range {
    at::RecordFunction function{at::RecordScope::USER_SCOPE};
    explicit Range(const Region& region) {
      if (function.isActive()) function.before(std::string_view(region.name_));
    }
  };

  bool may_replay(PyObject* args) const { return !closed_ && !busy_ && !modes_active() && PyList_CheckExact(args); }

  py::object make_outputs(const Operands& call, c10::ArrayRef<c10::Storage> fresh) const {
    auto results = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(outputs_.size())));
    if (!results) throw py::error_already_set();
    for (size_t i = 0; i < outputs_.size(); ++i) {
      auto made = outputs_[i].make(backend, call, fresh, results.ptr());
      PyList_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
    }
    return results;
  }

  // The caller's list after a replay: its arguments are the replay's to let go of.
  static void empty(py::handle args) {
    if (PyList_SetSlice(args.ptr(), 0, PyList_GET_SIZE(args.ptr()), nullptr) != 0) throw py::error_already_set();
  }

  size_t new_source() {
    sources_.emplace_back();
    return sources_.size() - 1;
  }

  virtual void release() {
    sources_.clear();
    argument_sources_.clear();
    arguments_.clear();
    outputs_.clear();
  }

  Arguments<backend> arguments_;
  std::vector<Output> outputs_;
  std::vector<size_t> argument_sources_; // by argument
  std::vector<Source<Patch>> sources_;
  std::string name_;
  bool busy_ = false;
  std::atomic<bool> closed_{false}; // also set while a replay runs without the GIL

 private:
  size_t add_argument(Argument argument) {
    arguments_.add(std::move(argument));
    argument_sources_.push_back(new_source());
    return argument_sources_.back();
  }
};

// Sets the state of a generator to `to`, if it is `expected` or nothing is expected. Returns the one that it had before:
// no other thread draws in between.
inline Tensor exchange_state(at::Generator generator, const Tensor& to, const std::optional<Tensor>& expected) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto before = generator.get_state();
  auto same = !expected ||
      (expected->nbytes() == before.nbytes() &&
       std::memcmp(expected->const_data_ptr(), before.const_data_ptr(), before.nbytes()) == 0);
  if (same) generator.set_state(to);
  return before;
}

// The C function behind `replay`, which Python calls without pybind11's dispatch: that costs as much as checking several
// arguments. `self` is a capsule with the region.
template <typename T>
PyObject* call_replay(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto* region = static_cast<T*>(PyCapsule_GetPointer(self, nullptr));
  if (region == nullptr) throw python_error();
  return region->replay(arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

// `replay` as a built-in function that keeps its region alive.
template <typename T>
py::object replay_of(py::object region) {
  static PyMethodDef definition{"replay", &call_replay<T>, METH_O, nullptr};
  auto release = [](PyObject* capsule) { Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule))); };
  auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(&region.cast<T&>(), nullptr, release));
  if (!capsule || PyCapsule_SetContext(capsule.ptr(), region.ptr()) != 0) throw py::error_already_set();
  region.release();
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

template <typename T>
py::class_<T> bind_region(py::module_& m, const char* name) {
  m.def("exchange_state", &exchange_state);
  py::enum_<OutputKind>(m, "OutputKind", py::module_local())
      .value("ARGUMENT", OutputKind::argument)
      .value("VIEW", OutputKind::view)
      .value("FRESH", OutputKind::fresh)
      .value("OBJECT", OutputKind::object)
      .value("SAME", OutputKind::same);
  py::class_<T> type(m, name);
  type.def_property_readonly("replay", &replay_of<T>)
      .def("set_name", &T::set_name)
      .def("add_tensor_argument", &T::add_tensor_argument)
      .def("add_value_argument", &T::add_value_argument)
      .def("add_output", &T::add_output)
      .def("close", &T::close);
  return type;
}

} // namespace pygraph
