// What a replay launches: fused kernels through raw function pointers, and operators through the dispatcher. And what
// stands for tensors while they are recorded.
#pragma once

#include "../native/eager.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

namespace pygraph {

constexpr size_t kMaxWords = 1024;
constexpr size_t kMaxFloats = 8;

// What any access to the memory of a stand-in says, whoever tries: there is nothing behind its address.
constexpr const char* kNoMemory = "the memory of a region that is being captured cannot be read or written";

// A tensor whose element 0 lies at `address`, in a storage of `nbytes` that begins `offset` elements before it. Its
// address is for the functions below alone: `data_ptr()`, and with it every kernel, is refused.
inline Tensor tensor_at(
    uintptr_t address,
    size_t nbytes,
    const std::vector<int64_t>& size,
    const std::vector<int64_t>& stride,
    at::ScalarType dtype,
    int64_t offset) {
  auto meta = c10::scalarTypeToTypeMeta(dtype);
  auto base = address - static_cast<uintptr_t>(offset) * meta.itemsize();
  auto storage = raw_storage(reinterpret_cast<void*>(base), nbytes);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  return tensor_over(storage, DispatchKeySet(DispatchKey::CPU), meta, size, stride, offset);
}

// Copies tensors without their memory. What shared a tensor or a storage still does: operators look at both.
struct Cloner {
  std::unordered_map<c10::TensorImpl*, Tensor> tensors;
  std::unordered_map<StorageImpl*, c10::Storage> storages;

  Tensor operator()(const Tensor& tensor) {
    auto& clone = tensors[tensor.unsafeGetTensorImpl()];
    if (clone.defined()) return clone;
    auto* impl = storage_of(tensor).unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) found = storages.emplace(impl, raw_storage(nullptr, impl->nbytes())).first;
    clone = tensor_over(
        found->second,
        DispatchKeySet(DispatchKey::CPU),
        tensor.dtype(),
        tensor.sizes(),
        tensor.strides(),
        tensor.storage_offset());
    return clone;
  }
};

// Where an address goes when it moves: a word of a kernel, or the storage behind a tensor of an operator.
struct Patch {
  int64_t* word;
  c10::TensorImpl* tensor;
  int64_t delta;

  void apply(uintptr_t address) const {
    auto value = static_cast<int64_t>(address) + delta;
    if (word != nullptr) {
      *word = value;
    } else {
      auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(at::DataPtr(reinterpret_cast<void*>(value), c10::kCPU));
    }
  }
};

struct Launch {
  virtual ~Launch() = default;
  virtual void run() = 0;
  virtual Patch patch(size_t word, int64_t delta) = 0;
};

using Launches = std::vector<std::shared_ptr<Launch>>;

// A loop or a branch. What its other words point to, launches of its bodies are told.
struct Nest final : Launch {
  std::vector<Launches> bodies;
  bool repeats;
  int64_t decides = 0; // the address of a byte, or of a loop's count, limit and stop

  Nest(std::vector<Launches> launches, bool is_loop) : bodies(std::move(launches)), repeats(is_loop) {}

  Patch patch(size_t word, int64_t delta) override {
    TORCH_CHECK(word == 0, "word ", word, " of a loop or branch is for its bodies");
    return {&decides, nullptr, delta};
  }

  void run() override {
    if (repeats) {
      loop(reinterpret_cast<volatile int64_t*>(decides));
    } else if (*reinterpret_cast<const volatile uint8_t*>(decides) != 0) {
      run(0);
    } else if (bodies.size() > 1) {
      run(1);
    }
  }

 private:
  void loop(volatile int64_t* control) const {
    auto looked = std::chrono::steady_clock::now();
    while (control[0] < control[1] && control[2] == 0) {
      run(0);
      __atomic_store_n(control, control[0] + 1, __ATOMIC_RELEASE); // other threads read what the iteration wrote
      if (std::chrono::steady_clock::now() - looked < std::chrono::milliseconds(20)) continue;
      look_at_signals();
      looked = std::chrono::steady_clock::now();
    }
  }

  void run(size_t body) const {
    for (const auto& each : bodies[body]) each->run();
  }

  static void look_at_signals() {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
};

using Invoke = void (*)(void*, const int64_t*, const float*);

// Integers and addresses travel in one register file (the rest on the stack, 8 bytes each), floats in another, on
// x86-64 System V and on AArch64: with at most eight floats, where they stood among the integers makes no difference.
// Arguments in excess are never looked at, so that a few numbers of them serve all.
template <size_t... I>
void invoke(void* kernel, const int64_t* w, const float* f, std::index_sequence<I...>) {
  using Entry = void (*)(
      float, float, float, float, float, float, float, float, decltype(static_cast<void>(I), int64_t())...);
  reinterpret_cast<Entry>(kernel)(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], w[I]...);
}

template <size_t N>
void invoke_n(void* kernel, const int64_t* words, const float* floats) {
  invoke(kernel, words, floats, std::make_index_sequence<N>());
}

inline std::pair<size_t, Invoke> invoker(size_t count) {
  if (count <= 6) return {6, invoke_n<6>};
  if (count <= 16) return {16, invoke_n<16>};
  if (count <= 128) return {128, invoke_n<128>};
  return {kMaxWords, invoke_n<kMaxWords>};
}

struct Kernel final : Launch {
  void* entry;
  Invoke call;
  std::vector<size_t> places; // of each word, in `words`
  std::vector<int64_t> words;
  float floats[kMaxFloats] = {};

  // `is_float[i]`: whether word i is one, in its lower half.
  Kernel(uintptr_t address, const std::vector<uint64_t>& recorded, const std::vector<bool>& is_float)
      : entry(reinterpret_cast<void*>(address)) {
    size_t reals = 0;
    for (size_t i = 0; i < recorded.size(); ++i) {
      places.push_back(words.size());
      if (!is_float.at(i)) {
        words.push_back(static_cast<int64_t>(recorded[i]));
      } else {
        TORCH_CHECK(reals < kMaxFloats, "too many kernel parameters");
        auto bits = static_cast<uint32_t>(recorded[i]);
        std::memcpy(&floats[reals++], &bits, sizeof bits);
      }
    }
    TORCH_CHECK(words.size() <= kMaxWords, "too many kernel parameters");
    size_t passed = 0;
    std::tie(passed, call) = invoker(words.size());
    words.resize(passed, 0);
  }

  void run() override { call(entry, words.data(), floats); }
  Patch patch(size_t word, int64_t delta) override { return {&words.at(places.at(word)), nullptr, delta}; }
};

struct Operator final : Launch {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<Tensor> memory; // one per word: arguments, then results
  std::vector<Tensor> results; // where each returned tensor is copied to; undefined where it is not

  // `moves[i]`: whether the memory of tensor argument i is patched; others are held as they are.
  Operator(
      const OperatorCall& call,
      const std::vector<bool>& moves,
      const std::vector<std::optional<Tensor>>& outputs)
      : op(call.op) {
    Cloner clone;
    auto place = [&](const Tensor& t) {
      memory.push_back(moves.at(memory.size()) ? clone(t) : t);
      return memory.back();
    };
    for (const auto& value : call.stack) stack.push_back(map_tensors(value, place));
    for (const auto& output : outputs) {
      results.push_back(output ? clone(*output) : Tensor());
      if (output) memory.push_back(results.back());
    }
  }

  Patch patch(size_t word, int64_t delta) override {
    const auto& tensor = memory.at(word);
    auto before = static_cast<int64_t>(tensor.storage_offset() * tensor.itemsize());
    return {nullptr, tensor.unsafeGetTensorImpl(), delta - before};
  }

  void run() override {
    c10::impl::ExcludeDispatchKeyGuard guard(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    Stack values; // lists of its own: an operator may change one that it is given
    for (const auto& value : stack) values.push_back(map_tensors(value, [](const Tensor& t) { return t; }));
    op.callBoxed(&values);
    if (results.empty()) return;
    const auto& name = op.schema().name();
    auto returned = tensors_of(values);
    TORCH_CHECK(
        returned.size() == results.size(),
        name, " returned ", returned.size(), " tensors at replay, and ", results.size(), " when captured");
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined()) continue;
      TORCH_CHECK(
          results[i].sizes() == returned[i].sizes() && results[i].dtype() == returned[i].dtype(),
          name, " returned another size or dtype at replay than when captured");
      results[i].copy_(returned[i]);
    }
  }
};

} // namespace pygraph
