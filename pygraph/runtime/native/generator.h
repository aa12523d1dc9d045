// The state of a generator, replaced in one step: no other thread draws in between.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <mutex>
#include <optional>

namespace pygraph {

// Sets the state to `to`, if it is `expected` or nothing is expected. Returns the state that it had before.
inline at::Tensor exchange_state(
    at::Generator generator, const at::Tensor& to, const std::optional<at::Tensor>& expected) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto before = generator.get_state();
  auto same = !expected ||
      (expected->nbytes() == before.nbytes() &&
       std::memcmp(expected->const_data_ptr(), before.const_data_ptr(), before.nbytes()) == 0);
  if (same) generator.set_state(to);
  return before;
}

} // namespace pygraph
