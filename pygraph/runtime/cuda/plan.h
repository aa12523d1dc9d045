// What a region is made of: outputs, sources of addresses, memory, segments. How they are replayed is region.h's.
#pragma once

#include "nodes.h"
#include "tensors.h"

#include <c10/core/StorageImpl.h>

#include <utility>
#include <vector>

namespace pygraph {

enum class OutputKind { argument, view, fresh, object, same };

struct OutputSpec {
  OutputKind kind;
  int64_t index, offset;
  std::vector<int64_t> size, stride;
  caffe2::TypeMeta dtype;
  py::object object;
};

// A provider of one address, and every place that it was baked into.
struct Source {
  uintptr_t address = 0;
  bool known = false;
  std::vector<Patch> patches;
};

// Memory that is taken when a segment is launched: an output's, which stays, or an intermediate's, up to a segment.
struct Memory {
  size_t source, nbytes;
  size_t died = 0; // intermediates only
};

// A part of the region that is launched on its own. The first is torch's graph itself; others are owned.
struct Segment {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  size_t workspace = 0, source = 0;
  std::vector<Memory> fresh, blocks; // taken before it is launched
  std::vector<size_t> dead; // arguments that are not needed once it was launched
  std::vector<Node*> dirty;
};

// What lives for one replay only. `held` keeps the arguments' tensors alive.
struct Call {
  c10::SmallVector<py::object, 32> held;
  c10::SmallVector<const Tensor*, 32> tensors; // by argument; null for Python values
  std::vector<std::pair<size_t, at::DataPtr>> blocks; // with the segment that they die in
  c10::SmallVector<uintptr_t, 32> addresses;
  c10::SmallVector<size_t, 4> misaligned;
  std::vector<at::DataPtr> temporaries;
  c10::SmallVector<c10::Storage, 8> fresh; // in the order in which they were added
};

} // namespace pygraph
