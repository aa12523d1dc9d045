// The kinds of nodes that are patched: one struct each, which mirrors a class of nodes.py. A node of an instantiated graph
// holds the parameters that it was last set to.
#pragma once

#include "driver_api.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pygraph {

namespace py = pybind11;

struct Node {
  CUgraphNode handle;
  size_t segment; // that it is in
  bool dirty = false;

  Node(uintptr_t node, size_t place) : handle(reinterpret_cast<CUgraphNode>(node)), segment(place) {}
  virtual ~Node() = default;
  // Sets the address at `place`: a byte of the parameter buffer, or the number of an operand.
  virtual void write(size_t place, uintptr_t address) = 0;
  // Hands the parameters to an instance of the graph, which may refuse them.
  virtual CUresult apply(CUgraphExec graph) const = 0;
  // Hands them to the graph itself, for instances to come.
  virtual CUresult set() const = 0;
};

struct KernelNode final : Node {
  CUDA_KERNEL_NODE_PARAMS params{};
  std::string blob;
  std::vector<void*> pointers;

  KernelNode(uintptr_t node, size_t place, std::string bytes, const std::vector<std::pair<size_t, size_t>>& layout)
      : Node(node, place), blob(std::move(bytes)) {
    const auto& api = DriverApi::get();
    api.check(api.kernel_params(handle, &params), "a kernel node cannot be read");
    for (const auto& [offset, nbytes] : layout) {
      TORCH_CHECK(offset + nbytes <= blob.size(), "a parameter lies outside of its buffer");
      pointers.push_back(blob.data() + offset);
    }
    params.kernelParams = pointers.data();
    params.extra = nullptr;
  }

  void write(size_t place, uintptr_t address) override {
    TORCH_CHECK(place + sizeof address <= blob.size(), "a slot lies outside of the parameters");
    std::memcpy(blob.data() + place, &address, sizeof address);
  }

  CUresult apply(CUgraphExec graph) const override {
    return DriverApi::get().patch_kernel(graph, handle, &params);
  }
  CUresult set() const override { return DriverApi::get().set_kernel(handle, &params); }
};

struct CopyNode final : Node {
  CUDA_MEMCPY3D params{};
  CUcontext context = nullptr;

  CopyNode(uintptr_t node, size_t place) : Node(node, place) {
    const auto& api = DriverApi::get();
    api.check(api.copy_params(handle, &params), "a copy node cannot be read");
    api.check(api.current_context(&context), "no CUDA context");
    params.dstDevice += params.dstXInBytes;
    params.srcDevice += params.srcXInBytes;
    params.dstXInBytes = params.srcXInBytes = 0;
  }

  void write(size_t place, uintptr_t address) override { (place == 0 ? params.dstDevice : params.srcDevice) = address; }
  CUresult apply(CUgraphExec graph) const override {
    return DriverApi::get().patch_copy(graph, handle, &params, context);
  }
  CUresult set() const override { return DriverApi::get().set_copy(handle, &params); }
};

struct FillNode final : Node {
  CUDA_MEMSET_NODE_PARAMS params{};
  CUcontext context = nullptr;

  FillNode(uintptr_t node, size_t place) : Node(node, place) {
    const auto& api = DriverApi::get();
    api.check(api.fill_params(handle, &params), "a fill node cannot be read");
    api.check(api.current_context(&context), "no CUDA context");
  }

  void write(size_t, uintptr_t address) override { params.dst = address; }
  CUresult apply(CUgraphExec graph) const override {
    return DriverApi::get().patch_fill(graph, handle, &params, context);
  }
  CUresult set() const override { return DriverApi::get().set_fill(handle, &params); }
};

// How Python makes a node of each kind: its handle, the segment that it is in, and its own facts.
inline void bind_nodes(py::module_& m) {
  using Layout = std::vector<std::pair<size_t, size_t>>;
  py::class_<Node, std::shared_ptr<Node>>(m, "Node");
  py::class_<KernelNode, Node, std::shared_ptr<KernelNode>>(m, "KernelNode")
      .def(py::init([](uintptr_t handle, size_t segment, const py::bytes& blob, const Layout& layout) {
        return std::make_shared<KernelNode>(handle, segment, std::string(blob), layout);
      }));
  py::class_<CopyNode, Node, std::shared_ptr<CopyNode>>(m, "CopyNode").def(py::init<uintptr_t, size_t>());
  py::class_<FillNode, Node, std::shared_ptr<FillNode>>(m, "FillNode").def(py::init<uintptr_t, size_t>());
}

// A place that an address was baked into: `delta` bytes behind where its source begins.
struct Patch {
  Node* node;
  size_t place;
  int64_t delta;
};

} // namespace pygraph
