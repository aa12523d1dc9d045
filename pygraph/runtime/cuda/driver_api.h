// The CUDA driver's functions that are called natively, found at run time: nothing has to be linked with libcuda.
#pragma once

#include <c10/util/Exception.h>
#include <cuda.h>
#include <dlfcn.h>

#include <optional>
#include <string>

namespace pygraph {

#define PYGRAPH_TEXT_(name) #name
#define PYGRAPH_TEXT(name) PYGRAPH_TEXT_(name)
// `cuda.h` renames functions to their newest version by macros, so that the text of a name is the versioned one.
#define PYGRAPH_DRIVER(member, name) decltype(&::name) member = find<decltype(&::name)>(PYGRAPH_TEXT(name))

class DriverApi {
 public:
  static const DriverApi& get() {
    static const DriverApi api;
    return api;
  }

  template <typename F>
  static F find(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, "libcuda.so.1 cannot be loaded");
    auto* found = dlsym(library, name);
    TORCH_CHECK(found != nullptr, "this CUDA driver has no ", name);
    return reinterpret_cast<F>(found);
  }

  PYGRAPH_DRIVER(kernel_params, cuGraphKernelNodeGetParams);
  PYGRAPH_DRIVER(copy_params, cuGraphMemcpyNodeGetParams);
  PYGRAPH_DRIVER(fill_params, cuGraphMemsetNodeGetParams);
  PYGRAPH_DRIVER(patch_kernel, cuGraphExecKernelNodeSetParams);
  PYGRAPH_DRIVER(patch_copy, cuGraphExecMemcpyNodeSetParams);
  PYGRAPH_DRIVER(patch_fill, cuGraphExecMemsetNodeSetParams);
  PYGRAPH_DRIVER(set_kernel, cuGraphKernelNodeSetParams);
  PYGRAPH_DRIVER(set_copy, cuGraphMemcpyNodeSetParams);
  PYGRAPH_DRIVER(set_fill, cuGraphMemsetNodeSetParams);
  PYGRAPH_DRIVER(instantiate, cuGraphInstantiate);
  PYGRAPH_DRIVER(nodes, cuGraphGetNodes);
  PYGRAPH_DRIVER(capture_info, cuStreamGetCaptureInfo);
  PYGRAPH_DRIVER(error_name, cuGetErrorName);
  PYGRAPH_DRIVER(launch, cuGraphLaunch);
  PYGRAPH_DRIVER(destroy_graph, cuGraphDestroy);
  PYGRAPH_DRIVER(destroy_exec, cuGraphExecDestroy);
  PYGRAPH_DRIVER(current_context, cuCtxGetCurrent);

  void check(CUresult result, const char* what) const {
    if (result == CUDA_SUCCESS) return;
    const char* name = nullptr;
    error_name(result, &name);
    TORCH_CHECK(false, what, ": ", name != nullptr ? name : std::to_string(static_cast<int>(result)));
  }

  // The number of nodes that the capture under way on `stream` has by now; none without one, or if it is broken.
  std::optional<size_t> captured_nodes(CUstream stream) const {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    CUgraph graph = nullptr;
    const CUgraphNode* dependencies = nullptr;
    size_t count = 0;
#if CUDA_VERSION >= 13000
    const CUgraphEdgeData* edges = nullptr;
    auto result = capture_info(stream, &status, &id, &graph, &dependencies, &edges, &count);
#else
    auto result = capture_info(stream, &status, &id, &graph, &dependencies, &count);
#endif
    if (result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return std::nullopt;
    size_t nodes_by_now = 0;
    if (nodes(graph, nullptr, &nodes_by_now) != CUDA_SUCCESS) return std::nullopt;
    return nodes_by_now;
  }
};

} // namespace pygraph
