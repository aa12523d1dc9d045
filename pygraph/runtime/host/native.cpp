// HostGraph: a captured region, replayed in one call. What is recorded, and why, is decided in Python (recorder.py).

#include "../native/region.h"
#include "launches.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <sys/mman.h>

#include <cstring>

namespace pygraph {

// What lives for one replay only.
struct Call : Operands {
  c10::SmallVector<c10::Storage, 8> fresh;
  at::DataPtr workspace;
};

class HostGraph final : public Region<DispatchKey::CPU, Patch> {
 public:
  // Sources are those of the workspace, of each argument, and of each fresh allocation.
  explicit HostGraph(size_t workspace) : Region(/*device=*/-1), workspace_(workspace) { new_source(); }

  size_t add_fresh(size_t nbytes) {
    fresh_.push_back(nbytes);
    return new_source();
  }

  void add_kernel(uintptr_t entry, const std::vector<uint64_t>& words, const std::vector<bool>& floats) {
    launches_.push_back(std::make_unique<Kernel>(entry, words, floats));
  }

  void add_operator(
      const OperatorCall& call,
      const std::vector<bool>& moves,
      const std::vector<std::optional<Tensor>>& outputs) {
    c10::InferenceMode ordinary(false); // its tensors serve replays inside and outside of inference mode
    launches_.push_back(std::make_unique<Operator>(call, moves, outputs));
  }

  void add_patch(size_t launch, size_t word, size_t source, int64_t delta) {
    sources_.at(source).patches.push_back(launches_.at(launch)->patch(word, delta));
  }

  void add_exclusive(size_t written, size_t other) { exclusive_.emplace_back(written, other); }

  // Empties the list in the end. None: `args` is as it was.
  py::object replay(py::handle args) {
    if (!may_replay(args.ptr())) return py::none();
    Busy busy(*this);
    Call call;
    if (!arguments_.match(args.ptr(), call) || !separate(call)) return py::none();
    Range range(*this);
    {
      WithoutGil released;
      launch(call);
    }
    empty(args);
    return make_outputs(call, call.fresh);
  }

 private:
  // Whether no two arguments overlap that must not.
  bool separate(const Call& call) const {
    for (const auto& [written, other] : exclusive_) {
      if (arguments_.elements(call, written).meets(arguments_.elements(call, other))) return false;
    }
    return true;
  }

  void launch(Call& call) {
    auto* allocator = c10::GetCPUAllocator();
    for (auto i : call.misaligned) {
      const auto* from = arguments_.relocate(call, i, *allocator);
      std::memcpy(reinterpret_cast<void*>(call.addresses[i]), from, arguments_[i].nbytes);
    }
    size_t source = 0;
    call.workspace = allocator->allocate(workspace_);
    move(sources_[source++], reinterpret_cast<uintptr_t>(call.workspace.get()));
    for (auto address : call.addresses) move(sources_[source++], address);
    for (auto nbytes : fresh_) {
      call.fresh.push_back(new_storage(nbytes, *allocator));
      move(sources_[source++], reinterpret_cast<uintptr_t>(call.fresh.back().data()));
    }
    for (const auto& each : launches_) each->run();
  }

  static void move(Source<Patch>& source, uintptr_t to) {
    source.move_to(to, [to](const Patch& patch) { patch.apply(to); });
  }

  void release() override {
    launches_.clear();
    Region::release();
  }

  size_t workspace_;
  std::vector<size_t> fresh_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<std::pair<size_t, size_t>> exclusive_; // arguments that must not overlap
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
  m.def("element_address", &element_address);
  m.attr("NO_MEMORY") = kNoMemory;
  m.attr("MAX_WORDS") = kMaxWords;
  m.attr("MAX_FLOATS") = kMaxFloats;
  py::class_<OperatorCall>(m, "OperatorCall")
      .def(py::init<const std::string&, const std::string&, const py::tuple&, const py::dict&>())
      .def("tensors", [](const OperatorCall& call) { return tensors_of(call.stack); });
  bind_region<HostGraph>(m, "HostGraph")
      .def(py::init<size_t>())
      .def("add_fresh", &HostGraph::add_fresh)
      .def("add_kernel", &HostGraph::add_kernel)
      .def("add_operator", &HostGraph::add_operator)
      .def("add_patch", &HostGraph::add_patch)
      .def("add_exclusive", &HostGraph::add_exclusive);
}

} // namespace pygraph

PYBIND11_MODULE(_pygraph_host, m) {
  pygraph::bind(m);
}
