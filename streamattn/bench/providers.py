"""Who is measured: implementations of attention behind one call on views [B, H, S, D] of [B, S, H, D].

`find` brings a provider or says why it can't run here; its ``bind`` makes the call of one case or says why it
can't serve that. Packages that may be missing are imported only when they are looked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from streamattn import __version__
from streamattn.bench.cases import Case
from streamattn.dispatch import MAX_TRITON_HEAD_DIM, Backend, Masks, choose
from streamattn.functional import attention
from streamattn.pattern import UNBOUNDED

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> out, all [B, H, S, D]."""


class Unsupported(Exception):
    """Why a provider can't run here or can't serve a case."""


@dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        bind: makes the call of a case on a device; raises `Unsupported`.
        version: of what implements it.
        ours: whether it is this package's, so that a case it fails at is an error and no property of a peer.
        around: makes what must be entered around its calls, once for many.
        backend: what should serve a case's q, k, v, forward or backward (True); None = it has no choice.
        named: whether its name promises that backend, so that the figures of another are not its own.
    """

    bind: Callable[[Case, torch.device], Call]
    version: str
    ours: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    backend: Callable[[Case, Tensor, Tensor, Tensor, bool], str] | None = None
    named: bool = False


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return f"{distributions[0]}, version unknown"


def _streamattn(backend: str) -> Provider:
    def bind(case: Case, device: torch.device) -> Call:
        if backend != "auto" and device.type == "cpu":
            raise Unsupported("its kernels need an NVIDIA GPU")
        if backend in ("triton", "decode") and case.head_dim > MAX_TRITON_HEAD_DIM:
            raise Unsupported(f"its kernels take head dimensions up to {MAX_TRITON_HEAD_DIM}")
        if backend == "decode" and case.queries is None:
            raise Unsupported("its kernel is for few queries: --cases decode drafts")
        if backend == "wide" and case.head_dim <= MAX_TRITON_HEAD_DIM:
            raise Unsupported(f"its kernels take head dimensions above {MAX_TRITON_HEAD_DIM}")
        segments = case.segments(device)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(
                q,
                k,
                v,
                causal=case.causal,
                window_size=case.window,
                segment_ids=segments,
                dropout_p=case.dropout_p,
                backend=backend,
            )

        return call

    def served(case: Case, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> str:
        segments = case.segments(q.device)
        window_left = UNBOUNDED if case.window is None else case.window - 1
        masks = Masks(q_segments=segments, kv_segments=segments)
        options = (case.head_dim**-0.5, window_left, 0.0, case.dropout_p)
        chosen = choose(Backend(backend), q, k, v, masks, *options)
        return (Backend.TRITON if backward and chosen is Backend.DECODE else chosen).value

    return Provider(bind, f"streamattn {__version__}", ours=True, backend=served)


NO_KERNEL = ("No available kernel", "No viable backend")
"""How PyTorch's errors begin where no backend that is allowed can serve a call, on a GPU and on a CPU."""


def _sdpa(backend: SDPBackend | None) -> Provider:
    """One backend of scaled_dot_product_attention; None = whichever it takes by itself."""

    def bind(case: Case, device: torch.device) -> Call:
        if case.window is not None or case.document is not None:
            raise Unsupported("it has no such pattern but as a mask of S x S")

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            try:
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    dropout_p=case.dropout_p,
                    is_causal=case.causal,
                    enable_gqa=case.num_heads != case.num_kv_heads,
                )
            except RuntimeError as error:
                if backend is None or not str(error).startswith(NO_KERNEL):
                    raise
                raise Unsupported(f"{backend.name.lower()} has no kernel for it here") from error

        return call

    def served(case: Case, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> str:
        chosen = backend
        if chosen is None:
            choice: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009 - not among torch's exported names
            chosen = SDPBackend(choice(q, k, v, None, case.dropout_p, case.causal, enable_gqa=True))
        return chosen.name.lower().removesuffix("_attention")

    version = f"torch {torch.__version__}"
    if backend is None:
        return Provider(bind, version, backend=served)
    return Provider(bind, version, around=lambda: sdpa_kernel(backend), backend=served, named=True)


def _flash(module: ModuleType, version: str) -> Provider:
    """FlashAttention-3 or 4, which take [B, S, H, D], or packed documents [tokens, H, D] and their ends."""

    def bind(case: Case, device: torch.device) -> Call:
        if case.dropout_p:
            raise Unsupported("it has no dropout")
        options: dict[str, Any] = {"causal": case.causal}
        if case.window is not None:
            options["window_size"] = (case.window - 1, 0)
        function = module.flash_attn_func
        if case.document is not None:
            function = module.flash_attn_varlen_func
            ends = torch.arange(
                0, case.batch * case.seq_len + 1, case.document, device=device, dtype=torch.int32
            )
            options |= dict(
                cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=case.document, max_seqlen_k=case.document
            )

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if case.document is not None:
                q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            out = function(q, k, v, **options)
            out = out[0] if isinstance(out, tuple) else out  # some releases return lse too
            if case.document is not None:
                out = out.unflatten(0, (case.batch, case.seq_len))
            return out.transpose(1, 2)

        return call

    return Provider(bind, version)


def _import(*names: str, install: str) -> ModuleType:
    """The first of the modules that is there."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise Unsupported(f"{name} misses {error.name}") from error
        except Exception as error:  # a foreign extension may fail to load in any way
            raise Unsupported(f"{name} can't be imported: {first_line(error)}") from error
    raise Unsupported(f"no module {' or '.join(names)}; {install} brings it")


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _fa3() -> Provider:
    module = _import("flash_attn_interface", "fa3_fwd_interface", install="pip install fa3-fwd")
    return _flash(module, _version("flash-attn-3", "fa3-fwd"))


def _fa4() -> Provider:
    module = _import("flash_attn.cute", install="pip install flash-attn-4")
    return _flash(module, _version("flash-attn-4"))


def _xformers() -> Provider:
    """xformers' memory-efficient attention, which takes [B, S, H, D]."""
    module = _import("xformers.ops", install="pip install xformers")

    def bind(case: Case, device: torch.device) -> Call:
        if case.window is not None or case.document is not None:
            raise Unsupported("it is not asked for patterns here")
        if case.num_heads != case.num_kv_heads:
            raise Unsupported("it is not asked for grouped heads here")
        bias = module.LowerTriangularMask() if case.causal else None

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = module.memory_efficient_attention(q, k, v, attn_bias=bias, p=case.dropout_p)
            return out.transpose(1, 2)

        return call

    return Provider(bind, _version("xformers"))


def _cupy() -> Provider:
    """Attention as it is written down, forward and backward, in CuPy; its memory is not PyTorch's."""
    cupy = _import("cupy", install="pip install cupy-cuda13x")

    def around() -> AbstractContextManager[Any]:
        """Its work goes to PyTorch's stream, where the clocks are."""
        if not torch.cuda.is_available():
            return nullcontext()
        return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def bind(case: Case, device: torch.device) -> Call:
        if not case.plain or case.num_heads != case.num_kv_heads:
            raise Unsupported("it is not asked for patterns, dropout or grouped heads here")
        if case.dtype == "bfloat16":
            raise Unsupported("CuPy has no bfloat16")
        scale = case.head_dim**-0.5

        class Written(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *qkv: Tensor) -> Tensor:
                q, k, v = (cupy.from_dlpack(x.detach()) for x in qkv)
                scores = cupy.matmul(q, k.swapaxes(2, 3)).astype("float32") * scale
                if case.causal:
                    scores += cupy.triu(cupy.full(scores.shape[2:], -cupy.inf, dtype="float32"), 1)
                weights = cupy.exp(scores - scores.max(-1, keepdims=True))
                weights = (weights / weights.sum(-1, keepdims=True)).astype(v.dtype)
                ctx.arrays = q, k, v, weights
                return torch.from_dlpack(cupy.matmul(weights, v))

            @staticmethod
            def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, ...]:
                (q, k, v, weights), dout = ctx.arrays, cupy.from_dlpack(douts[0])
                dweights = cupy.matmul(dout, v.swapaxes(2, 3)).astype("float32")
                dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * scale
                dscores = dscores.astype(q.dtype)
                dq, dk = cupy.matmul(dscores, k), cupy.matmul(dscores.swapaxes(2, 3), q)
                return tuple(
                    torch.from_dlpack(x) for x in (dq, dk, cupy.matmul(weights.swapaxes(2, 3), dout))
                )

        return Written.apply

    return Provider(bind, f"cupy {cupy.__version__}", around=around)


def eager(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is written down: all scores, softmax, values."""
    group = case.num_heads // case.num_kv_heads
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * case.head_dim**-0.5
    if case.causal:
        later = torch.ones(case.seq_len, case.seq_len, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(v.dtype), case.dropout_p)
    return weights @ v


def _eager(compiled: bool) -> Provider:
    def bind(case: Case, device: torch.device) -> Call:
        if case.window is not None or case.document is not None:
            raise Unsupported("it is not asked for patterns here")
        if compiled:
            torch._dynamo.reset()  # or a case would be served by a graph that was made general for others
        function = torch.compile(eager, dynamic=False) if compiled else eager
        return lambda q, k, v: function(case, q, k, v)

    config = importlib.import_module("torch._functorch.config")  # as FlexAttention's below
    return Provider(bind, f"torch {torch.__version__}", around=lambda: config.patch(donated_buffer=False))


def visible_to_flex(case: Case, segments: Tensor | None) -> Callable[[Any, Any, Any, Any], Any] | None:
    """The case's pattern as FlexAttention's ``mask_mod``; None where every query sees every key."""
    causal, window = case.causal, case.window
    if not causal and window is None and segments is None:
        return None

    def mask_mod(batch: Any, head: Any, i: Any, j: Any) -> Any:
        seen = i >= j if causal else i == i
        if window is not None:
            seen = seen & (i - j < window)
        if segments is not None:
            seen = seen & (segments[i] == segments[j])
        return seen

    return mask_mod


def _flex() -> Provider:
    def bind(case: Case, device: torch.device) -> Call:
        if case.dropout_p:
            raise Unsupported("it has no dropout")
        torch._dynamo.reset()  # or a case would be served by a graph that was made general for others
        compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
        segments = case.segments(device)
        mask_mod = visible_to_flex(case, None if segments is None else segments[0].contiguous())
        blocks = None
        if mask_mod is not None:
            blocks = flex_attention.create_block_mask(
                mask_mod, None, None, case.seq_len, case.seq_len, device=device
            )

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=blocks, enable_gqa=case.num_heads != case.num_kv_heads)

        return call

    # A graph of which a backward is run twice, as timing does, can't give its buffers away.
    config = importlib.import_module("torch._functorch.config")
    return Provider(bind, f"torch {torch.__version__}", around=lambda: config.patch(donated_buffer=False))


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "streamattn": lambda: _streamattn("auto"),
    "streamattn-portable": lambda: _streamattn("triton"),
    "streamattn-decode": lambda: _streamattn("decode"),
    "streamattn-wide": lambda: _streamattn("wide"),
    "fa3": _fa3,
    "fa4": _fa4,
    "sdpa_flash": lambda: _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": lambda: _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_default": lambda: _sdpa(None),
    "sdpa_efficient": lambda: _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "xformers": _xformers,
    "cupy": _cupy,
    "eager": lambda: _eager(compiled=False),
    "eager_compiled": lambda: _eager(compiled=True),
}


def find(names: list[str]) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers of these names that can run here, and for each of the others the reason why not."""
    found: dict[str, Provider] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            found[name] = PROVIDERS[name]()
        except Unsupported as error:
            absent[name] = str(error)
    return found, absent
