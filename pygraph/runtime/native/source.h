// Where an address of a captured region comes from at each replay.
#pragma once

#include <cstdint>
#include <vector>

namespace pygraph {

// A provider of one address, and every place that it was baked into. What a place is, is the driver's.
template <typename Patch>
struct Source {
  uintptr_t address = 0;
  bool known = false;
  std::vector<Patch> patches;

  // Hands each place to `write` where the address is another than the last time.
  template <typename F>
  void move_to(uintptr_t to, F&& write) {
    if (known && address == to) return;
    for (const auto& patch : patches) write(patch);
    address = to;
    known = true;
  }
};

} // namespace pygraph
