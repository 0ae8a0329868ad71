"""Launches once more what a Hopper forward or backward has launched, at less of the host's time.

What a launch needs beside the addresses depends on shapes, strides and options alone, and `launch` has it
planned. Each function here looks those plans up once, and returns one that starts them for other addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda

from streamattn.kernels.hopper_backward import (
    hopper_bwd_finish_kernel,
    hopper_bwd_kernel,
    hopper_bwd_prepare_kernel,
    hopper_bwd_shared_kernel,
)
from streamattn.kernels.hopper_backward_warps import ROWS
from streamattn.kernels.hopper_forward import hopper_fwd_kernel
from streamattn.kernels.hopper_launch import counter_of
from streamattn.kernels.launch import call_key, planned, result_layouts, start_plans
from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES
from streamattn.pattern import open_sides


def repeat_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Callable[[int, int, int], tuple[Tensor, Tensor] | None] | None:
    """What serves more calls like one that `hopper_forward.attention_forward` has served.

    Args:
        q: of that call, which had no segments, lengths and dropout.
        k: of that call.
        v: of that call.
        scale: as it took it, and so the options below.
        window_left: keys before a query's own place.
        window_right: keys behind it.
        softcap: 0 = none.
        dropout_p: 0.

    Returns:
        Returns ``(out, lse)`` for q, k and v of the same layout at these addresses; None where
        `attention_forward` must serve them. None if nothing is planned.
    """
    window_left, window_right = open_sides(q.shape[2], k.shape[2], window_left, window_right)
    key = call_key((q, k, v, None, None, None), scale, window_left, window_right, softcap, dropout_p)
    dtype, device = q.dtype, q.get_device()
    plan = planned(hopper_fwd_kernel, key, device)
    if plan is None:
        return None
    out_layout, lse_layout = result_layouts(q, q.shape[3])
    drawn = len(plan.pointers) == 6  # with a counter

    def again(q: int, k: int, v: int) -> tuple[Tensor, Tensor] | None:
        if device != torch._C._cuda_getDevice():
            return None
        # the dispatcher is half of the time that `new_empty` takes
        out = _empty_strided_cuda(*out_layout, dtype)
        lse = _empty_strided_cuda(*lse_layout, torch.float32)
        addresses = [q, k, v, out.data_ptr(), lse.data_ptr()]
        if drawn:
            addresses.append(counter_of(device).data_ptr())
        return (out, lse) if start_plans(device, (plan, addresses)) else None

    return again


def repeat_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor] | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> Callable[..., bool] | None:
    """What serves more calls like one that `hopper_backward.attention_backward` has served.

    Args:
        dout: of that call, which had no dlse, segments, lengths and dropout.
        q: of that call.
        k: of that call.
        v: of that call.
        out: of that call.
        lse: of that call.
        grads: as it took them.
        scale: as it took it, and so the options below.
        window_left: keys before a query's own place.
        window_right: keys behind it.
        softcap: 0 = none.
        dropout_p: 0.
        deterministic: whether dq is added up in order.

    Returns:
        Writes the gradients, given the addresses of dout, q, k, v, out, lse, dq, dk and dv of the same
        layouts, and returns whether it did; if not, `attention_backward` must. None if nothing is planned.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    window_left, window_right = open_sides(q_len, kv_len, window_left, window_right)
    if q_len - kv_len - window_right > 0:
        return None  # queries that see nothing are cut off, and get zeros
    block_d = next(x for x in HOPPER_BACKWARD_TILES if q.shape[3] <= x)
    ordered = deterministic or max(q_len, kv_len) <= HOPPER_BACKWARD_TILES[block_d].IN_ORDER
    tensors = (q, k, v, out, dout, lse, *(None,) * 4, *(grads or ()))
    key = call_key(tensors, scale, window_left, window_right, softcap, dropout_p, 0, ordered)
    device = q.get_device()
    main = hopper_bwd_shared_kernel if block_d > 128 else hopper_bwd_kernel
    plans = [
        planned(kernel, key, device) for kernel in (hopper_bwd_prepare_kernel, main, hopper_bwd_finish_kernel)
    ]
    if None in plans:
        return None
    prepare, main, finish = plans
    # the kernels' own memory in one piece: statistics of the rows, sums of dq, whose turn it is
    rows = -(-q_len // ROWS.value) * q.shape[0] * q.shape[1] * ROWS.value
    numbers = rows * (2 + block_d) + (rows // ROWS.value if ordered else 0)

    def again(dout: int, q: int, k: int, v: int, out: int, lse: int, dq: int, dk: int, dv: int) -> bool:
        own = _empty_strided_cuda((numbers,), (1,), torch.float32)
        stats = own.data_ptr()
        sums = stats + 8 * rows
        turns = [sums + 4 * block_d * rows] if ordered else []
        return start_plans(
            device,
            (prepare, [out, dout, lse, stats, sums, *turns]),
            (main, [q, k, v, dout, stats, sums, dk, dv, *turns]),
            (finish, [sums, *turns, dq]),
        )

    return again
