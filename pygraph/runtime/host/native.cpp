// HostGraph: a captured region, replayed in one call. What is recorded, and why, is decided in Python (recorder.py).

#include "../native/generator.h"
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

  void add_kernel(uintptr_t entry, std::vector<int64_t> words, const std::vector<float>& floats) {
    launches_.push_back(std::make_unique<Kernel>(entry, std::move(words), floats));
  }

  void add_operator(
      const std::shared_ptr<OperatorCall>& call,
      const std::vector<bool>& moves,
      const std::vector<std::optional<Tensor>>& outputs) {
    c10::InferenceMode ordinary(false); // its tensors serve replays inside and outside of inference mode
    launches_.push_back(std::make_unique<Operator>(*call, moves, outputs));
  }

  void add_patch(size_t launch, size_t word, size_t source, int64_t delta) {
    sources_.at(source).patches.push_back(launches_.at(launch)->patch(word, delta));
  }

  void add_exclusive(size_t written, size_t other) { exclusive_.emplace_back(written, other); }

  void set_order(const std::vector<size_t>& order, bool reordered) {
    reordered_ = reordered;
    for (auto index : order) order_.push_back(launches_.at(index).get());
  }

  Object replay(PyObject* args) {
    if (!may_replay(args)) return Object::none();
    Busy busy(*this);
    Call call;
    if (!arguments_.match(args, call) || !separate(call)) return Object::none();
    Range range(*this);
    {
      WithoutGil released;
      launch(call);
    }
    return outputs_.make(call, call.fresh);
  }

 private:
  // Whether no two arguments overlap that must not.
  bool separate(const Call& call) const {
    for (const auto& [written, other] : exclusive_) {
      if (arguments_.elements(call, written).meets(arguments_.elements(call, other))) return false;
    }
    return !reordered_ || !any_written_shared(call);
  }

  bool any_written_shared(const Call& call) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].is_tensor && arguments_.shares_with_written(call, i)) return true;
    }
    return false;
  }

  void launch(Call& call) {
    auto* allocator = c10::GetCPUAllocator();
    for (auto i : call.misaligned) copy_aligned(call, i, *allocator);
    size_t source = 0;
    call.workspace = allocator->allocate(workspace_);
    move(sources_[source++], reinterpret_cast<uintptr_t>(call.workspace.get()));
    for (auto address : call.addresses) move(sources_[source++], address);
    for (auto nbytes : fresh_) {
      call.fresh.push_back(new_storage(nbytes, *allocator));
      move(sources_[source++], reinterpret_cast<uintptr_t>(call.fresh.back().data()));
    }
    for (auto* each : order_) each->run();
  }

  static void move(Source<Patch>& source, uintptr_t to) {
    source.move_to(to, [to](const Patch& patch) { patch.apply(to); });
  }

  void copy_aligned(Call& call, size_t i, c10::Allocator& allocator) const {
    const auto* from = arguments_.relocate(call, i, allocator);
    std::memcpy(reinterpret_cast<void*>(call.addresses[i]), from, arguments_[i].nbytes);
  }

  void release() override {
    order_.clear();
    launches_.clear();
    Region::release();
  }

  size_t workspace_;
  std::vector<size_t> fresh_;
  std::vector<std::unique_ptr<Launch>> launches_;
  std::vector<Launch*> order_;
  std::vector<std::pair<size_t, size_t>> exclusive_; // arguments that must not overlap
  bool reordered_ = false;
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

// Python's `args` and `kwargs` of an operator.
template <>
struct Cast<py::tuple> {
  static py::tuple from(PyObject* object) { return py::reinterpret_borrow<py::tuple>(object); }
};

template <>
struct Cast<py::dict> {
  static py::dict from(PyObject* object) { return py::reinterpret_borrow<py::dict>(object); }
};

void bind(PyObject* m) {
  def<&reserve>(m, "reserve");
  def<&unreserve>(m, "unreserve");
  def<&tensor_at>(m, "tensor_at");
  def<&is_plain<DispatchKey::CPU>>(m, "is_plain");
  def<&is_backed>(m, "is_backed");
  def<&modes_active>(m, "modes_active");
  def<&storage_base>(m, "storage_base");
  def<&element_address>(m, "element_address");
  def<&extent>(m, "extent");
  def<&exchange_state>(m, "exchange_state");
  PyModule_AddStringConstant(m, "NO_MEMORY", kNoMemory);
  PyModule_AddIntConstant(m, "MAX_WORDS", kMaxWords);
  PyModule_AddIntConstant(m, "MAX_FLOATS", kMaxFloats);
  bind_output_kinds(m);
  Type<OperatorCall>(m, "OperatorCall")
      .init<const std::string&, const std::string&, const py::tuple&, const py::dict&>()
      .def<&OperatorCall::tensors>("tensors")
      .finish();
  Type<HostGraph>(m, "HostGraph")
      .init<size_t>()
      .def_directly<&HostGraph::replay>("replay")
      .def<&HostGraph::add_tensor_argument>("add_tensor_argument")
      .def<&HostGraph::add_value_argument>("add_value_argument")
      .def<&HostGraph::set_name>("set_name")
      .def<&HostGraph::add_fresh>("add_fresh")
      .def<&HostGraph::add_kernel>("add_kernel")
      .def<&HostGraph::add_operator>("add_operator")
      .def<&HostGraph::add_patch>("add_patch")
      .def<&HostGraph::add_output>("add_output")
      .def<&HostGraph::add_exclusive>("add_exclusive")
      .def<&HostGraph::set_order>("set_order")
      .def<&HostGraph::close>("close")
      .finish();
}

} // namespace pygraph

PyMODINIT_FUNC PyInit__pygraph_host() {
  return pygraph::make_module<&pygraph::bind>("_pygraph_host");
}
