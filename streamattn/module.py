"""`StreamMultiHeadAttention`: the layer that takes the place of `torch.nn.MultiheadAttention`.

Contract: the constructor arguments, the forward signature, the state-dict keys, the initialisation and the
meaning of masks are those of `torch.nn.MultiheadAttention` (bool masks: True = hidden, the opposite of
`streamattn.attention`). The output always comes from the fused `streamattn.attention`; the matrix of weights
exists only where it is asked for.

Layout: heads are split off the projections and merged again as strided views. Self-attention runs one
projection and reads q, k and v out of it in place, and their gradients are written into its own; the output
projection reads the attention's result in place. Masks keep the shape they came in: a key padding mask is
[B, 1, 1, S], a shared mask [1, 1, T, S].

Left out on purpose: nested tensors and torch's inference fast path (padded tensors with a mask do the same
here), TorchScript, quantized twins.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from streamattn.functional import attention, resolve_window
from streamattn.packed import packed_attention
from streamattn.parallel.sharing import shared
from streamattn.pattern import UNBOUNDED
from streamattn.weights import attention_weights, combine_masks, in_window

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Window = tuple[int, int]  # widths to the left and right, UNBOUNDED where open


class FusedMultiHead(nn.Module):
    """The forward pass of a multi-head layer on the fused kernel, whoever makes and holds the parameters.

    Sizes, options and parameters are read off the attributes below; but for `num_kv_heads`, `causal` and
    `window_size` they are `torch.nn.MultiheadAttention`'s by name and meaning. There is no state and no
    constructor here, so that another class can put this forward pass in front of its own.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kdim: int
    vdim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    causal: bool
    window_size: int | tuple[int, int] | None
    out_proj: NonDynamicallyQuantizableLinear
    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`.

        Pass one tensor three times for self-attention, and one tensor as `key` and `value` for
        cross-attention, to share a projection.

        Args:
            query: [T, B, E], [B, T, E] with `batch_first`, or [T, E].
            key: [S, B, kdim], [B, S, kdim] or [S, kdim].
            value: [S, B, vdim], [B, S, vdim] or [S, vdim].
            key_padding_mask: [B, S], or [S] without a batch. bool: True = the key is hidden; floating: added
                to its scores, and differentiable.
            need_weights: also return the weights. They take memory for T * S entries of every head, which the
                output alone does not. Default True, as in torch.
            attn_mask: [T, S], or [B * num_heads, T, S] ([num_heads, T, S] without a batch). bool: True =
                hidden; floating: added to the scores, and differentiable. An entry at or below half of the
                dtype's minimum hides, in either mask and whatever the other holds; two floating masks are
                added in float32.
            average_attn_weights: average the returned weights over the heads. Default True.
            is_causal: attend causally (bottom-right). Needs no mask. Beside an `attn_mask` it is torch's hint
                that the mask is the causal one: where T = S the mask is not even read if neither a
                `key_padding_mask` nor the weights are wanted, as in torch, else both hold; where T and S
                differ the mask alone decides, for it may be aligned either way.

        Returns:
            `(out, weights)`. `out` is shaped as `query`. `weights`, None unless asked for, are [B, T, S]
            (averaged) or [B, num_heads, T, S], without B for inputs without a batch, in the dtype of `query`;
            S counts the keys that `add_bias_kv` and `add_zero_attn` append, which come last. They are the
            weights before dropout: a row sums to one, or to zero where no key is visible. Gradients flow
            through them.

        Raises:
            ValueError: shapes or devices that do not fit each other or the layer; ranks share a sequence
                (`parallel.sharing`), of which this layer would take its shard for all.
            TypeError: a nested or sparse tensor; an input of another dtype than the parameters', unless
                autocast makes them one; a mask that is neither bool nor floating.
        """
        self._check_inputs(query, key, value, key_padding_mask, attn_mask)
        if shared() is not None:
            raise ValueError(
                f"{type(self).__name__} can't be given one rank's shard of a sequence; take "
                "streamattn.parallel's attention for it, or leave the layer outside of "
                "streamattn.parallel.sharing"
            )
        batched = query.dim() == 3
        q, k, v, packed = self._project(query, key, value)
        q_len, kv_len = q.shape[2], k.shape[2]

        causal = self.causal
        if is_causal and attn_mask is None:
            causal = True
        elif is_causal and q_len == kv_len:
            causal = True
            if key_padding_mask is None and not need_weights:
                attn_mask = None

        key_mask, pair_mask = self._masks(key_padding_mask, attn_mask, batch=q.shape[0])
        window_size, window = self.window_size, resolve_window(self.window_size, causal)
        if self.bias_k is not None or self.add_zero_attn:
            k, v, key_mask, pair_mask = self._append_keys(q_len, k, v, key_mask, pair_mask, window)
            causal, window_size, window, packed = False, None, (UNBOUNDED, UNBOUNDED), None

        # A bool key mask beside another mask goes in as segments: their product [B, 1, T, S] is never formed.
        mask, segment_ids = pair_mask, None
        if pair_mask is not None and key_mask is not None and key_mask.dtype == torch.bool:
            q_segments = torch.zeros(q.shape[0], q_len, dtype=torch.int32, device=q.device)
            segment_ids = (q_segments, key_mask[:, 0, 0].to(torch.int32) - 1)
        else:
            mask = combine_masks(key_mask, pair_mask)

        options: dict[str, Any] = {
            "causal": causal,
            "window_size": window_size,
            "attn_mask": mask,
            "segment_ids": segment_ids,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if packed is not None and packed.requires_grad and not need_weights:
            out, lse = packed_attention(packed, num_kv_heads=self.num_kv_heads, **options)
        else:
            out, lse = attention(q, k, v, **options, return_lse=True)
        weights = None
        if need_weights:
            mask = combine_masks(key_mask, pair_mask)
            scale = 1.0 / math.sqrt(self.head_dim)
            weights = attention_weights(q, k, lse, scale=scale, window=window, attn_mask=mask)
            weights = (weights.mean(dim=1) if average_attn_weights else weights).to(query.dtype)
            weights = weights if batched else weights.squeeze(0)

        out = self.out_proj(rearrange(out, "b h t d -> b t (h d)"))
        if not batched:
            return out.squeeze(0), weights
        return (out if self.batch_first else out.transpose(0, 1).contiguous()), weights

    def extra_repr(self) -> str:
        """The sizes, and every option that is not at its default."""
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        options = {
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "kdim": (self.kdim, self.embed_dim),
            "vdim": (self.vdim, self.embed_dim),
            "dropout": (self.dropout, 0.0),
            "bias": (self.in_proj_bias is not None, True),
            "add_bias_kv": (self.bias_k is not None, False),
            "add_zero_attn": (self.add_zero_attn, False),
            "batch_first": (self.batch_first, False),
            "causal": (self.causal, False),
            "window_size": (self.window_size, None),
        }
        parts += [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        return ", ".join(parts)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Views q [B, Hq, T, D] and k, v [B, Hkv, S, D] of as few projections as the inputs allow.

        If one was enough, also that of them all, [B, T, Hq + 2 Hkv, D].
        """
        kv_dim = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, kv_dim, kv_dim]
        weight, bias = self.in_proj_weight, self.in_proj_bias  # read once: a parametrization may draw anew
        weights = (weight,) * 3 if weight is not None else self._separate_weights()
        inputs, packed = {"query": query, "key": key, "value": value}, None
        for (name, x), w in zip(inputs.items(), weights, strict=True):
            _check_dtype(name, x, w)
        if weight is not None and query is key and key is value:
            packed = F.linear(query, weight, bias)
            q, k, v = packed.split(sizes, dim=-1)
        elif weight is not None and key is value:
            w_q, w_kv = weight.split([self.embed_dim, 2 * kv_dim])
            b_q, b_kv = (None, None) if bias is None else bias.split([self.embed_dim, 2 * kv_dim])
            q = F.linear(query, w_q, b_q)
            k, v = F.linear(key, w_kv, b_kv).split(kv_dim, dim=-1)
        else:
            weights = weights if weight is None else weight.split(sizes)
            biases = (None, None, None) if bias is None else bias.split(sizes)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs.values(), weights, biases, strict=True))
        if query.dim() == 2:
            split = "t (h d) -> 1 h t d"
        else:
            split = "b t (h d) -> b h t d" if self.batch_first else "t b (h d) -> b h t d"
        q, k, v = (rearrange(x, split, d=self.head_dim) for x in (q, k, v))
        if packed is not None:
            packed = rearrange(packed, split, d=self.head_dim).transpose(1, 2)
        return q, k, v, packed

    def _separate_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.q_proj_weight is not None and self.k_proj_weight is not None
        assert self.v_proj_weight is not None
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _masks(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, batch: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both masks in `attention`'s meaning (True = visible): [B, 1, 1, S] and [1 or B, 1 or H, T, S]."""
        if key_padding_mask is not None:
            key_padding_mask = _shown(key_padding_mask).reshape(batch, 1, 1, key_padding_mask.shape[-1])
        if attn_mask is not None:
            attn_mask = _shown(attn_mask)
            if attn_mask.dim() == 2:
                attn_mask = attn_mask[None, None]
            else:
                attn_mask = rearrange(attn_mask, "(b h) t s -> b h t s", h=self.num_heads)
        return key_padding_mask, attn_mask

    def _append_keys(
        self,
        q_len: int,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        pair_mask: Tensor | None,
        window: _Window,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and masks with the learned and the zero key behind the sequence's own.

        Every query sees these. They stand outside the order of the sequence, so a causal or windowed call
        spells its rule out as a mask.
        """
        batch, num_kv_heads, kv_len, head_dim = k.shape
        keys, values = [k], [v]
        if self.bias_k is not None and self.bias_v is not None:
            for parts, bias in ((keys, self.bias_k), (values, self.bias_v)):
                bias = rearrange(bias, "1 1 (h d) -> 1 h 1 d", d=head_dim)
                parts.append(bias.expand(batch, -1, -1, -1).to(k.dtype))
        if self.add_zero_attn:
            zero = k.new_zeros(batch, num_kv_heads, 1, head_dim)
            keys.append(zero)
            values.append(zero)
        count = len(keys) - 1
        near = in_window(q_len, kv_len, window, k.device)
        if near is not None:
            pair_mask = combine_masks(near[None, None], pair_mask)
        key_mask, pair_mask = (
            # Appended: True, or 0.
            None if mask is None else F.pad(mask, (0, count), value=float(mask.dtype == torch.bool))
            for mask in (key_mask, pair_mask)
        )
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), key_mask, pair_mask

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        """Raise on shapes and dtypes that do not fit each other or the layer."""
        inputs = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (x, features) in inputs.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.is_nested:
                raise TypeError(
                    f"{name} must be a padded tensor, got a nested tensor; pad it with to_padded_tensor and "
                    "pass a key_padding_mask (nn.TransformerEncoder makes nested tensors in eval mode: build "
                    "it with enable_nested_tensor=False, set its use_nested_tensor to False, or give "
                    "patch_model the whole encoder)"
                )
            _check_dense(name, x)
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise ValueError(
                    f"query, key and value must all be 3-D (batched) or all 2-D (one sequence), got "
                    f"{query.dim()}-D, {key.dim()}-D and {value.dim()}-D; add or remove the batch dimension"
                )
            if x.shape[-1] != features:
                raise ValueError(
                    f"{name} must have {features} features in its last dimension, got shape {list(x.shape)}; "
                    "build the layer with the embed_dim, kdim and vdim of its inputs"
                )
        batched = query.dim() == 3
        axis = 0 if self.batch_first else 1
        layout = "[batch, length, features]" if self.batch_first else "[length, batch, features]"
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"key and value must agree in length and batch, got shapes {list(key.shape)} and "
                f"{list(value.shape)}; pass one value per key"
            )
        if batched and query.shape[axis] != key.shape[axis]:
            raise ValueError(
                f"query and key must agree in batch size, got shapes {list(query.shape)} and "
                f"{list(key.shape)}, read as {layout}; check batch_first={self.batch_first}"
            )
        batch = query.shape[axis] if batched else 1
        q_len, kv_len = (x.shape[1 - axis] if batched else x.shape[0] for x in (query, key))
        key_shapes = [(batch, kv_len)] if batched else [(kv_len,)]
        pair_shapes = [(q_len, kv_len), (batch * self.num_heads, q_len, kv_len)]
        _check_mask("key_padding_mask", key_padding_mask, key_shapes, query.device)
        _check_mask("attn_mask", attn_mask, pair_shapes, query.device)


class StreamMultiHeadAttention(FusedMultiHead):
    """Multi-head attention on the fused kernel, in the place of `torch.nn.MultiheadAttention`.

    ``out = concat_h(softmax(q_h k_h^T / sqrt(head_dim) + mask) v_h) W_out^T + b_out`` with
    ``head_dim = embed_dim / num_heads`` and q, k, v the projected inputs.

    `load_state_dict(mha.state_dict())` takes over a trained layer, with the same outputs and gradients.
    Differences:

    - A query that may see no key gives 0 (before the output projection), where torch gives NaN.
    - `is_causal=True` needs no mask, and leaves what `add_bias_kv` and `add_zero_attn` append in sight, as
      torch does where it returns weights; without them it hides that from all queries.
    - With dropout, the returned weights are those before dropout, so that each row still sums to one; torch
      returns them after it. Rates are rounded to 1/256.
    - Under autocast the returned weights are float32; torch's are of autocast's dtype.
    - Errors about bad input are ValueError or TypeError, not AssertionError.

    Args:
        embed_dim: features of the query and of the output, E.
        num_heads: query heads, a divisor of `embed_dim`.
        dropout: probability, in [0, 1), of dropping an attention weight in training. Default 0.
        bias: whether the input and output projections have a bias. Default True.
        add_bias_kv: append a learned key and value to every sequence; every query sees it. Default False.
        add_zero_attn: append a key and a value of zeros likewise. Default False.
        kdim: features of `key`. Default `embed_dim`.
        vdim: features of `value`. Default `embed_dim`.
        batch_first: inputs and outputs are [B, T, E] instead of [T, B, E]. Default False.
        device: device of the parameters.
        dtype: dtype of the parameters.
        num_kv_heads: key and value heads, a divisor of `num_heads`, each shared by a group of consecutive
            query heads. Default `num_heads`. The fused `in_proj_weight` is
            [E + 2 * num_kv_heads * head_dim, E].
        causal: every call is causal, aligned bottom-right: the last query sees all keys. Default False.
        window_size: every call sees a sliding window, as in `streamattn.attention`: an int W means the W last
            keys, the query's own included, and implies causal; a pair (left, right) is two-sided, -1 =
            unbounded. Default None: no window.

    Raises:
        ValueError: a dimension, head count, dropout rate or window that can't be.
        TypeError: a size that is no int, a rate that is no number, a window that is no int and no pair.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window_size: int | tuple[int, int] | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kdim, vdim = (embed_dim if size is None else size for size in (kdim, vdim))
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        _check_sizes(**sizes, kdim=kdim, vdim=vdim)
        _check_dropout(dropout)
        resolve_window(window_size, causal)  # raises on a window that can't be
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = kdim
        self.vdim = vdim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.causal = causal
        self.window_size = window_size

        def register(name: str, *shape: int, wanted: bool = True) -> None:
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)

        # Registered in torch's order, which optimizer state dicts count by.
        kv_dim = num_kv_heads * self.head_dim
        fused = self.kdim == embed_dim and self.vdim == embed_dim
        register("in_proj_weight", embed_dim + 2 * kv_dim, embed_dim, wanted=fused)
        register("q_proj_weight", embed_dim, embed_dim, wanted=not fused)
        register("k_proj_weight", kv_dim, self.kdim, wanted=not fused)
        register("v_proj_weight", kv_dim, self.vdim, wanted=not fused)
        register("in_proj_bias", embed_dim + 2 * kv_dim, wanted=bias)
        # torch's own class for this layer: tools that quantize every Linear are meant to pass it over.
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias, device, dtype)
        register("bias_k", 1, 1, kv_dim, wanted=add_bias_kv)
        register("bias_v", 1, 1, kv_dim, wanted=add_bias_kv)
        self._reset_own_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False: keeps `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` from their own attention.

        In eval mode both read the projection weights off their `self_attn` and never call it, unless this
        says that the projections are separate. That would ignore grouped heads, `causal` and `window_size`.
        """
        return False

    def reset_parameters(self) -> None:
        """Draw all parameters anew from the initial distribution, as after `to_empty` on a meta module."""
        self.out_proj.reset_parameters()
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        # The order of draws is torch's: the same seed gives the same layer.
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (numbers.Integral, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {size!r}; convert it with int()")
    if min(sizes.values()) <= 0:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{', '.join(sizes)} must be greater than 0, got {given}")
    embed_dim, num_heads, num_kv_heads = sizes["embed_dim"], sizes["num_heads"], sizes["num_kv_heads"]
    if embed_dim % num_heads != 0:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, got embed_dim={embed_dim} and num_heads={num_heads}"
            f"; choose num_heads among the divisors of {embed_dim}"
        )
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got num_heads={num_heads} and "
            f"num_kv_heads={num_kv_heads}; choose num_kv_heads among the divisors of {num_heads}"
        )


def _check_dropout(dropout: float) -> None:
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout must be a number in [0, 1), got {dropout!r}; pass 0.0 for none")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be a probability in [0, 1), got {dropout}; pass 0.0 for none")


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}; convert it with {name}.to_dense()")


def _check_dtype(name: str, x: Tensor, weight: Tensor) -> None:
    """Raises unless a projection takes `x`: a product is of one dtype, the parameters' or autocast's."""
    if x.dtype == weight.dtype:
        return
    dtypes = (x.dtype, weight.dtype)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        dtypes = tuple(cast if dtype in _FLOATING[:3] else dtype for dtype in dtypes)
    if dtypes[0] != dtypes[1] and weight.dtype in _FLOATING:  # a quantized weight takes what it takes
        layer = f", or the layer with layer.to({x.dtype})" if x.dtype in _FLOATING else ""
        raise TypeError(
            f"{name} must be {weight.dtype}, as the layer's parameters are, got {x.dtype}; "
            f"convert it with {name}.to({weight.dtype}){layer}"
        )


def _check_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]], device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(mask).__name__}")
    if mask.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested tensor; pad it with to_padded_tensor")
    _check_dense(name, mask)
    if mask.dtype != torch.bool and mask.dtype not in _FLOATING:
        remedy = f"{name}.float()" if mask.is_floating_point() else f"{name}.bool()"
        raise TypeError(
            f"{name} must be bool (True = hidden) or float16, bfloat16, float32 or float64 (added to the "
            f"scores), got {mask.dtype}; convert it with {remedy}"
        )
    if mask.device != device:
        raise ValueError(f"{name} must be on query's device {device}, got {mask.device}; move it")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{name} must have shape {expected}, got {list(mask.shape)}; give it the lengths of query "
            "and key, and check batch_first"
        )


def _shown(mask: Tensor) -> Tensor:
    """A mask of this layer in `attention`'s meaning: a bool one negated, a floating one as it is."""
    return ~mask if mask.dtype == torch.bool else mask
