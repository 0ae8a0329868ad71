"""What the launchers of the Hopper kernels share beside `launch`: descriptors, and the order of work."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from streamattn.kernels.launch import heads_per_group
from streamattn.pattern import UNBOUNDED


def descriptor(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Of x [B, H, T, D] with a unit last stride, for blocks [1, 1, rows, block_d]."""
    block = [1, 1, rows, block_d]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    # the stride of a dimension of size 1 may be anything; an encoded one is a whole number of 16 bytes
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def flat_descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """Of contiguous x in float32, for blocks that lie in shared memory as in x: nothing is swizzled."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def group_of_heads(
    x: Tensor,
    window_right: int,
    num_tiles: int,
    num_heads: int,
    multiprocessors: int,
    ordered: bool = False,
    segments: bool = False,
) -> int:
    """How many heads start side by side (see `primitives.schedule`); x is what every item of a head reads.

    The last group's longest items take twice as long as an average one, and something has to go on beside
    them: two items for each multiprocessor at least, whatever fits the cache. Where items of one head are
    ordered and wait for one another, few heads have all of them wait, and many read past the cache: as many
    as fill the multiprocessors once are best at 128 columns, and twice as many at 64. With segments items are
    of any length, masked or not, and the last ones are short.
    """
    group = heads_per_group(x, 0 if segments else window_right)
    if ordered:
        rounds = 2 if x.shape[-1] <= 64 else 1
        group = max(1, rounds * multiprocessors // num_tiles)
    elif window_right < UNBOUNDED and not segments:
        group = max(group, triton.cdiv(2 * multiprocessors, num_tiles))
    return triton.cdiv(num_heads, max(1, num_heads // group))
