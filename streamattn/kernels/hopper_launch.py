"""What the launchers of the Hopper kernels share beside `launch`: descriptors, counters, order of work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


CHUNK = 1024  # counters that are allocated at a time, 16 bytes apart, as `launch` wants addresses
_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream
_spare: dict[int, Iterator[Tensor]] = {}  # by device, those for graphs
_chunks: list[Tensor] = []  # kept for good: a graph knows no more than the address


def counter_of(device: int) -> Tensor:
    """int32 [1] on the current device, from which the programs of the next launch draw their work items.

    It is zero when they begin, and they leave it so (see `hopper_producer.producer`): one that is made for
    each launch costs an allocation and a kernel that clears it. The launches of a stream run one after the
    other and share theirs. A launch that is captured has one for itself for good, as graphs may run side by
    side; it is none of a graph's own memory, which holds anything when a replay begins. Its zeros are older
    than the graph: `torch.cuda.graph` waits for the GPU before it captures. Where no more are left while a
    graph is captured, one is cleared in each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        counter = next(_spare.get(device, iter(())), None)
        if counter is None:
            _counters.clear()  # so that the next launch outside of a graph makes more
            counter = torch.zeros(1, dtype=torch.int32, device=device)
        return counter
    key = device, torch._C._cuda_getCurrentRawStream(device)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = _new_counter(device)
    return counter


def _new_counter(device: int) -> Tensor:
    """A counter for the current stream, with the rest of its chunk for graphs.

    A thread of its own allocates them: when torch.compile warms up for its graphs, what this one allocates
    comes from their memory and may not outlive the run.
    """
    stream = torch.cuda.current_stream(device)

    def allocate() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(CHUNK, 4, dtype=torch.int32, device=device)[:, :1]

    with ThreadPoolExecutor(1) as thread:
        chunk = thread.submit(allocate).result()
    _chunks.append(chunk)
    _spare[device] = map(chunk.__getitem__, range(1, CHUNK))
    return chunk[0]
