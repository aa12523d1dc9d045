// What a region is made of: memory, segments, and what one call of it holds. How they are replayed is region.h's.
#pragma once

#include "../native/region.h"
#include "nodes.h"

#include <utility>
#include <vector>

namespace pygraph {

// Memory that is taken when a segment is launched: an output's, which stays, or an intermediate's, up to a segment.
struct Memory {
  size_t source, nbytes;
  size_t died = 0; // intermediates only
};

// A part of the region that is launched on its own. The first is torch's graph itself; others are owned. `pieces` are its
// workspace.
struct Segment {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  std::vector<Memory> pieces, fresh, blocks; // taken before it is launched
  std::vector<size_t> dead; // arguments that are not needed once it was launched
  std::vector<Node*> dirty;
};

// A segment's workspace, in pieces, while it is launched.
using Workspace = c10::SmallVector<at::DataPtr, 4>;

// What lives for one replay only.
struct Call : Operands {
  std::vector<std::pair<size_t, at::DataPtr>> blocks; // with the segment that they die in
  c10::SmallVector<c10::Storage, 8> fresh; // in the order in which they were added
};

} // namespace pygraph
