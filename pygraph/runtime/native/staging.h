// Arguments that copies at a fixed address stand for, so that nothing is patched where they move.
#pragma once

#include "arguments.h"

#include <optional>
#include <utility>
#include <vector>

namespace pygraph {

// The memory that one argument is copied to before each replay.
struct Staged {
  size_t argument;
  at::DataPtr memory;
  uintptr_t address;
};

template <DispatchKey backend>
class Staging {
 public:
  bool empty() const { return staged_.empty(); }
  void clear() { staged_.clear(); }

  // Memory from `hold(nbytes)` for these arguments, instead of those so far, and how many bytes that is; nothing, with
  // nothing changed, where there is no memory.
  template <typename F>
  std::optional<size_t> replace(const Arguments<backend>& arguments, const std::vector<size_t>& positions, F&& hold) {
    for (auto i : positions) {
      TORCH_CHECK(i < arguments.size() && arguments[i].stageable(), "no copy can stand for argument ", i);
    }
    std::vector<Staged> chosen;
    size_t held = 0;
    try {
      for (auto i : positions) {
        auto nbytes = arguments[i].nbytes + arguments[i].alignment;
        at::DataPtr memory = hold(nbytes);
        auto address = arguments[i].next_place(reinterpret_cast<uintptr_t>(memory.get()));
        chosen.push_back({i, std::move(memory), address});
        held += nbytes;
      }
    } catch (const c10::OutOfMemoryError&) {
      return std::nullopt;
    }
    staged_ = std::move(chosen);
    return held;
  }

  // Has `copy(to, from, nbytes)` fill the copies, and `call` use them. An argument that may share memory with a written
  // one is used where it lies, as it may change under way.
  template <typename F>
  void use(const Arguments<backend>& arguments, Operands& call, F&& copy) const {
    for (const auto& [i, memory, address] : staged_) {
      if (arguments.shares_with_written(call, i)) continue;
      auto from = reinterpret_cast<const void*>(call.addresses[i]);
      copy(reinterpret_cast<void*>(address), from, arguments[i].nbytes);
      call.addresses[i] = address;
    }
  }

 private:
  std::vector<Staged> staged_;
};

} // namespace pygraph
