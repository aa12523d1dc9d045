// Functional collectives whose results are waited for at once. They are sent as `torch.distributed` sends them without
// `async_op`: a GPU's run on the current stream, with no events to and from another one, and no work is registered.
#pragma once

#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#ifdef PYGRAPH_DISTRIBUTED
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pygraph {

#ifdef PYGRAPH_DISTRIBUTED

// What is known of one collective. How it is sent, with which outputs, is as in torch's `Functional.cpp`.
class Collective {
 public:
  using Tensors = std::vector<Tensor>;

  // None for an operator that is not known, or whose group, or reduction, is told in another way.
  static std::optional<Collective> of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    static const std::unordered_map<std::string, Send> known{
        {"all_reduce_", &Collective::all_reduce},
        {"all_reduce", &Collective::all_reduce},
        {"all_reduce_coalesced_", &Collective::all_reduce_coalesced},
        {"all_reduce_coalesced", &Collective::all_reduce_coalesced},
        {"all_gather_into_tensor", &Collective::all_gather},
        {"all_gather_into_tensor_coalesced", &Collective::all_gather},
        {"all_gather_into_tensor_out", &Collective::all_gather_out},
        {"reduce_scatter_tensor", &Collective::reduce_scatter},
        {"reduce_scatter_tensor_coalesced", &Collective::reduce_scatter},
        {"reduce_scatter_tensor_out", &Collective::reduce_scatter},
        {"all_to_all_single", &Collective::all_to_all}};
    using Op = c10d::ReduceOp;
    static const std::unordered_map<std::string, Op::RedOpType> reductions{
        {"sum", Op::SUM}, {"avg", Op::AVG}, {"product", Op::PRODUCT}, {"min", Op::MIN},
        {"max", Op::MAX}, {"band", Op::BAND}, {"bor", Op::BOR}, {"bxor", Op::BXOR}};
    static const std::string own = "_c10d_functional::";
    const auto& name = op.schema().name();
    auto found = name.rfind(own, 0) == 0 ? known.find(name.substr(own.size())) : known.end();
    if (found == known.end()) return std::nullopt;
    Collective made;
    made.send_ = found->second;
    for (size_t i = 0; i < stack.size(); ++i) {
      const auto& argument = op.schema().arguments()[i].name();
      if (argument == "group_name" && stack[i].isString()) {
        made.group_ = stack[i].toStringRef();
      } else if (argument == "reduce_op") {
        auto reduction = reductions.find(stack[i].toStringRef());
        if (reduction == reductions.end()) return std::nullopt;
        made.reduction_ = reduction->second;
      } else if (argument == "output_split_sizes" || argument == "input_split_sizes") {
        if (!stack[i].isIntList()) return std::nullopt;
        (argument[0] == 'o' ? made.output_sizes_ : made.input_sizes_) = stack[i].toIntVector();
      }
    }
    return made.group_.empty() ? std::nullopt : std::make_optional(std::move(made));
  }

  // The group that it can be sent by, if that comes to the same. Not so where the operator makes another tensor of what
  // it is given, where all works are registered, or where a group sends in its own way.
  c10::intrusive_ptr<c10d::ProcessGroup> group(const Tensors& tensors) const {
    for (const auto& tensor : tensors) {
      if (tensor.is_complex() || tensor.requires_grad() || !tensor.is_contiguous()) return nullptr;
    }
    if (c10d::allow_inflight_collective_as_graph_input()) return nullptr;
    auto found = c10d::resolve_process_group(group_); // by name: another group may have it by now
    const auto& group = *found;
    return typeid(group) == typeid(c10d::ProcessGroup) ? std::move(found) : nullptr;
  }

  // `outputs`, where they are not operands, hold nothing yet. What may fill an operand is waited for before: it is under
  // way on another stream, and a wait is for all that fills a tensor.
  void send(c10d::ProcessGroup& group, const Tensors& operands, Tensors& inputs, Tensors& outputs) const {
    for (const auto& operand : operands) c10d::wait_tensor(operand);
    auto work = (this->*send_)(group, inputs, outputs);
    if (work) work->wait();
  }

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Send = Work (Collective::*)(c10d::ProcessGroup&, Tensors&, Tensors&) const;

  template <typename Options>
  static Options synchronous() {
    Options options;
    options.asyncOp = false;
    return options;
  }

  template <typename Options>
  Options reducing() const {
    auto options = synchronous<Options>();
    options.reduceOp = reduction_;
    return options;
  }

  static void fill(Tensors& outputs, const Tensors& inputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].is_same(inputs[i])) outputs[i].copy_(inputs[i]);
    }
  }

  Work all_reduce(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    fill(outputs, inputs);
    return group.allreduce(outputs, reducing<c10d::AllreduceOptions>());
  }

  Work all_reduce_coalesced(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    fill(outputs, inputs);
    return group.allreduce_coalesced(outputs, reducing<c10d::AllreduceCoalescedOptions>());
  }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" // 2.13 has other names besides, 2.11 has not

  Work all_gather(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    return group.allgather_into_tensor_coalesced(outputs, inputs, synchronous<c10d::AllgatherOptions>());
  }

  Work all_gather_out(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    return group._allgather_base(outputs[0], inputs[0], synchronous<c10d::AllgatherOptions>());
  }

  Work reduce_scatter(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, reducing<c10d::ReduceScatterOptions>());
  }

  Work all_to_all(c10d::ProcessGroup& group, Tensors& inputs, Tensors& outputs) const {
    auto to = output_sizes_, from = input_sizes_;
    return group.alltoall_base(outputs[0], inputs[0], to, from, synchronous<c10d::AllToAllOptions>());
  }

#pragma GCC diagnostic pop

  Send send_ = nullptr;
  std::string group_;
  c10d::ReduceOp::RedOpType reduction_ = c10d::ReduceOp::SUM;
  std::vector<int64_t> output_sizes_, input_sizes_;
};

#else

// Torch was built without process groups.
struct Collective {
  static std::optional<Collective> of(const c10::OperatorHandle&, const torch::jit::Stack&) { return std::nullopt; }
  struct Group* group(const std::vector<Tensor>&) const { return nullptr; }
  void send(struct Group&, const std::vector<Tensor>&, std::vector<Tensor>&, std::vector<Tensor>&) const {}
};

#endif

} // namespace pygraph
