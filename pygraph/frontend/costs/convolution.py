"""Flops of convolutions, forward and backward: two for each multiply-add at each position of the filter.

``torch.utils.flop_counter`` counts the same, except that its weight gradient leaves the groups out; here each group
counts what it does, which is what the forward pass does.
"""

from __future__ import annotations

from pygraph.frontend.costs.registry import flops
from pygraph.frontend.costs.traffic import product, shape_of
from pygraph.ir import Dim, KernelNode, TensorType

__all__: list[str] = []


def _multiply_adds(filter_shape: tuple[Dim, ...], batch: Dim, positions: tuple[Dim, ...]) -> Dim:
    """Each output position (input position, when transposed) meets every weight once per image."""
    return product(2, batch, *positions, *filter_shape)


@flops("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def _convolution(node: KernelNode) -> Dim | None:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, …)."""
    image, weight = shape_of(node, 0), shape_of(node, 1)
    out = node.outputs[0].type if node.outputs else None
    if not image or not weight or not isinstance(out, TensorType):
        return None
    transposed = len(node.args) > 6 and node.args[6] is True
    return _multiply_adds(weight, image[0], (image if transposed else out.shape)[2:])


@flops("aten.cudnn_convolution", "aten.mkldnn_convolution", "mkldnn._convolution_pointwise")
def _direct_convolution(node: KernelNode) -> Dim | None:
    image, weight = shape_of(node, 0), shape_of(node, 1)
    out = node.outputs[0].type if node.outputs else None
    if not image or len(weight) != len(image) or not isinstance(out, TensorType):
        return None
    return _multiply_adds(weight, image[0], out.shape[2:])


@flops("aten.convolution_backward")
def _backward(node: KernelNode) -> Dim | None:
    """convolution_backward(grad, input, weight, bias_sizes, …, transposed [7], output_padding, groups, mask [10])."""
    grad, image, weight = shape_of(node, 0), shape_of(node, 1), shape_of(node, 2)
    mask = node.args[10] if len(node.args) > 10 else None
    if not grad or not image or not weight or not isinstance(mask, tuple):
        return None
    transposed = node.args[7] is True
    once = _multiply_adds(weight, image[0], (image if transposed else grad)[2:])
    gradients = sum(1 for wanted in mask[:2] if wanted is True)
    return product(once, gradients)
