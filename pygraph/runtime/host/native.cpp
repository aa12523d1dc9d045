// HostGraph: a captured region, replayed in one call. What is recorded, and why, is decided in Python (recorder.py).

#include "../native/region.h"
#include "launches.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <sys/mman.h>

#include <cstring>

namespace pygraph {

class HostGraph final : public Region<DispatchKey::CPU, Patch> {
 public:
  // `launches`: all that are patched; `segments`: those that run, in order. `exclusive`: arguments, the first of them
  // written, that must not overlap.
  HostGraph(
      const py::object& described,
      const Launches& launches,
      std::vector<Launches> segments,
      std::vector<std::pair<size_t, size_t>> exclusive)
      : Region(
            /*device=*/-1,
            described,
            [&](size_t launch, size_t word, int64_t delta) { return launches.at(launch)->patch(word, delta); }),
        segments_(std::move(segments)),
        exclusive_(std::move(exclusive)) {}

  // Empties the list in the end. None: `args` is as it was. `answer` is called in the place of operators.
  py::object replay(py::handle args, PyObject* answer = nullptr) {
    if (!may_replay(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    call.answer = answer;
    if (!arguments_.match(args.ptr(), call) || !separate(call)) return py::none();
    note_use();
    Range range(*this);
    {
      WithoutGil released;
      auto* allocator = c10::GetCPUAllocator();
      for (auto i : call.misaligned) {
        const auto* from = arguments_.relocate(call, i, *allocator);
        std::memcpy(reinterpret_cast<void*>(call.addresses[i]), from, arguments_[i].nbytes);
      }
      run(call, args.ptr(), *allocator);
    }
    empty(args);
    return make_outputs(call);
  }

 private:
  // Whether no two arguments overlap that must not.
  bool separate(const Call& call) const {
    for (const auto& [written, other] : exclusive_) {
      if (arguments_.elements(call, written).meets(arguments_.elements(call, other))) return false;
    }
    return true;
  }

  void move(size_t source, uintptr_t to) override {
    sources_[source].move_to(to, [to](const Patch& patch) { patch.apply(to); });
  }

  bool launch(size_t segment, bool) override {
    for (const auto& each : segments_[segment]) each->run();
    return true;
  }

  void release() override {
    segments_.clear();
    Region::release();
  }

  std::vector<Launches> segments_;
  std::vector<std::pair<size_t, size_t>> exclusive_;
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

void bind(py::module_& m) {
  m.def("reserve", &reserve);
  m.def("unreserve", &unreserve);
  m.def("tensor_at", &tensor_at);
  m.def("is_plain", &is_plain<DispatchKey::CPU>);
  m.def("modes_active", &modes_active);
  m.def("storage_base", &storage_base);
  m.def("element_address", &address);
  m.attr("NO_MEMORY") = kNoMemory;
  m.attr("MAX_WORDS") = kMaxWords;
  m.attr("MAX_FLOATS") = kMaxFloats;
  bind_region<HostGraph>(m, "HostGraph")
      .def(
          py::init<const py::object&, Launches, std::vector<Launches>, std::vector<std::pair<size_t, size_t>>>(),
          py::arg("described"),
          py::kw_only(),
          py::arg("launches"),
          py::arg("segments"),
          py::arg("exclusive"));
  py::class_<Launch, std::shared_ptr<Launch>>(m, "Launch");
  py::class_<Kernel, Launch, std::shared_ptr<Kernel>>(m, "Kernel")
      .def(py::init<uintptr_t, const std::vector<uint64_t>&, const std::vector<bool>&>());
  py::class_<Nest, Launch, std::shared_ptr<Nest>>(m, "Nest").def(py::init<std::vector<Launches>, bool>());
  using Outputs = std::vector<std::optional<Tensor>>;
  py::class_<Operator, Launch, std::shared_ptr<Operator>>(m, "Operator")
      .def(py::init([](const OperatorCall& call, const std::vector<bool>& moves, const Outputs& outputs) {
        c10::InferenceMode ordinary(false); // its tensors serve replays inside and outside of inference mode
        return std::make_shared<Operator>(call, moves, outputs);
      }));
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_host, m) {
  pygraph::bind(m);
}
