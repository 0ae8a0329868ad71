"""What every launcher of a Triton kernel needs: device, tile, the arguments of a call, and a short launch.

Each kernel takes its tensors first and names the other arguments alike, so that a launcher passes
``*mask_pointers(...)`` and ``**call_arguments(...)`` beside its own. Triton's own way through 60 arguments
costs some 300 microseconds of host time a launch; `launch` takes it once for what is compiled. A set of
shapes, strides and options is then planned once, and from then on Triton's function in C is called with new
pointers alone, and with tensor maps that are kept by address. A map holds the address, the layout and
nothing of what lies there, so one that outlives its tensor is right for the next tensor at that place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from streamattn.kernels.tiles import SCALE_LIMIT, Architecture, Pass, Tile, architecture, choose_tile
from streamattn.pattern import (
    ADDITIVE_MASK,
    BOOL_MASK,
    NO_MASK,
    UNBOUNDED,
    drop_threshold,
    hiding_limit,
    open_sides,
)

GROUP_BYTES = 16 << 20  # of keys and values, or queries and gradients, that share the second-level cache
BY_LENGTH = ("kv_len", "stride_k_b", "stride_k_h", "stride_v_b", "stride_v_h")  # grow with a cache
_HERE = contextlib.nullcontext()


def device_guard(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU the current one: Triton launches on the current device, whatever the pointers say."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


def architecture_of(x: Tensor) -> Architecture:
    """The row family of x's device."""
    return architecture(torch.cuda.get_device_capability(x.device) if x.is_cuda else None)


def starts_early(x: Tensor) -> bool:
    """Whether kernels are started while the one before them runs (Triton's option ``launch_pdl``)."""
    return architecture_of(x) == "sm_90"


def tile_for(name: Pass, q: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tile:
    """The tile of a pass over these tensors, on their device."""
    widest = max(q.shape[3], v.shape[3])
    return choose_tile(name, architecture_of(q), widest, q.element_size(), attn_mask is not None)


@functools.cache
def multiprocessor_count(device: int) -> int:
    """Multiprocessors of the GPU of this index; PyTorch takes microseconds to tell."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def heads_last(x: Tensor, head_dim: int) -> Tensor:
    """An uninitialised tensor of x's dtype and batch, heads and length, stored [B, T, H, head_dim]."""
    batch, heads, length, _ = x.shape
    row = heads * head_dim
    return x.new_empty_strided((batch, heads, length, head_dim), (length * row, head_dim, row, 1))


def result_layouts(q: Tensor, head_dim: int) -> tuple[Any, Any]:
    """Sizes and strides: of out as `heads_last` makes it of q [B, Hq, Tq, D], and of lse [B, Hq, Tq]."""
    batch, num_heads, q_len, _ = q.shape
    row = num_heads * head_dim
    return (
        ((batch, num_heads, q_len, head_dim), (q_len * row, head_dim, row, 1)),
        ((batch, num_heads, q_len), (num_heads * q_len, q_len, 1)),
    )


def heads_per_group(x: Tensor, window_right: int) -> int:
    """How many heads start side by side (see `primitives.schedule`).

    Each program reads all rows of a head of x, and those of a group are to stay in the cache. Without a right
    limit all tiles are alike and one head after the other is best for the cache.
    """
    if window_right == UNBOUNDED:
        return 1
    return max(1, GROUP_BYTES // (2 * x.shape[2] * x.shape[3] * x.element_size()))


def strides(name: str, x: Tensor | None) -> dict[str, int]:
    """Strides of the first three dimensions as stride_<name>_b, _h, _t; 0 without a tensor."""
    b, h, t = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_t": t}


def rows_are_aligned(*tensors: Tensor) -> bool:
    """Whether each row of these [B, H, T, D] begins at whole 16 bytes.

    The compiler reads and writes such rows 16 bytes at a time, but by itself knows of strides only whether
    they are multiples of 16 numbers: heads of 136 columns are not.
    """
    return all(
        x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
        for x in tensors
    )


class _Maps(dict[int, Any]):
    """Tensor maps that differ in nothing but the address, by that address; encoded when first asked for."""

    held = 0  # of all layouts

    def __init__(self, encode: Callable[..., Any], before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Of Triton's ``encode(*before, address, *after)``."""
        self.encode, self.before, self.after = encode, before, after

    def __missing__(self, address: int) -> Any:
        if _Maps.held >= _MAX_MAPS:
            for maps in list(_maps.values()):
                maps.clear()
            _Maps.held = 0
        _Maps.held += 1
        tensor_map = self[address] = self.encode(*self.before, address, *self.after)
        return tensor_map


class Plan(NamedTuple):
    """How the short way launches a compiled kernel; see `_plan`."""

    launcher: Callable[..., None] | None  # None: each launch takes Triton's own way
    before: tuple[Any, ...]  # its arguments before the stream
    after: tuple[Any, ...]  # between the stream and the values
    values: list[Any]  # of all parameters
    pointers: tuple[tuple[int, _Maps | None], ...]  # in them the place of each tensor, and its maps if a map
    varying: tuple[int, ...]  # in them the places of what varies
    nested: bool  # whether the launcher takes the values as one argument


_plans: dict[Hashable, Plan] = {}
_compiled: dict[Hashable, Any] = {}  # Triton's kernels, which many plans share
# by all that makes a map but the address; as long as a plan has them
_maps: MutableMapping[Hashable, _Maps] = weakref.WeakValueDictionary()
_MAX_PLANS = 4096
_MAX_MAPS = 16384  # some 300 bytes each


def launch(
    kernel: Any,
    key: Hashable,
    pointers: tuple[Any, ...],
    arguments: Callable[[], tuple[int, dict[str, Any]]],
    varying: tuple[int, ...] = (),
) -> None:
    """Launches a kernel on the current device, which is the tensors'.

    Args:
        kernel: a jitted function.
        key: determines, with kernel, device and the tensors' alignment, all that ``arguments`` returns but
            what varies, and of that what the code depends on.
        pointers: the kernel's first parameters, all of its tensors; None where a feature is off.
        arguments: returns the number of programs, and the other parameters with the launch options; among
            them the descriptor of each tensor that the kernel reads or writes by TMA, under the name of its
            parameter.
        varying: the arguments that `BY_LENGTH` names, where they vary under this key.
    """
    # a compiled kernel takes an address as it is, but looks a tensor's up once more
    addresses = [x.data_ptr() for x in pointers if x is not None]
    bits = 0
    for address in addresses:
        bits |= address
    aligned = bits % 16 == 0 or tuple([x is None or x.data_ptr() % 16 == 0 for x in pointers])
    device = pointers[0].get_device()
    place = (kernel.__name__, device, aligned)
    plan = _plans.get((place, key))
    launched = False
    if plan is None:
        programs, others = arguments()
        code = (place, _code_key(pointers, others))
        compiled = _compiled.get(code)
        if compiled is None:
            compiled = _launch_by_triton(kernel, programs, others, pointers)
            if compiled is None:
                return  # the interpreter compiles nothing
            _compiled[code] = compiled
            launched = True
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
            _Maps.held = sum(map(len, _maps.values()))
        plan = _plans[place, key] = _plan(kernel, compiled, programs, pointers, others, bool(varying))
    if launched:
        return
    if plan.launcher is None or _hooked():
        _launch_by_triton(kernel, *arguments(), pointers)
        return
    _start(plan.launcher, plan, device, addresses, varying)


def launch_again(kernel: Any, key: Hashable, pointers: tuple[Tensor, ...], varying: tuple[int, ...]) -> bool:
    """Launches what `launch` has planned on the current device, at less of the host's time.

    Args:
        kernel: as `launch` takes it.
        key: as `launch` takes it.
        pointers: the kernel's tensors, in order, without the features that are off.
        varying: as `launch` takes it.

    Returns:
        Whether it was launched; if not, call `launch`: nothing is planned, an address is not of whole 16
        bytes, or a profiler listens.
    """
    addresses = [x.data_ptr() for x in pointers]
    bits = 0
    for address in addresses:
        bits |= address
    device = pointers[0].get_device()
    plan = _plans.get(((kernel.__name__, device, True), key))
    if plan is None or plan.launcher is None or bits % 16 != 0 or _hooked():
        return False
    _start(plan.launcher, plan, device, addresses, varying)
    return True


def planned(kernel: Any, key: Hashable, device: int) -> Plan | None:
    """What `launch` has planned under this key for tensors at whole 16 bytes, for `start_plans`."""
    plan = _plans.get(((kernel.__name__, device, True), key))
    return None if plan is None or plan.launcher is None else plan


def start_plans(device: int, *launches: tuple[Plan, list[int]]) -> bool:
    """Launches what is `planned`, one after the other, each for the addresses of its tensors in order.

    Returns:
        Whether it did. It doesn't and nothing is launched if the device isn't the current one, an address is
        not of whole 16 bytes, or a profiler listens; then call `launch`.
    """
    bits = 0
    for _, addresses in launches:
        for address in addresses:
            bits |= address
    if bits % 16 != 0 or device != torch._C._cuda_getDevice() or _hooked():
        return False
    for plan, addresses in launches:
        _start(plan.launcher, plan, device, addresses, ())
    return True


def _start(
    launcher: Callable[..., None],
    plan: Plan,
    device: int,
    addresses: list[int],
    varying: tuple[int, ...],
) -> None:
    """Calls a plan's launcher for these tensors, on the current stream of their device."""
    values = plan.values.copy()
    for (index, maps), address in zip(plan.pointers, addresses, strict=True):
        values[index] = address if maps is None else maps[address]
    if varying:
        for index, value in zip(plan.varying, varying, strict=True):
            values[index] = value
    stream = torch._C._cuda_getCurrentRawStream(device)
    if plan.nested:
        launcher(*plan.before, stream, *plan.after, values)
    else:
        launcher(*plan.before, stream, *plan.after, *values)


def _plan(
    kernel: Any,
    compiled: Any,
    programs: int,
    pointers: tuple[Any, ...],
    others: dict[str, Any],
    varies: bool,
) -> Plan:
    """How to launch a compiled kernel again with other tensors.

    Triton has a function in C that launches and one that encodes a tensor map, and above them Python that
    encodes each map anew at every launch and differs from release to release. That Python is run once here,
    with marks in place of what varies and listeners in place of the functions in C. If each mark arrives at
    one place, these are called without it from then on. Otherwise all of that Python is called each time; a
    kernel with descriptors then takes Triton's way from its beginning.
    """
    names = kernel.arg_names
    # a kernel that wants memory for itself is given it at each launch
    sizes = [getattr(compiled.run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if sizes == [0, 0] and not getattr(compiled.run, "gsan_enabled", False):
        # nothing is launched here, and a release that was never read may raise any of these
        with contextlib.suppress(AssertionError, AttributeError, LookupError, TypeError, ValueError):
            return _direct_plan(compiled, programs, names, pointers, others, varies)
    descriptors = any(name in others for name in names[: len(pointers)])
    return Plan(
        None if descriptors else compiled.run,
        (programs, 1, 1),
        (compiled.function, compiled.packed_metadata, None, None, None),
        [] if descriptors else [others.get(name) for name in names],  # descriptors would keep their tensors
        tuple([(index, None) for index, x in enumerate(pointers) if x is not None]),
        tuple([names.index(name) for name in BY_LENGTH]) if varies else (),
        False,
    )


class _Mark:
    """Stands for an argument of a launch on its way through Triton's Python."""


def _direct_plan(
    compiled: Any,
    programs: int,
    names: list[str],
    pointers: tuple[Any, ...],
    others: dict[str, Any],
    varies: bool,
) -> Plan:
    """The plan that calls the functions in C; raises where it can't be found out how (see `_plan`)."""
    stream = _Mark()
    marks = [None if x is None else _Mark() for x in pointers]
    varied = [_Mark() for _ in BY_LENGTH] if varies else []
    rest: dict[str, Any] = {**others, **dict(zip(BY_LENGTH, varied, strict=False))}
    encodings: list[tuple[_Mark, str, tuple[Any, ...]]] = []  # map, function, arguments
    launches: list[tuple[Any, ...]] = []

    class Encoders:
        def __getattr__(self, name: str) -> Callable[..., _Mark]:
            def encode(*arguments: Any) -> _Mark:
                encodings.append((_Mark(), name, arguments))
                return encodings[-1][0]

            return encode

    wrapper = launcher = compiled.run.launch
    listener: Callable[..., Any] = lambda *arguments: launches.append(arguments)  # noqa: E731
    arguments: list[Any] = list(marks)
    described = [(index, rest[name]) for index, name in enumerate(names[: len(pointers)]) if name in rest]
    if described:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        active = SimpleNamespace(utils=Encoders())
        encoding = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
        make = _with_names(make_tensordesc_arg, {"triton": encoding})
        launcher = inspect.getclosurevars(wrapper).nonlocals["launcher"]
        listener = _with_names(wrapper, {"launcher": listener, "make_tensordesc_arg": make})
        for index, descriptor in described:
            base = SimpleNamespace(data_ptr=lambda mark=marks[index]: mark)
            arguments[index] = SimpleNamespace(**{**vars(descriptor), "base": base})
    outermost = copy.copy(compiled.run)
    outermost.launch = listener
    arguments += [rest.get(name) for name in names[len(pointers) :]]
    hooks = (None, None, None)
    outermost(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments)

    (heard,) = launches
    places: list[tuple[_Mark, _Maps | None]] = [(mark, None) for mark in marks if mark is not None]
    for tensor_map, name, given in encodings:
        (address,) = [x for x in given if isinstance(x, _Mark)]
        at, index = given.index(address), places.index((address, None))
        before, after = given[:at], given[at + 1 :]
        key = (pointers[0].get_device(), name, _hashable(before), _hashable(after))
        encode = getattr(triton.runtime.driver.active.utils, name)
        maps = _maps.setdefault(key, _Maps(encode, before, after))
        places[index] = (tensor_map, maps)

    first = heard.index(stream)
    nested = isinstance(heard[-1], list | tuple)
    start = len(heard) - 1 if nested else heard.index(places[0][0])
    values = list(heard[-1] if nested else heard[start:])
    wanted = [stream, *(mark for mark, _ in places), *varied]
    arrived = [x for x in (*heard[:start], *values) if isinstance(x, _Mark)]
    if len(arrived) != len(wanted) or first >= start:
        raise ValueError("another number of marks arrives than was sent")
    if any(hasattr(x, "data_ptr") for x in (*heard[:start], *values)):
        raise ValueError("memory arrives that is for one launch alone")
    return Plan(
        launcher,
        heard[:first],
        heard[first + 1 : start],
        [None if isinstance(x, _Mark) else x for x in values],
        tuple([(values.index(mark), maps) for mark, maps in places]),
        tuple([values.index(mark) for mark in varied]),
        nested,
    )


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """A copy of a Python function for which these global or enclosing names mean something else."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple([CellType(names[name]) if name in names else cell for name, cell in cells])
    return FunctionType(code, {**function.__globals__, **names}, code.co_name, function.__defaults__, closure)


def _hashable(arguments: tuple[Any, ...]) -> Hashable:
    return tuple([tuple(x) if isinstance(x, list) else x for x in arguments])


def _launch_by_triton(kernel: Any, programs: int, others: dict[str, Any], pointers: tuple[Any, ...]) -> Any:
    """Compiles a kernel where need be and launches it; returns it, or None from the interpreter."""
    named = {**dict(zip(kernel.arg_names, pointers, strict=False)), **others}
    # Triton 3.10 turns fusion off by default; without it products and sums round twice
    return kernel[programs, 1, 1](**named, enable_fp_fusion=True)


def _code_key(pointers: tuple[Any, ...], others: dict[str, Any]) -> Hashable:
    """What a kernel's code depends on: every new length of a cache is a new plan, but hardly ever new code.

    Of a number that varies from call to call Triton asks no more than is asked here: whether it is 1, a
    multiple of 16, and fits 32 bits. Of a descriptor it asks for the block.
    """
    dtypes = tuple([None if x is None else x.dtype for x in pointers])
    values = []
    for name, value in others.items():
        if name in _VARYING or name[:7] == "stride_":
            value = (value == 1) + 2 * (value % 16 == 0) + 4 * (-(1 << 31) <= value < 1 << 31)
        elif hasattr(value, "block_shape"):  # a descriptor
            value = (tuple(value.block_shape), repr(value.layout))
        values.append(value)
    return dtypes, tuple(values)


def _hooked() -> bool:
    """Whether a profiler of Triton's wants to hear of each launch: Triton's own way tells it."""
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def call_key(tensors: tuple[Tensor | None, ...], *options: float) -> Hashable:
    """Shapes, strides and dtypes of a call's tensors, its options, and the precision of its products."""
    layouts = tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])
    assert tensors[0] is not None
    return layouts, options, product_precision(tensors[0])


def product_precision(q: Tensor) -> str:
    """How the tensor cores multiply tensors of q's dtype: float32 in three TF32 steps, or in one if allowed.

    PyTorch has two ways to allow TF32, and `torch.get_float32_matmul_precision` raises after the newer one,
    which transformers' Trainer uses. This attribute knows both.
    """
    if q.dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def mask_pointers(
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The tensors about visibility and dropout, in the order of each kernel's parameters."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.view(torch.uint8)
    return attn_mask, q_segments, kv_segments, kv_lengths, seed


def padded(head_dim: int, other: int, itemsize: int) -> int:
    """Columns of the tiles of a tensor with `head_dim` columns, beside tiles of `other` columns.

    Rows of less than 128 bytes are laid out in an order of their own. Where tiles of two orders take turns in
    one buffer, ptxas 12.8 (of Triton 3.6) forgets to compute its address for the second product, which then
    reads anything. So the narrower tiles get the order of the wider ones.
    """
    # Triton's own next_power_of_2 takes some microseconds, and so does its cdiv
    width, other = (max(16, 1 << (size - 1).bit_length()) for size in (head_dim, other))
    return max(width, min(max(width, other), 128 // itemsize))


def call_arguments(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    kv_len: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments that all kernels share, and the launch options; shapes as in `streamattn.ops`.

    ``kv_len`` is Tk of a paged cache, which k and v do not tell.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, head_dim_v = v.shape[1], v.shape[3]
    kv_len = v.shape[2] if kv_len is None else kv_len
    threshold = drop_threshold(dropout_p)
    window_left, window_right = open_sides(q_len, kv_len, window_left, window_right)
    mask_kind, mask_strides, hidden_below = NO_MASK, (0, 0, 0, 0), 0.0
    if attn_mask is not None:
        mask_kind = BOOL_MASK if attn_mask.dtype == torch.bool else ADDITIVE_MASK
        mask_strides = tuple(
            stride if size > 1 else 0
            for stride, size in zip(attn_mask.stride(), attn_mask.shape, strict=True)
        )
        if mask_kind == ADDITIVE_MASK:
            hidden_below = hiding_limit(torch.finfo(attn_mask.dtype).min, torch.finfo(torch.float32).min)
    return dict(
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        stride_mask_b=mask_strides[0],
        stride_mask_h=mask_strides[1],
        stride_mask_m=mask_strides[2],
        stride_mask_n=mask_strides[3],
        stride_q_segments_b=0 if q_segments is None else q_segments.stride(0),
        stride_q_segments_t=0 if q_segments is None else q_segments.stride(1),
        stride_kv_segments_b=0 if kv_segments is None else kv_segments.stride(0),
        stride_kv_segments_t=0 if kv_segments is None else kv_segments.stride(1),
        stride_kv_lengths=0 if kv_lengths is None else kv_lengths.stride(0),
        batch=batch,
        num_heads=num_heads,
        group=num_heads // num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        window_left=window_left,
        window_right=window_right,
        scale=scale,
        softcap=softcap,
        hidden_below=hidden_below,
        drop_threshold=threshold,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        BLOCK_D=padded(head_dim, head_dim_v, q.element_size()),
        BLOCK_DV=padded(head_dim_v, head_dim, q.element_size()),
        HAS_LEFT=window_left < UNBOUNDED,
        HAS_RIGHT=window_right < UNBOUNDED,
        MASK_KIND=mask_kind,
        HAS_SEGMENTS=q_segments is not None,
        HAS_LENGTHS=kv_lengths is not None,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_DROPOUT=threshold > 0,
        # the scale is folded into the exponent's argument where nothing stands between it and the product
        FOLD_SCALE=scale > SCALE_LIMIT and softcap == 0.0 and mask_kind != ADDITIVE_MASK,
        PRECISION=product_precision(q),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# arguments whose values change from call to call without changing the code
UNSPECIALIZED = (
    "stride_row_stats",
    "heads_per_group",
    "batch",
    "num_heads",
    "group",
    "q_len",
    "kv_len",
    "num_pages",
    "num_splits",
    "programs",
    "window_left",
    "window_right",
    "drop_threshold",
    "head_start",
    "row_start",
    "row_stop",
    "first_query",
)
_VARYING = frozenset(UNSPECIALIZED)
