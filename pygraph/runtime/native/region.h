// What the regions of both drivers are: arguments, outputs, sources of addresses, steps with the memory that they take and
// let go of, one replay at a time, and an end. Launching is theirs. And what Python sees of both.
#pragma once

#include "eager.h"
#include "held.h"

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

  explicit Output(py::handle described)
      : kind(kind_of<OutputKind>(
            described,
            {{"argument", OutputKind::argument},
             {"view", OutputKind::view},
             {"fresh", OutputKind::fresh},
             {"object", OutputKind::object},
             {"same", OutputKind::same}})),
        index(field<int64_t>(described, "index")),
        offset(field<int64_t>(described, "offset")),
        layout(described),
        object(field<py::object>(described, "value")) {}

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
  size_t segment; // of those that the driver launches: the next one, where this is a call
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

  // Gives everything back; while a replay is under way, when that is over.
  void close() {
    closed_ = true;
    if (!busy()) release();
  }

  // When the last replay began, by the count of all.
  uint64_t used() const { return used_; }

 protected:
  // `described`: a RegionDescription of Python's. `patch` makes a patch of the number of a launch, the place in it, and how
  // many bytes behind the begin of the memory its address lies.
  template <typename F>
  Region(c10::DeviceIndex device, py::handle described, F&& patch)
      : arguments_(device, described.attr("arguments"), field<bool>(described, "apart")),
        name_(field<std::string>(described, "name")) {
    auto add_source = [&](py::handle patches) {
      sources_.emplace_back();
      for (auto each : patches) {
        auto launch = field<size_t>(each, "launch"), place = field<size_t>(each, "place");
        sources_.back().patches.push_back(patch(launch, place, field<int64_t>(each, "delta")));
      }
      return sources_.size() - 1;
    };
    for (auto each : described.attr("arguments")) add_source(each.attr("patches"));
    for (auto patches : described.attr("owned")) owned_.push_back(add_source(patches));
    size_t segments = 0;
    for (auto each : described.attr("steps")) {
      auto call = field<py::object>(each, "call");
      auto& step = steps_.emplace_back();
      step.segment = segments;
      if (call.is_none()) {
        ++segments;
      } else {
        step.call = std::make_unique<EagerCall<backend>>(call);
      }
      for (auto block : each.attr("blocks")) {
        auto nbytes = field<size_t>(block, "nbytes"), died = field<size_t>(block, "died");
        step.blocks.push_back({add_source(block.attr("patches")), nbytes, died});
      }
      step.taken = field<std::vector<std::pair<size_t, size_t>>>(each, "taken");
      step.released = field<std::vector<size_t>>(each, "released");
      step.dead = field<std::vector<size_t>>(each, "dead");
    }
    for (auto each : described.attr("outputs")) outputs_.emplace_back(each);
  }

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
    for (size_t i = 0; i < arguments_.size(); ++i) move(i, call.addresses[i]);
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

  virtual void release() {
    steps_.clear();
    owned_.clear();
    sources_.clear();
    arguments_.clear();
    outputs_.clear();
  }

  Arguments<backend> arguments_;
  std::vector<Output> outputs_;
  std::vector<Source<Patch>> sources_; // those of the arguments come first
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
      if (alive && !copied) move(i, call.addresses[i] = address(*call.tensors[i]));
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
  bind_held(m);
  m.def("exchange_state", &exchange_state);
  m.def("share_uses", [](const py::buffer& number) {
    uses = static_cast<uint64_t*>(number.request().ptr);
    number.inc_ref(); // for ever
  });
  pthread_atfork(nullptr, nullptr, [] { ++generation; });
  py::class_<T> type(m, name);
  type.def_property_readonly("replay", &replay_of<T>)
      .def_property_readonly("used", &T::used)
      .def("replay_answered", [](T& region, py::handle args, py::handle answer) { return region.replay(args, answer.ptr()); })
      .def("close", &T::close);
  return type;
}

} // namespace pygraph
