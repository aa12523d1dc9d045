// What the regions of both drivers are: arguments, outputs, sources of addresses, steps with the memory that they take and
// let go of, one replay at a time, and an end. Launching is theirs. And what Python sees of both.
#pragma once

#include "eager.h"

#include <ATen/core/Generator.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include <algorithm>
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

// How many replays this process has begun. Python owns the number, which the regions of all drivers share.
static uint64_t unshared_uses = 0;
static uint64_t* uses = &unshared_uses;

// Another one in a process that was forked: replays of its parent's threads never end there.
static unsigned generation = 1;

enum class OutputKind { argument, view, fresh, object, same };

// What a region returns, and how it is made.
struct Output {
  OutputKind kind;
  int64_t index, offset; // in elements
  Layout layout;
  py::object object;

  // `before`: the list of outputs, up to this one.
  template <DispatchKey backend>
  py::object make(const Call& call, PyObject* before) const {
    auto number = static_cast<size_t>(index);
    switch (kind) {
      case OutputKind::argument:
        return call.held[number];
      case OutputKind::same:
        return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(before, index));
      case OutputKind::object:
        return object;
      case OutputKind::fresh:
        return wrap<backend>(call.owned[number].storage, static_cast<int64_t>(call.owned[number].start));
      default: // element 0 of a view lies `offset` elements of its own type behind that of the argument
        const auto& base = *call.tensors[number];
        c10::InferenceMode mode(base.is_inference()); // a view is what its base is, in whatever mode it is made
        return wrap<backend>(storage_of(base), base.storage_offset() * static_cast<int64_t>(base.itemsize()));
    }
  }

  // A tensor `offset` elements behind byte `begin` of a storage.
  template <DispatchKey backend>
  py::object wrap(const c10::Storage& storage, int64_t begin) const {
    auto bytes = begin + offset * static_cast<int64_t>(layout.dtype.itemsize());
    auto* made = THPVariable_Wrap(layout.over<backend>(storage, bytes));
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  }
};

// A step of a replay: a segment of launches, or an eager call; the memory that it takes, and lets go of afterwards.
template <DispatchKey backend>
struct Step {
  struct Block {
    size_t source, nbytes, died; // up to the step `died`
  };
  size_t segment = 0; // of those that the driver launches
  std::unique_ptr<EagerCall<backend>> call;
  std::vector<Block> blocks;
  std::vector<std::pair<size_t, size_t>> taken; // owned memory, with its bytes
  std::vector<size_t> released; // owned memory
  std::vector<size_t> dead; // arguments
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

  // Launches run in another order than the program's, which holds for arguments that are apart.
  void keep_apart() { arguments_.keep_apart(); }

  void add_output(
      OutputKind kind,
      int64_t index,
      int64_t offset,
      std::vector<int64_t> size,
      std::vector<int64_t> stride,
      std::optional<at::ScalarType> dtype,
      py::object object) {
    Layout layout(std::move(size), std::move(stride), dtype.value_or(at::kByte));
    outputs_.push_back({kind, index, offset, std::move(layout), std::move(object)});
  }

  // Steps, in order. Returns the number of the segment.
  size_t add_segment() {
    steps_.emplace_back();
    steps_.back().segment = segment_count_;
    return segment_count_++;
  }

  void add_call(
      const OperatorCall& call,
      std::vector<size_t> leaves,
      std::vector<EagerOperand> operands,
      std::vector<EagerResult> results,
      size_t alignment,
      uint64_t drawn,
      size_t waits) {
    TORCH_CHECK(tensors_of(call.stack).size() == leaves.size(), "an operator's tensors do not match");
    auto own = call.op.hasKernelForDispatchKey(backend); // somebody else's: torch's serve all devices
    auto collective = waits > 0 && !own ? Collective::of(call.op, call.stack) : std::nullopt;
    steps_.emplace_back();
    steps_.back().call.reset(new EagerCall<backend>{
        call.op,
        call.stack,
        std::move(leaves),
        std::move(operands),
        std::move(results),
        alignment,
        drawn,
        waits,
        std::move(collective)});
  }

  // Memory for intermediates from the step `born` to `died`. Returns its source.
  size_t add_block(size_t nbytes, size_t born, size_t died) {
    auto source = new_source();
    steps_.at(born).blocks.push_back({source, nbytes, died});
    return source;
  }

  // Memory with a storage of its own. Returns its source; the first such memory is number 0, and so on.
  size_t add_owned() {
    owned_.push_back(new_source());
    return owned_.back();
  }

  void add_taken(size_t step, size_t owned, size_t nbytes) { steps_.at(step).taken.emplace_back(owned, nbytes); }
  void add_released(size_t step, size_t owned) { steps_.at(step).released.push_back(owned); }
  void add_dead(size_t step, size_t argument) { steps_.at(step).dead.push_back(argument); }

  // What profilers call a replay.
  void set_name(std::string name) { name_ = std::move(name); }

  // Gives everything back; while a replay is under way, when that is over.
  void close() {
    closed_ = true;
    if (!busy()) release();
  }

  // When the last replay began, by the count of all.
  uint64_t used() const { return used_; }

 protected:
  explicit Region(c10::DeviceIndex device) : arguments_(device) {}

  // Entered and left under the GIL: a replay that finds another one under way is turned away.
  struct Busy {
    Region& region;
    explicit Busy(Region& r) : region(r) {
      if (region.busy_ != 0) region.forget_places();
      region.busy_ = generation;
    }
    ~Busy() {
      region.busy_ = 0;
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

  bool busy() const { return busy_ == generation; }

  // A replay begins, since its arguments fit. Called under the GIL.
  void note_use() { used_ = ++*uses; }

  bool may_replay(PyObject* args) const { return !closed_ && !busy() && !modes_active() && PyList_CheckExact(args); }

  // Tells the launches that an address was baked into where it is now.
  virtual void move(size_t source, uintptr_t to) = 0;

  // False, with nothing launched, where this is the first thing that the replay would do, and it cannot be done.
  virtual bool launch(size_t segment, bool begun) = 0;

  // Around each eager call.
  virtual void before_call(uint64_t) {}
  virtual void after_call(uint64_t) {}

  // All steps, in order. Lets go of each argument as soon as it is dead. False, with nothing done, where the first one
  // cannot be. Errors of allocations, of launches and of operators are thrown as they are, as an uncaptured run that fails
  // half-way throws them. Called without the GIL.
  bool run(Call& call, PyObject* args, c10::Allocator& allocator) {
    call.owned.resize(owned_.size());
    for (size_t i = 0; i < arguments_.size(); ++i) move(argument_sources_[i], call.addresses[i]);
    bool begun = false;
    for (size_t s = 0; s < steps_.size(); ++s) {
      const auto& step = steps_[s];
      take(call, step, allocator);
      if (step.call) {
        run_call(*step.call, call, allocator);
      } else if (!launch(step.segment, begun)) {
        return false;
      }
      begun = true;
      if (s + 1 < steps_.size()) let_go(call, s, args);
    }
    return true;
  }

  py::object make_outputs(const Call& call) const {
    auto results = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(outputs_.size())));
    if (!results) throw py::error_already_set();
    for (size_t i = 0; i < outputs_.size(); ++i) {
      auto made = outputs_[i].template make<backend>(call, results.ptr());
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
    steps_.clear();
    owned_.clear();
    segment_count_ = 0;
    sources_.clear();
    argument_sources_.clear();
    arguments_.clear();
    outputs_.clear();
  }

  Arguments<backend> arguments_;
  std::vector<Output> outputs_;
  std::vector<size_t> argument_sources_; // by argument
  std::vector<Source<Patch>> sources_;
  std::vector<Step<backend>> steps_;
  std::string name_;
  unsigned busy_ = 0; // the generation of the process that replays it
  uint64_t used_ = 0;
  std::atomic<bool> closed_{false}; // also set while a replay runs without the GIL

 private:
  // Allocates what a step needs from now on.
  void take(Call& call, const Step<backend>& step, c10::Allocator& allocator) {
    for (const auto& memory : step.blocks) {
      if (memory.nbytes == 0) continue;
      call.blocks.emplace_back(memory.died, allocator.allocate(memory.nbytes));
      move(memory.source, reinterpret_cast<uintptr_t>(call.blocks.back().second.get()));
    }
    for (const auto& [number, nbytes] : step.taken) {
      call.owned[number].storage = new_storage(nbytes, allocator);
      move(owned_[number], call.owned[number].address());
    }
  }

  void run_call(const EagerCall<backend>& each, Call& call, c10::Allocator& allocator) {
    auto tensors = each.given(call);
    c10::SmallVector<uintptr_t, 8> bases;
    for (const auto& tensor : tensors) bases.push_back(storage_base(tensor));
    before_call(each.drawn);
    auto returned = call.answer == nullptr ? each.run(tensors, call) : answered(call.answer, tensors);
    after_call(each.drawn);
    bool moved = false;
    for (size_t i = 0; i < tensors.size(); ++i) moved = moved || storage_base(tensors[i]) != bases[i];
    if (moved) follow(call);
    each.adopt(returned, tensors, call, allocator);
    for (const auto& result : each.results) {
      if (!result.owned || result.index < 0) continue;
      auto number = static_cast<size_t>(result.index);
      move(owned_[number], call.owned[number].address());
    }
  }

  // An operator has given what it was given other memory, as one that resizes a storage does: later launches find it.
  void follow(Call& call) {
    for (size_t i = 0; i < call.owned.size(); ++i) {
      if (call.owned[i].storage) move(owned_[i], call.owned[i].address());
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      bool alive = call.held[i] && call.tensors[i] != nullptr && call.tensors[i]->numel() != 0;
      bool copied = std::find(call.misaligned.begin(), call.misaligned.end(), i) != call.misaligned.end();
      if (alive && !copied) move(argument_sources_[i], call.addresses[i] = address(*call.tensors[i]));
    }
  }

  static std::vector<Tensor> answered(PyObject* answer, const std::vector<Tensor>& tensors) {
    py::gil_scoped_acquire gil;
    py::object returned = py::handle(answer)(tensors);
    return returned.cast<std::vector<Tensor>>();
  }

  // Gives back what no later step needs: later allocations may have it.
  void let_go(Call& call, size_t s, PyObject* args) {
    for (auto& [died, memory] : call.blocks) {
      if (died == s) memory.clear();
    }
    for (auto number : steps_[s].released) call.owned[number].storage = c10::Storage();
    if (steps_[s].dead.empty()) return;
    py::gil_scoped_acquire gil;
    for (auto argument : steps_[s].dead) {
      auto position = static_cast<Py_ssize_t>(argument);
      if (position < PyList_GET_SIZE(args)) PyList_SetItem(args, position, py::none().release().ptr());
      call.held[argument] = py::object();
    }
  }

  // The parent's thread may have been about to move an address when this process was forked: all are moved anew.
  void forget_places() {
    for (auto& source : sources_) source.address = 1;
  }

  std::vector<size_t> owned_; // the source of each
  size_t segment_count_ = 0;

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
  py::class_<OperatorCall>(m, "OperatorCall", py::module_local())
      .def(py::init<const std::string&, const std::string&, const py::tuple&, const py::dict&>())
      .def("tensors", [](const OperatorCall& call) { return tensors_of(call.stack); })
      .def("drop_tensors", &OperatorCall::drop_tensors);
  py::enum_<OperandKind>(m, "OperandKind", py::module_local())
      .value("ITSELF", OperandKind::itself)
      .value("ARGUMENT", OperandKind::argument)
      .value("OWNED", OperandKind::owned)
      .value("CONSTANT", OperandKind::constant)
      .value("EMPTY", OperandKind::empty);
  using Sizes = std::vector<int64_t>;
  py::class_<EagerOperand>(m, "EagerOperand", py::module_local())
      .def(py::init([](OperandKind kind, size_t index, int64_t offset, Sizes size, Sizes stride, at::ScalarType dtype, std::optional<Tensor> like) {
        return EagerOperand{kind, index, offset, Layout(std::move(size), std::move(stride), dtype), std::move(like)};
      }));
  py::class_<EagerResult>(m, "EagerResult", py::module_local())
      .def(py::init([](bool owned, int64_t index, int64_t offset, size_t nbytes, Sizes size, Sizes stride, at::ScalarType dtype) {
        return EagerResult{owned, index, offset, nbytes, Layout(std::move(size), std::move(stride), dtype)};
      }));
  m.def("exchange_state", &exchange_state);
  m.def("share_uses", [](const py::buffer& number) {
    uses = static_cast<uint64_t*>(number.request().ptr);
    number.inc_ref(); // for ever
  });
  pthread_atfork(nullptr, nullptr, [] { ++generation; });
  py::enum_<OutputKind>(m, "OutputKind", py::module_local())
      .value("ARGUMENT", OutputKind::argument)
      .value("VIEW", OutputKind::view)
      .value("FRESH", OutputKind::fresh)
      .value("OBJECT", OutputKind::object)
      .value("SAME", OutputKind::same);
  py::class_<T> type(m, name);
  type.def_property_readonly("replay", &replay_of<T>)
      .def_property_readonly("used", &T::used)
      .def("set_name", &T::set_name)
      .def("add_tensor_argument", &T::add_tensor_argument)
      .def("add_value_argument", &T::add_value_argument)
      .def("keep_apart", &T::keep_apart)
      .def("add_output", &T::add_output)
      .def("add_segment", &T::add_segment)
      .def("add_call", &T::add_call)
      .def("add_block", &T::add_block)
      .def("add_owned", &T::add_owned)
      .def("add_taken", &T::add_taken)
      .def("add_released", &T::add_released)
      .def("add_dead", &T::add_dead)
      .def("replay_answered", [](T& region, py::handle args, py::handle answer) { return region.replay(args, answer.ptr()); })
      .def("close", &T::close);
  return type;
}

} // namespace pygraph
