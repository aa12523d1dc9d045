// What a graph holds, read anew at each call: a tree of containers that a walk has described (graphs/held.py), the tensors in
// it, and which of these share memory. Of the user's, plain values and objects that are not looked into are kept alive.
#pragma once

#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace pygraph {

namespace py = pybind11;

class Held {
 public:
  static constexpr int MODES = 5 + 14 + at::num_sdp_backends + 1; // as `add_modes` adds, and `casts_differ`

  // Of each node, in the order of a walk from the root down: its kind, a value, and a number (see `accepts`).
  explicit Held(const py::iterable& described) {
    for (auto each : described) {
      auto node = each.cast<std::tuple<int, py::object, int64_t>>();
      auto kind = static_cast<Kind>(std::get<0>(node));
      nodes_.push_back({kind, static_cast<int32_t>(mappings_.size()), std::get<2>(node), std::get<1>(node)});
      if (kind == MAPPING) mappings_.emplace_back();
    }
  }

  // All tensors of a call: those under `root`, their gradients, `arguments` and the gradients of these. None where
  // `root` is no longer as described, or another reading is under way. With them, facts of each and the modes of torch
  // (the last MODES), and which share memory, both as bytes; and, if
  // `containers` are wanted, those of the walk, in its order.
  py::object read(py::handle root, const py::list& arguments, bool containers) {
    if (busy_) return py::none();
    Busy busy(busy_);
    Reading now;
    now.containers_wanted = containers;
    now.objects.reserve(ranges_.size());
    now.containers.reserve(containers_);
    if (!accepts(root.ptr(), now)) return py::none();
    containers_ = now.containers.size();
    auto held = now.objects.size();
    std::vector<char> facts;
    facts.reserve(told_facts_.size());
    add_gradients(now, 0, facts);
    auto lasting = now.objects.size();
    for (auto argument : arguments) now.objects.push_back(py::reinterpret_borrow<py::object>(argument));
    add_gradients(now, lasting, facts);
    ranges_.clear();
    for (const auto& object : now.objects) ranges_.push_back(range_of(THPVariable_Unpack(object.ptr())));
    auto shared = share(held, lasting);
    add_modes(facts);
    facts.push_back(casts_differ(now.objects));
    if (!facts_object_ || facts != told_facts_) {
      told_facts_ = facts;
      facts_object_ = py::bytes(facts.data(), facts.size());
    }
    auto told = facts_object_;
    return py::make_tuple(as_list(now.objects), std::move(told), std::move(shared), as_list(now.kept));
  }

 private:
  friend void bind_held(py::module_& m);

  enum Kind { PLAIN, TENSOR, AGAIN, MAPPING, SEQUENCE, OBJECT, SEEN, OTHER };

  struct Node {
    Kind kind;
    int32_t mapping; // its number among mappings
    int64_t number;
    py::object value;
  };

  // A key or value of a mapping that has to be looked at though the mapping is as it was: by its node, or, where it is
  // an empty dictionary, by its type.
  struct Below {
    PyObject* object;
    PyTypeObject* empty;
    size_t node;
  };

  // A mapping as it was when it was last looked at. `end`: the node behind all that is below it.
  struct Mapping {
    uint64_t version = 0;
    size_t end = 0;
    std::vector<Below> below = {};
  };

  // Changes with each change of a dictionary, and no two have the same. 0: not known.
  static uint64_t version_of(PyObject* dictionary) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    return 0;
#endif
  }

  struct Memory {
    uintptr_t begin, end;
    StorageImpl* storage;
    bool operator==(const Memory& other) const {
      return begin == other.begin && end == other.end && storage == other.storage;
    }
  };

  // Finalisers may run while something is read, and begin another reading.
  struct Busy {
    explicit Busy(bool& busy) : busy(busy) { busy = true; }
    ~Busy() { busy = false; }
    bool& busy;
  };

  // One reading.
  struct Reading {
    size_t node = 0; // one behind the last is never reached: counts of children agree
    bool containers_wanted = false;
    std::vector<py::object> objects, kept;
    std::vector<PyObject*> containers;

    void meet(PyObject* container) {
      containers.push_back(container);
      if (containers_wanted) kept.push_back(py::reinterpret_borrow<py::object>(container));
    }
  };

  static py::list as_list(std::vector<py::object>& objects) {
    py::list made(objects.size());
    for (size_t i = 0; i < objects.size(); ++i) {
      PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), objects[i].release().ptr());
    }
    return made;
  }

  static bool same_value(PyObject* now, PyObject* then) {
    if (now == then) return true;
    if (Py_TYPE(now) != Py_TYPE(then)) return false;
    if (PyFloat_CheckExact(now)) {
      double a = PyFloat_AS_DOUBLE(now), b = PyFloat_AS_DOUBLE(then);
      return std::memcmp(&a, &b, sizeof a) == 0;
    }
    return (PyLong_CheckExact(now) || PyUnicode_CheckExact(now)) && PyObject_RichCompareBool(now, then, Py_EQ) == 1;
  }

  // Whether that takes no more than a look at the object: most nodes are like that.
  bool at_once(PyObject* object, Reading& now) const {
    const auto& node = nodes_[now.node];
    auto* value = node.value.ptr();
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    bool known = node.kind == PLAIN || node.kind == OTHER
        ? object == value
        : node.kind == MAPPING && node.number == 0 && type == value && PyDict_GET_SIZE(object) == 0;
    if (!known) return false;
    ++now.node;
    if (node.kind == MAPPING) now.meet(object);
    return true;
  }

  // The object and what is below it, against the next nodes. What is compared by its address is alive in its place now.
  bool accepts(PyObject* object, Reading& now) {
    const auto& node = nodes_[now.node++];
    auto* value = node.value.ptr();
    switch (node.kind) {
      case PLAIN: // the value
        return same_value(object, value);
      case TENSOR: // its type
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value) return false;
        now.objects.push_back(py::reinterpret_borrow<py::object>(object));
        return true;
      case AGAIN: // the number of a tensor
        return object == now.objects.at(static_cast<size_t>(node.number)).ptr();
      case SEEN: // the number of a container
        return object == now.containers.at(static_cast<size_t>(node.number));
      case MAPPING: { // its type, and how many entries it has: the nodes of each key and value follow
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value || PyDict_GET_SIZE(object) != node.number) return false;
        now.meet(object);
        auto version = version_of(object);
        auto& mapping = mappings_[static_cast<size_t>(node.mapping)];
        if (version != 0 && version == mapping.version) {
          for (const auto& below : mapping.below) {
            if (below.empty != nullptr) {
              if (Py_TYPE(below.object) != below.empty || PyDict_GET_SIZE(below.object) != 0) return false;
              now.meet(below.object);
              continue;
            }
            now.node = below.node;
            if (!accepts(below.object, now)) return false;
          }
          now.node = mapping.end;
          return true;
        }
        mapping.version = 0;
        mapping.below.clear();
        PyObject *key = nullptr, *item = nullptr;
        if (PyODict_Check(object) && node.number > 1) { // its order may change with nothing else
          for (auto each : py::handle(object)) {
            item = PyDict_GetItemWithError(object, each.ptr());
            if (item == nullptr || !accepts(each.ptr(), now) || !accepts(item, now)) return false;
          }
          return true;
        }
        for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &item);) {
          for (auto* each : {key, item}) {
            auto at = now.node;
            if (!at_once(each, now) && !accepts(each, now)) return false;
            const auto& met = nodes_[at];
            if (met.kind == PLAIN || met.kind == OTHER) continue;
            auto* empty = met.kind == MAPPING && met.number == 0 ? Py_TYPE(each) : nullptr;
            mapping.below.push_back({each, empty, at});
          }
        }
        mapping.version = version;
        mapping.end = now.node;
        return true;
      }
      case SEQUENCE: { // a list's, tuple's, set's or queue's type and length
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value) return false;
        if (!PyList_Check(object) && !PyTuple_Check(object)) {
          if (PyObject_Size(object) != node.number) return false;
          now.meet(object);
          if (node.number == 0) return true; // as most are
          for (auto each : py::handle(object)) {
            if (!accepts(each.ptr(), now)) return false;
          }
          return true;
        }
        if (PySequence_Fast_GET_SIZE(object) != node.number) return false;
        now.meet(object);
        for (Py_ssize_t i = 0; i < node.number; ++i) {
          if (!accepts(PySequence_Fast_GET_ITEM(object, i), now)) return false;
        }
        return true;
      }
      case OBJECT: { // its type: its attributes follow
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value) return false;
        now.meet(object);
        auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
        if (!attributes) throw py::error_already_set();
        return accepts(attributes.ptr(), now);
      }
      case OTHER: // an object that is not looked into
        return object == value;
    }
    return false;
  }

  // Facts of the tensors from `first` on, behind which their gradients are put.
  static void add_gradients(Reading& now, size_t first, std::vector<char>& facts) {
    auto end = now.objects.size();
    for (auto i = first; i < end; ++i) {
      const auto& tensor = THPVariable_Unpack(now.objects[i].ptr());
      auto* impl = tensor.unsafeGetTensorImpl();
      auto* autograd = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
      bool plain = is_strided(*impl) && !impl->key_set().has_any(DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative}));
      bool follows = autograd != nullptr && (autograd->requires_grad_ || autograd->grad_fn_);
      bool leaf = !follows || (autograd->is_view_ ? tensor.is_leaf() : !autograd->grad_fn_);
      bool gradient = autograd != nullptr && leaf && autograd->grad_.defined();
      bool inference = impl->is_inference();
      bool hooked = autograd != nullptr && has_hooks(reinterpret_cast<THPVariable*>(now.objects[i].ptr()), *autograd);
      facts.push_back(static_cast<char>(follows | leaf << 1 | gradient << 2 | inference << 3 | plain << 4 | hooked << 5));
      if (gradient) now.objects.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(autograd->grad_)));
    }
  }

  // Whether a backward pass calls something of the user's for this tensor.
  static bool has_hooks(const THPVariable* tensor, torch::autograd::AutogradMeta& autograd) {
    auto any = [](PyObject* hooks) { return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) != 0; };
    if (any(tensor->backward_hooks) || any(tensor->post_accumulate_grad_hooks) || autograd.cpp_hooks_list_) return true;
    auto node = autograd.grad_accumulator_.lock();
    return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
  }

  // What decides, besides tensors, what operators do.
  static void add_modes(std::vector<char>& facts) {
    facts.push_back(at::GradMode::is_enabled());
    facts.push_back(c10::InferenceMode::is_enabled());
    for (auto device : {at::kCPU, at::kCUDA}) {
      bool casts = at::autocast::is_autocast_enabled(device);
      facts.push_back(casts ? static_cast<char>(at::autocast::get_autocast_dtype(device)) : -1);
    }
    facts.push_back(static_cast<char>(at::get_default_dtype_as_scalartype()));
    auto& context = at::globalContext();
    for (bool flag : {context.deterministicAlgorithms(), context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
                      context.userEnabledMathSDP(), context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP(),
                      context.allowFP16BF16ReductionMathSDP(), context.userEnabledCuDNN(), context.deterministicCuDNN(),
                      context.benchmarkCuDNN(), context.userEnabledMkldnn()}) {
      facts.push_back(flag);
    }
    facts.push_back(static_cast<char>(context.allowFP16ReductionCuBLAS()));
    facts.push_back(static_cast<char>(context.allowBF16ReductionCuBLAS()));
    facts.push_back(context.allowFP16AccumulationCuBLAS());
    for (auto backend : context.sDPPriorityOrder()) facts.push_back(static_cast<char>(backend));
  }

  // Whether a leaf has been written, or replaced, since a graph met it in this context of autocast, which then may use a
  // cast that it has kept. All that it keeps goes when its outermost context ends: so does the cast of `Casts::mark`.
  static bool casts_differ(const std::vector<py::object>& objects) {
    bool casts = at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA);
    if (!casts || !at::autocast::is_autocast_cache_enabled()) return false;
    if (!keep_casts()) casts_.met.clear();
    bool differ = casts_.met.size() > 65536;
    for (const auto& object : objects) {
      const auto& tensor = THPVariable_Unpack(object.ptr());
      if (tensor.scalar_type() != at::kFloat || !tensor.requires_grad() || !tensor.is_leaf()) continue;
      auto* impl = tensor.unsafeGetTensorImpl();
      if (!is_strided(*impl)) continue;
      std::pair<uint32_t, uintptr_t> state{impl->version_counter().current_version(), address(tensor)};
      differ |= casts_.met.emplace(impl, state).first->second != state;
    }
    return differ;
  }

  // Has autocast keep a cast of the mark. Whether it kept the last one still.
  static bool keep_casts() {
    c10::InferenceMode plain(false);
    at::NoGradGuard guard;
    if (!casts_.mark.defined()) casts_.mark = at::zeros({1}, at::kFloat).requires_grad_();
    auto cast = at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), casts_.mark, at::kCPU);
    bool kept = cast.is_same(casts_.cast);
    casts_.cast = std::move(cast);
    return kept;
  }

  static bool is_strided(const c10::TensorImpl& tensor) {
    constexpr DispatchKeySet odd({DispatchKey::NestedTensor, DispatchKey::ZeroTensor});
    return !tensor.key_set().has_any(odd) && tensor.layout() == at::kStrided && tensor.has_storage();
  }

  static Memory range_of(const Tensor& tensor) {
    auto& impl = *tensor.unsafeGetTensorImpl();
    if (!is_strided(impl)) return {0, 0, nullptr};
    auto elements = impl.numel();
    if (elements != 0 && !impl.is_contiguous()) {
      elements = 1;
      for (int64_t i = 0; i < impl.dim(); ++i) elements += (impl.sizes()[i] - 1) * impl.strides()[i];
    }
    auto begin = address(tensor);
    auto nbytes = static_cast<uintptr_t>(elements) * impl.itemsize();
    return {begin, begin + nbytes, nbytes == 0 ? nullptr : impl.unsafe_storage().unsafeGetStorageImpl()};
  }

  // Which tensors overlap, or, of those that are held, share a storage. Of each group of such: how many these are, how
  // many bytes from the first to the last, and, for each, its number and how far behind the first byte it begins.
  py::object share(size_t held, size_t lasting) {
    bool as_before = ranges_.size() >= lasting && last_held_ == held && last_.size() == lasting &&
        std::equal(last_.begin(), last_.end(), ranges_.begin());
    if (as_before && alone(lasting)) return shared_lasting_;
    py::object shared = as_bytes(groups(ranges_.size(), held));
    if (as_before) return shared;
    last_.assign(ranges_.begin(), ranges_.begin() + static_cast<ptrdiff_t>(lasting));
    last_held_ = held;
    merged_.clear();
    for (const auto& each : last_) {
      if (each.begin != each.end) merged_.push_back({each.begin, each.end});
    }
    std::sort(merged_.begin(), merged_.end());
    size_t count = 0;
    for (const auto& each : merged_) {
      if (count != 0 && each.first < merged_[count - 1].second) {
        merged_[count - 1].second = std::max(merged_[count - 1].second, each.second);
      } else {
        merged_[count++] = each;
      }
    }
    merged_.resize(count);
    shared_lasting_ = alone(lasting) ? shared : py::object(as_bytes(groups(lasting, held)));
    return shared;
  }

  // Whether the tensors from `first` on overlap nothing.
  bool alone(size_t first) const {
    for (auto i = first; i < ranges_.size(); ++i) {
      const auto& range = ranges_[i];
      if (range.begin == range.end) continue;
      auto next = std::upper_bound(merged_.begin(), merged_.end(), std::make_pair(range.end - 1, UINTPTR_MAX));
      if (next != merged_.begin() && std::prev(next)->second > range.begin) return false;
      for (auto j = first; j < i; ++j) {
        if (ranges_[j].begin < range.end && range.begin < ranges_[j].end) return false;
      }
    }
    return true;
  }

  using Groups = std::map<size_t, std::vector<size_t>>; // by the first member

  // Neighbours in memory that overlap, or, of those that are held, share a storage. They mostly lie as they did before.
  Groups groups(size_t count, size_t held) {
    std::vector<size_t> order;
    order.reserve(count);
    std::vector<bool> known(count);
    for (auto i : order_) {
      if (i < count) order.push_back(i), known[i] = true;
    }
    for (size_t i = 0; i < count; ++i) {
      if (!known[i]) order.push_back(i);
    }
    auto behind = [&](size_t a, size_t b) { return ranges_[a].begin > ranges_[b].begin; };
    size_t moves = 0;
    for (size_t i = 1; i < count && moves <= 8 * count; ++i) {
      for (auto j = i; j > 0 && behind(order[j - 1], order[j]); --j, ++moves) std::swap(order[j - 1], order[j]);
    }
    if (moves > 8 * count) std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return behind(b, a); });
    Groups found;
    std::vector<size_t> group;
    uintptr_t end = 0;
    StorageImpl* storage = nullptr;
    auto close = [&] {
      if (group.size() > 1) found[*std::min_element(group.begin(), group.end())] = group;
      group.clear();
    };
    for (auto i : order) {
      const auto& range = ranges_[i];
      if (range.begin == range.end) continue;
      if (range.begin >= end && (i >= held || range.storage != storage)) close();
      group.push_back(i);
      end = std::max(end, range.end);
      storage = i < held ? range.storage : nullptr;
    }
    close();
    if (count == ranges_.size()) order_ = std::move(order);
    return found;
  }

  py::bytes as_bytes(const Groups& groups) const {
    std::vector<int64_t> numbers;
    for (const auto& [first, members] : groups) {
      uintptr_t begin = UINTPTR_MAX, end = 0;
      for (auto i : members) begin = std::min(begin, ranges_[i].begin), end = std::max(end, ranges_[i].end);
      numbers.insert(numbers.end(), {static_cast<int64_t>(members.size()), static_cast<int64_t>(end - begin)});
      auto ordered = members;
      std::sort(ordered.begin(), ordered.end());
      for (auto i : ordered) {
        numbers.insert(numbers.end(), {static_cast<int64_t>(i), static_cast<int64_t>(ranges_[i].begin - begin)});
      }
    }
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
  }

  // Leaves that were met in the present context of autocast: versions and addresses.
  struct Casts {
    Tensor mark, cast;
    std::map<const c10::TensorImpl*, std::pair<uint32_t, uintptr_t>> met;
  };

  inline static Casts& casts_ = *new Casts; // outlives the interpreter, as tensors may not
  std::vector<Node> nodes_;
  std::vector<Mapping> mappings_;
  bool busy_ = false;
  size_t containers_ = 0; // that the last reading met
  std::vector<Memory> ranges_; // of the call that is read
  // of the last one
  std::vector<char> told_facts_;
  py::object facts_object_;
  std::vector<size_t> order_; // of the tensors of a call, as they lie in memory
  std::vector<Memory> last_; // of what is held, and its gradients
  size_t last_held_ = SIZE_MAX;
  std::vector<std::pair<uintptr_t, uintptr_t>> merged_; // the same, in order, those that overlap in one
  py::object shared_lasting_;
};

inline void bind_held(py::module_& m) {
  py::class_<Held>(m, "Held", py::module_local())
      .def(py::init<const py::iterable&>())
      .def("read", &Held::read)
      .def_static("keep_casts", &Held::keep_casts)
      .def_property_readonly_static("MODES", [](const py::object&) { return Held::MODES; });
}

} // namespace pygraph
