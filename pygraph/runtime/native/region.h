// What the regions of both drivers are: arguments, outputs, sources of addresses, one replay at a time, and an end.
// Launching is theirs.
#pragma once

#include "outputs.h"
#include "source.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
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
    outputs_.add({kind, index, offset, std::move(size), std::move(stride), meta, std::move(object)});
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
  Outputs<backend> outputs_;
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

inline void bind_output_kinds(py::module_& m) {
  py::enum_<OutputKind>(m, "OutputKind", py::module_local())
      .value("ARGUMENT", OutputKind::argument)
      .value("VIEW", OutputKind::view)
      .value("FRESH", OutputKind::fresh)
      .value("OBJECT", OutputKind::object)
      .value("SAME", OutputKind::same);
}

} // namespace pygraph
