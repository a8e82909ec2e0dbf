"""Convolutions, seen as matrices over patches.

At every output position a convolution multiplies one matrix with the patch of its input that this
position sees: all input channels, all places of the kernel, `d_in = in_channels * kernel size`.
Output positions are datapoints of the layer, so inner activations and importances have the shape
`[batch, *positions, C]`. A read vector is a kernel of its own and a write vector a vector over
output channels, so a masked layer is a convolution with the kernels V and then a product with U at
every position; patches are formed only where somebody asks to see them.

A transposed convolution is the same from its output's side: the patch of an output position holds
the inputs that reach it, each at the place of the kernel through which it does.

A layer with groups has the block-diagonal matrix over all input channels: one set of subcomponents
for the whole layer, which are free to read across groups and are faithful only if they do not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.adapters import Activation, BiasedAdapter, dense, register_adapter

_PLAIN: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}

Convolution = nn.modules.conv._ConvNd


@register_adapter(nn.Conv1d)
@register_adapter(nn.Conv2d)
@register_adapter(nn.Conv3d)
class ConvolutionAdapter(BiasedAdapter):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` with any stride, padding, dilation and groups."""

    module: Convolution

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.dims = len(self.module.kernel_size)

    def refusal(self) -> str | None:
        if isinstance(self.module.weight, nn.UninitializedParameter):
            return "its weight has no shape yet. Run the model once, so that lazy layers get their weights."
        return None

    def kernel(self) -> Float[Tensor, "out in *size"]:
        """The weight with all input channels, whatever the groups."""
        return _over_all_groups(self.module.weight, self.module.groups)

    def matrix(self) -> Tensor:
        return self.kernel().flatten(1)

    def read(self, x: Activation, V: Tensor) -> Tensor:
        m = self.module
        kernels = V.unflatten(1, (m.in_channels, *m.kernel_size))
        zeros = m.padding_mode == "zeros"
        inputs = dense(x) if zeros else self._padded(dense(x))
        padding = m.padding if zeros else 0
        return self._positions_first(_PLAIN[self.dims](inputs, kernels, None, m.stride, padding, m.dilation))

    def combine(self, z: Tensor, U: Tensor) -> Tensor:
        # One product for every datapoint, with positions last: the order in which a convolution returns.
        columns = torch.movedim(z, -1, -1 - self.dims).flatten(-self.dims)
        return (U @ columns).unflatten(-1, z.shape[-1 - self.dims : -1])

    def bias(self) -> Tensor | None:
        return self.module.bias

    def with_bias(self, output: Tensor) -> Tensor:
        bias = self.bias()
        return output if bias is None else output + bias.to(output.dtype).reshape(-1, *[1] * self.dims)

    def vectors(self, x: Activation) -> Tensor:
        m = self.module
        patches = self._padded(dense(x))
        for size, stride, dilation in zip(m.kernel_size, m.stride, m.dilation, strict=True):
            # The first dimension that is still whole becomes positions, and its places in a patch go last.
            patches = patches.unfold(-self.dims, dilation * (size - 1) + 1, stride)[..., ::dilation]
        return self._positions_first(patches, places=self.dims).flatten(-1 - self.dims)

    def _padded(self, x: Tensor) -> Tensor:
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return F.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)

    def _positions_first(self, y: Tensor, places: int = 0) -> Tensor:
        """Channels behind the positions (and before the `places` of a kernel)."""
        return torch.movedim(y, -1 - self.dims - places, -1 - places)


@register_adapter(nn.ConvTranspose1d)
@register_adapter(nn.ConvTranspose2d)
@register_adapter(nn.ConvTranspose3d)
class TransposedConvolutionAdapter(ConvolutionAdapter):
    """`nn.ConvTranspose1d`, `2d`, `3d`."""

    def kernel(self) -> Float[Tensor, "out in *size"]:
        m = self.module
        out = m.out_channels // m.groups
        by_group = (
            m.weight.unflatten(0, (m.groups, -1))
            .transpose(1, 2)
            .reshape(m.groups * out, m.in_channels // m.groups, *m.kernel_size)
        )
        return _over_all_groups(by_group, m.groups)

    def read(self, x: Activation, V: Tensor) -> Tensor:
        m = self.module
        kernels = V.unflatten(1, (m.in_channels, *m.kernel_size)).transpose(0, 1)
        return self._positions_first(
            _TRANSPOSED[self.dims](
                dense(x),
                kernels,
                None,
                m.stride,
                m.padding,
                m.output_padding,
                1,
                m.dilation,
            )
        )

    def vectors(self, x: Activation) -> Tensor:
        return BiasedAdapter.vectors(self, x)


def _over_all_groups(weight: Tensor, groups: int) -> Tensor:
    """A kernel over all input channels, block-diagonal where there are groups."""
    if groups == 1:
        return weight
    out, each = weight.shape[0] // groups, weight.shape[1]
    whole = weight.new_zeros(weight.shape[0], groups * each, *weight.shape[2:])
    for g in range(groups):
        whole[g * out : (g + 1) * out, g * each : (g + 1) * each] = weight[g * out : (g + 1) * out]
    return whole
