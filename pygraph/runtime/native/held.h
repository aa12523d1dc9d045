// What a graph holds, read anew at each call: a tree of containers that a walk has described (graphs/held.py), the tensors in
// it, and which of these share memory. Of the user's, plain values and objects that are not looked into are kept alive.
#pragma once

#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace pygraph {

namespace py = pybind11;

class Held {
 public:
  static constexpr int MODES = 5 + 15 + at::num_sdp_backends + 1; // as `add_modes` adds, and `casts_differ`

  // Of each node, in the order of a walk from the root down: its kind, a value, and a number (see `accepts`).
  explicit Held(const py::iterable& described) {
    for (auto each : described) {
      auto node = each.cast<std::tuple<int, py::object, int64_t>>();
      nodes_.push_back({static_cast<Kind>(std::get<0>(node)), std::get<2>(node), std::get<1>(node)});
    }
    for (const auto& node : nodes_) {
      auto number = static_cast<size_t>(node.number);
      if (node.kind == AGAIN || node.kind == SEEN) {
        auto& again = node.kind == AGAIN ? tensors_again_ : met_again_;
        again.resize(std::max(again.size(), number + 1));
        again[number] = 1;
      }
    }
  }

  // All tensors of a call: those under `root`, their gradients, `arguments` and the gradients of these. None where
  // `root` is no longer as described, or another reading is under way. With them, facts of each and the modes of torch
  // (the last MODES), and which share memory, both as bytes; and, if
  // `containers` are wanted, those of the walk, in its order.
  py::object read(py::handle root, const py::list& arguments, bool containers) {
    std::vector<py::object> given;
    for (auto argument : arguments) given.push_back(py::reinterpret_borrow<py::object>(argument));
    Call call;
    if (!gather(root, given, call)) return py::none();
    if (!facts_object_ || call.facts != told_facts_) {
      told_facts_ = call.facts;
      facts_object_ = py::bytes(call.facts.data(), call.facts.size());
    }
    auto told = facts_object_;
    return py::make_tuple(as_list(call.tensors), std::move(told), std::move(call.shared), kept(containers));
  }

 private:
  friend class Known;
  friend void bind_held(py::module_& m);

  enum Kind { PLAIN, TENSOR, AGAIN, MAPPING, SEQUENCE, OBJECT, SEEN, OTHER };

  // What is read of one call.
  struct Call {
    std::vector<py::object> tensors;
    std::vector<char> facts;
    py::object shared;
  };

  // False where `root` is no longer as described, or another reading is under way.
  bool gather(py::handle root, const std::vector<py::object>& arguments, Call& call) {
    if (busy_) return false;
    Busy busy(busy_);
    auto& [objects, facts, shared] = call;
    objects.reserve(ranges_.size());
    facts.reserve(told_facts_.size());
    if (!matches(root.ptr())) return false;
    ranges_.clear();
    for (auto* tensor : tensors_) objects.push_back(py::reinterpret_borrow<py::object>(tensor));
    auto held = objects.size();
    look_at(objects, 0, facts);
    auto lasting = objects.size();
    objects.insert(objects.end(), arguments.begin(), arguments.end());
    look_at(objects, lasting, facts);
    shared = share(held, lasting);
    add_modes(facts);
    facts.push_back(casts_differ(objects));
    return true;
  }

  // The containers of the reading that was just made, if they are wanted.
  py::list kept(bool wanted) const {
    std::vector<py::object> objects;
    for (auto* container : met_) {
      if (wanted) objects.push_back(py::reinterpret_borrow<py::object>(container));
    }
    return as_list(objects);
  }

  struct Node {
    Kind kind;
    int64_t number;
    py::object value;
  };

  // A word that does not change while what is held has the same structure: the version of a dictionary, its address, a
  // type, a length, the address of an item. It is in memory that is alive if all words before it are as they were.
  struct Word {
    const uintptr_t* at;
    uintptr_t was;
  };

  // Places in the lists of a reading.
  struct Place {
    size_t node, word, tensor, container, mark;
    bool operator==(const Place& other) const {
      return std::tie(node, word, tensor, container, mark) ==
          std::tie(other.node, other.word, other.tensor, other.container, other.mark);
    }
  };

  // A container: what begins with it, and what is behind all that is below it.
  struct Mark {
    PyObject* object;
    Place begin, end;
  };

  // Changes with each change of a dictionary, and no two have the same. Null: not known.
  static const uint64_t* version_of(PyObject* dictionary) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return &reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    return nullptr;
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

  // Collections of garbage call finalisers.
  struct Uncollected {
    bool collects = PyGC_Disable() == 1;
    ~Uncollected() {
      if (collects) PyGC_Enable();
    }
  };

  // One reading. `shallow`: containers that are in their places are not looked into. `again`: one changed, or a tensor,
  // that is also met elsewhere, or is no longer what was met before.
  struct Reading : Place {
    bool shallow = false, again = false, anew = false;

    bool is(PyObject* object, PyObject* before) {
      again |= object != before;
      return object == before;
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

  // Whether what is held is as described: `tensors_` and `met_` have all of it then. Mostly no word has changed.
  bool matches(PyObject* root) {
    Uncollected guard;
    if (!traced_ || PyTuple_GET_SIZE(root) != 1 || PyTuple_GET_ITEM(root, 0) != first_) return matches_anew(root);
    met_[0] = root;
    for (size_t i = 0; i < words_.size(); ++i) {
      if (*words_[i].at == words_[i].was) continue;
      auto mark = std::upper_bound(marks_.begin(), marks_.end(), i, [](size_t word, const Mark& each) {
        return word < each.begin.word;
      });
      do {
        if (mark == marks_.begin()) return matches_anew(root);
      } while ((--mark)->end.word <= i);
      auto [container, begin, end] = *mark;
      i = begin.word;
      Reading part{begin, true};
      traced_ = false;
      if (!descends(container, part)) return part.again && matches_anew(root);
      if (part.again || !(part == end) || *words_[i].at != words_[i].was) return matches_anew(root);
      traced_ = traces_;
    }
    for (auto loose : loose_) {
      Reading part{marks_[loose].begin};
      traced_ = false;
      if (!descends(marks_[loose].object, part)) return part.again && matches_anew(root);
      if (part.again || !(part == marks_[loose].end)) return matches_anew(root);
      traced_ = traces_;
    }
    return true;
  }

  bool matches_anew(PyObject* root) {
    words_.clear(), tensors_.clear(), met_.clear(), marks_.clear(), loose_.clear();
    traced_ = false;
    if (!PyTuple_CheckExact(root) || PyTuple_GET_SIZE(root) != 1) return false;
    traces_ = true;
    first_ = PyTuple_GET_ITEM(root, 0);
    met_.push_back(root);
    Reading now{{1, 0, 0, 1, 0}, false, false, true};
    if (!accepts(first_, now)) return false;
    traced_ = traces_;
    return true;
  }

  template <class T>
  static void put(std::vector<T>& list, size_t& place, T value) {
    if (place == list.size()) {
      list.push_back(std::move(value));
    } else {
      list[place] = std::move(value);
    }
    ++place;
  }

  template <class T>
  void watch(const T& word, Reading& now) {
    static_assert(sizeof word == sizeof(uintptr_t));
    auto* at = reinterpret_cast<const uintptr_t*>(&word);
    put(words_, now.word, {at, *at});
  }

  static void put_object(std::vector<PyObject*>& list, size_t& place, PyObject* object, const std::vector<char>& again,
                         Reading& now) {
    now.again |= place < list.size() && list[place] != object && place < again.size() && again[place];
    put(list, place, object);
  }

  // The object and what is below it, against the next nodes.
  bool accepts(PyObject* object, Reading& now) {
    auto& node = nodes_[now.node];
    auto* value = node.value.ptr();
    switch (node.kind) {
      case PLAIN: // the value
        ++now.node;
        if (!same_value(object, value)) return false;
        if (object != value) node.value = py::reinterpret_borrow<py::object>(object); // so that its address is its own
        return true;
      case TENSOR: // its type
        ++now.node;
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value) return false;
        watch(object->ob_type, now);
        put_object(tensors_, now.tensor, object, tensors_again_, now);
        return true;
      case AGAIN: // the number of a tensor
        ++now.node;
        return now.is(object, tensors_.at(static_cast<size_t>(node.number)));
      case SEEN: // the number of a container
        ++now.node;
        return now.is(object, met_.at(static_cast<size_t>(node.number)));
      case OTHER: // an object that is not looked into
        ++now.node;
        return object == value;
      default:
        break;
    }
    bool known = now.shallow && now.mark < marks_.size() && marks_[now.mark].object == object;
    if (!known || !(marks_[now.mark].begin == now)) return descends(object, now);
    static_cast<Place&>(now) = marks_[now.mark].end; // its words are yet to be looked at
    return true;
  }

  // Python gives no other type to an object of a built-in one.
  static bool keeps_type(PyObject* object) { return PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_IMMUTABLETYPE) != 0; }

  bool descends(PyObject* object, Reading& now) {
    auto number = now.mark;
    put(marks_, now.mark, Mark{object, now, {}});
    const auto& node = nodes_[now.node++];
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != node.value.ptr()) return false;
    if (!keeps_type(object)) watch(object->ob_type, now); // first: other words are where this type has them
    put_object(met_, now.container, object, met_again_, now);
    if (node.kind == OBJECT ? !object_accepts(object, now)
        : node.kind == MAPPING ? !mapping_accepts(object, node.number, now)
                               : !sequence_accepts(object, node.number, now)) {
      return false;
    }
    marks_[number].end = now;
    return true;
  }

  // Its attributes follow.
  bool object_accepts(PyObject* object, Reading& now) {
    auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!attributes) throw py::error_already_set();
    auto** place = _PyObject_GetDictPtr(object);
    if (place != nullptr && *place == attributes.ptr()) {
      watch(*place, now);
    } else {
      traces_ = false;
    }
    return accepts(attributes.ptr(), now);
  }

  // So many entries: the nodes of each key and value follow.
  bool mapping_accepts(PyObject* object, int64_t entries, Reading& now) {
    if (PyDict_GET_SIZE(object) != entries) return false;
    auto* version = version_of(object);
    if (version != nullptr) {
      watch(*version, now);
    } else {
      traces_ = false;
    }
    if (PyODict_Check(object) && entries > 1) { // its order may change with nothing else
      if (now.anew) loose_.push_back(now.mark - 1);
      for (auto each : py::handle(object)) {
        auto* item = PyDict_GetItemWithError(object, each.ptr());
        if (item == nullptr || !accepts(each.ptr(), now) || !accepts(item, now)) return false;
      }
      return true;
    }
    PyObject *key = nullptr, *item = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &item);) {
      if (!accepts(key, now) || !accepts(item, now)) return false;
    }
    return true;
  }

  // A list, tuple, set or queue of so many items: their nodes follow.
  bool sequence_accepts(PyObject* object, int64_t count, Reading& now) {
    if (PyList_Check(object) || PyTuple_Check(object)) {
      if (PySequence_Fast_GET_SIZE(object) != count) return false;
      watch(reinterpret_cast<PyVarObject*>(object)->ob_size, now);
      if (PyList_Check(object)) watch(reinterpret_cast<PyListObject*>(object)->ob_item, now);
      auto** items = PySequence_Fast_ITEMS(object);
      for (int64_t i = 0; i < count; ++i) {
        watch(items[i], now);
        if (!accepts(items[i], now)) return false;
      }
      return true;
    }
    if (PyObject_Size(object) != count) return false;
    if (PyAnySet_Check(object)) {
      watch(reinterpret_cast<PySetObject*>(object)->used, now);
    } else {
      watch(reinterpret_cast<PyVarObject*>(object)->ob_size, now);
    }
    if (count == 0) return true; // as most are
    if (now.anew) loose_.push_back(now.mark - 1);
    for (auto each : py::handle(object)) {
      if (nodes_[now.node].kind != PLAIN) traces_ = false;
      if (!accepts(each.ptr(), now)) return false;
    }
    return true;
  }

  // Facts and ranges of the tensors from `first` on, behind which their gradients are put. One pass: each tensor is read from
  // memory once.
  void look_at(std::vector<py::object>& objects, size_t first, std::vector<char>& facts) {
    std::vector<Tensor> gradients;
    auto end = objects.size();
    for (auto i = first; i < end; ++i) {
      const auto& tensor = THPVariable_Unpack(objects[i].ptr());
      auto* impl = tensor.unsafeGetTensorImpl();
      auto* autograd = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta());
      bool strided = is_strided(*impl);
      bool plain = strided && !impl->key_set().has_any(DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative}));
      bool follows = autograd != nullptr && (autograd->requires_grad_ || autograd->grad_fn_);
      bool leaf = !follows || (autograd->is_view_ ? tensor.is_leaf() : !autograd->grad_fn_);
      bool gradient = autograd != nullptr && leaf && autograd->grad_.defined();
      bool inference = impl->is_inference();
      bool hooked = autograd != nullptr && has_hooks(reinterpret_cast<THPVariable*>(objects[i].ptr()), *autograd);
      facts.push_back(static_cast<char>(follows | leaf << 1 | gradient << 2 | inference << 3 | plain << 4 | hooked << 5));
      ranges_.push_back(strided ? range_of(tensor) : Memory{0, 0, nullptr});
      if (gradient) gradients.push_back(autograd->grad_);
    }
    for (const auto& gradient : gradients) {
      objects.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
      ranges_.push_back(is_strided(*gradient.unsafeGetTensorImpl()) ? range_of(gradient) : Memory{0, 0, nullptr});
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
    facts.push_back(static_cast<char>(context.float32MatmulPrecision()));
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

  // Of a strided tensor.
  static Memory range_of(const Tensor& tensor) {
    auto& impl = *tensor.unsafeGetTensorImpl();
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
  std::vector<char> tensors_again_, met_again_; // by number: one that is met again
  bool busy_ = false;
  // of the last reading, if `traced_`
  bool traced_ = false, traces_ = false;
  PyObject* first_ = nullptr; // what the root has
  std::vector<Word> words_;
  std::vector<PyObject*> tensors_, met_;
  std::vector<Mark> marks_;
  std::vector<size_t> loose_; // marks of containers that no words tell of
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

// Calls that are told from others by nothing: their arguments have one structure and the same plain values, and `Held` reads
// the same facts. Read in one go, where nothing watches the operators of this thread.
class Known {
 public:
  // `described`: the nodes of positional arguments, and then of others, of the kinds PLAIN, TENSOR, MAPPING and SEQUENCE (see
  // `Held`). `facts` and `shared` are as `held` has read them. `hooks`: dictionaries with hooks of the whole process.
  Known(py::object held, const py::iterable& described, py::bytes facts, py::bytes shared, const py::iterable& hooks)
      : object_(std::move(held)), held_(object_.cast<Held&>()), facts_(std::move(facts)), shared_(std::move(shared)) {
    for (auto each : described) {
      auto node = each.cast<std::tuple<int, py::object, Py_ssize_t>>();
      nodes_.push_back({static_cast<Held::Kind>(std::get<0>(node)), std::get<2>(node), std::get<1>(node)});
    }
    for (auto each : hooks) hooks_.push_back(py::reinterpret_borrow<py::object>(each));
  }

  const py::bytes& shared() const { return shared_; }

  // All tensors of a call, and containers, as `Held::read` has them. None where the call is another one.
  py::object read(py::handle root, py::handle args, py::handle kwargs, bool containers) const {
    if (watched()) return py::none();
    std::vector<py::object> arguments;
    arguments.reserve(nodes_.size());
    size_t at = 0;
    if (!accepts(args.ptr(), at, arguments) || !accepts(kwargs.ptr(), at, arguments)) return py::none();
    Held::Call call;
    if (!held_.gather(root, arguments, call)) return py::none();
    if (!same(facts_, call.facts.data(), call.facts.size())) return py::none();
    auto* shared = call.shared.ptr();
    if (!same(shared_, PyBytes_AS_STRING(shared), static_cast<size_t>(PyBytes_GET_SIZE(shared)))) return py::none();
    auto kept = held_.kept(containers);
    return py::make_tuple(Held::as_list(call.tensors), std::move(kept));
  }

 private:
  static bool same(const py::bytes& told, const char* now, size_t count) {
    auto* then = told.ptr();
    return static_cast<size_t>(PyBytes_GET_SIZE(then)) == count && std::memcmp(PyBytes_AS_STRING(then), now, count) == 0;
  }

  // Whether something has to see each operator of this call, as `_is_watched` of Python says; function modes are left to
  // Python, and function transforms to the region, which is not replayed under one.
  bool watched() const {
    auto any = [](const py::object& hooks) { return PyDict_GET_SIZE(hooks.ptr()) != 0; };
    return c10::impl::TorchDispatchModeTLS::any_modes_set() || at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
        torch::jit::tracer::isTracing() ||
        !at::SavedTensorDefaultHooks::get_tls_state().stack.empty() || torch::autograd::AnomalyMode::is_enabled() ||
        torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr || std::any_of(hooks_.begin(), hooks_.end(), any);
  }

  bool accepts(PyObject* object, size_t& at, std::vector<py::object>& tensors) const {
    const auto& [kind, number, value] = nodes_[at++];
    if (kind == Held::PLAIN) return Held::same_value(object, value.ptr());
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != value.ptr()) return false;
    if (kind == Held::TENSOR) {
      tensors.push_back(py::reinterpret_borrow<py::object>(object));
      return true;
    }
    if (kind == Held::MAPPING) {
      if (PyDict_GET_SIZE(object) != number) return false;
      PyObject *key = nullptr, *item = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &item);) {
        if (!accepts(key, at, tensors) || !accepts(item, at, tensors)) return false;
      }
      return true;
    }
    if (PySequence_Fast_GET_SIZE(object) != number) return false;
    for (Py_ssize_t i = 0; i < number; ++i) {
      if (!accepts(PySequence_Fast_GET_ITEM(object, i), at, tensors)) return false;
    }
    return true;
  }

  struct Node {
    Held::Kind kind;
    Py_ssize_t number;
    py::object value;
  };

  py::object object_;
  Held& held_;
  std::vector<Node> nodes_;
  py::bytes facts_, shared_;
  std::vector<py::object> hooks_;
};

inline void bind_held(py::module_& m) {
  py::class_<Held>(m, "Held", py::module_local())
      .def(py::init<const py::iterable&>())
      .def("read", &Held::read)
      .def_static("keep_casts", &Held::keep_casts)
      .def_property_readonly_static("MODES", [](const py::object&) { return Held::MODES; })
      .def("known", [](py::object held, const py::iterable& described, py::bytes facts, py::bytes shared, const py::iterable& hooks) {
        return Known(std::move(held), described, std::move(facts), std::move(shared), hooks);
      });
  py::class_<Known>(m, "Known", py::module_local())
      .def("read", &Known::read)
      .def_property_readonly("shared", &Known::shared);
}

} // namespace pygraph
