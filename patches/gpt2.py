"""GPT-2's attention layer on `streamattn.attention`, self- and cross-attention.

Contract: outputs and gradients of the eager layer, with every scale flag. ``reorder_and_upcast_attn`` is the
same mathematics, and the kernel accumulates in float32 anyway. Self-attention is causal unless a complete
mask comes, as a user's own 4-D one is: then that alone says who sees whom, but that older releases' eager
layers are causal under any mask. Attention weights, when asked for, are those before dropout.

Layout: q, k, v are [B, H, T, D] views of the fused projection's output, read in place, and their gradients
are written side by side as its gradient; the output's heads merge as a view.

Differs from eager: queries that see no key (padding) give 0 where eager gives the mean of the values. A loss
reads one such row: labels are shifted, so the last place of left padding predicts the first token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model

from patches import code, compact, hf, hosts, interface
from patches.registry import is_patched
from patches.views import plain

_ARGUMENTS = hf.argument_names(GPT2Attention.forward)
_MODEL_ARGUMENTS = hf.argument_names(GPT2Model.forward)
# The oldest releases hand a layer its own (k, v) and expect the grown pair back.
_TUPLE_CACHE = "layer_past" in _ARGUMENTS
_MASKS_ARE_MADE = interface.makes_masks(GPT2Model)  # by functions of transformers
_BODY = code.code_of(GPT2Model)
# The function for masks is told positions, too; and such releases hand bounds of documents on to the layers.
_TELLS_POSITIONS = _BODY is not None and code.calls_with(_BODY, "position_ids") > 1


def prepare_mask(model: GPT2Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a model with patched layers that makes its masks itself, or tells no positions."""
    if not hf.MASKS_PASS_UNCHANGED or hosts.leaves_documents_to_layers(model.config):
        return hf.refuse_documents(_MODEL_ARGUMENTS, model, args, kwargs)
    return None if _MASKS_ARE_MADE else interface.make_mask(_MODEL_ARGUMENTS, model, args, kwargs)


def refuse_bounds(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of what holds a `GPT2Model` in releases where that one isn't told bounds of documents.

    Args:
        model: `GPT2LMHeadModel` and its like.
        args: its arguments by position.
        kwargs: its arguments by name.

    Raises:
        ValueError: bounds, and no positions that would say the same.
    """
    if kwargs.get("cu_seq_lens_q") is None or not any(map(is_patched, model.modules())):
        return
    given = {**dict(zip(hf.argument_names(type(model).forward), args, strict=False)), **kwargs}
    if given.get("position_ids") is None:
        instead = "pass position_ids that start again with each document"
        raise ValueError(
            f"{type(model).__name__} got the bounds of packed documents (cu_seq_lens_q), which this release "
            "of transformers doesn't hand on to the layers; "
            f"{instead if hf.MASKS_PASS_UNCHANGED else 'pad them into rows of their own'}, or upgrade it"
        )


class StreamGPT2Attention(GPT2Attention):
    """`GPT2Attention` with the same state, running on `streamattn.attention`. Made by `patch_model`."""

    decoder = GPT2Model
    decoder_hook = None if _MASKS_ARE_MADE and _TELLS_POSITIONS else staticmethod(prepare_mask)
    holder_hook = None if _TELLS_POSITIONS else staticmethod(refuse_bounds)
    layer_idx: Any  # an int wherever there is a cache or a scale by layer

    @staticmethod
    def unsupported(module: GPT2Attention) -> str | None:
        """The reason why `module` can't be served, or None."""
        return hf.unsupported(
            module, GPT2Attention.forward, "attention_mask", "encoder_hidden_states", "encoder_attention_mask"
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The layer's output; same arguments and results as `GPT2Attention.forward` of the installed release.

        Args:
            hidden_states: [B, Tq, E].
            *args: the other arguments by position.
            **kwargs: the other arguments by name; `attention_mask` in any form HuggingFace makes.

        Returns:
            ``(out [B, Tq, E], weights [B, H, Tq, Tk] or None)``. The oldest releases get ``(out, present)``,
            present being ``(k, v)`` or None, and the weights behind them if asked for.

        Raises:
            ValueError: a cache or mask of a kind that can't be read, with what to pass instead.
        """
        if args:
            kwargs.update(zip(_ARGUMENTS[1:], args, strict=False))
        cache = hf.cache_of(kwargs)
        encoder_states = kwargs.get("encoder_hidden_states")
        crosses = encoder_states is not None
        filled = present = packed = None
        if crosses:
            q = self._heads(self._query_of_decoder(hidden_states))
            k, v = self._keys_of_encoder(encoder_states, cache)
            if q.shape[0] != k.shape[0] and 1 in (q.shape[0], k.shape[0]):  # one text for all of the other
                batch = max(q.shape[0], k.shape[0])
                q, k, v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
            mask = kwargs.get("encoder_attention_mask")
        else:
            fused = self._heads(self.c_attn(hidden_states))
            q, k, v = fused.chunk(3, dim=1)
            if cache is None:
                packed = fused.transpose(1, 2)
            mask = kwargs.get("attention_mask")
            if isinstance(cache, tuple):
                k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
            elif cache is not None:
                if isinstance(cache, EncoderDecoderCache):
                    cache = cache.self_attention_cache
                k, v, filled = hf.update_cache(cache, k, v, self.layer_idx, kwargs.get("cache_position"))
            present = (k, v) if kwargs.get("use_cache") else None
            if compact.is_plain(mask, k.shape[2]):
                mask = None
            elif q.shape[2] > 1 and not hf.is_complete(mask):
                mask = hosts.documents_by_positions(self, mask, kwargs, q.shape[2], k.shape[2])

        out, weights = hf.attend(
            q,
            k,
            v,
            causal=not crosses and (not hf.is_complete(mask) or self._adds_causality(filled, kwargs)),
            mask=mask,
            scale=self._scale(),
            dropout_p=self.attn_dropout.p if self.training else 0.0,
            filled=filled,
            cu_seqlens=None if crosses else kwargs.get("cu_seq_lens_q"),
            need_weights=hf.weights_wanted(self, kwargs, "cross_attentions" if crosses else "attentions"),
            packed=packed,
        )
        head_mask = kwargs.get("head_mask")
        if head_mask is not None:
            out, weights = _mask_heads(out, weights, head_mask)
        out = self.c_proj(out.transpose(1, 2).flatten(2))
        out = self.resid_dropout(out)
        if not _TUPLE_CACHE:
            return out, weights
        return (out, present, weights) if kwargs.get("output_attentions") else (out, present)

    def _heads(self, states: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D], a view; H is read off the width, which shrinks with pruned heads."""
        batch, length, _ = states.shape
        return states.view(batch, length, -1, self.head_dim).transpose(1, 2)

    def _scale(self) -> float:
        if hasattr(self, "scaling"):
            return self.scaling
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (self.layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale

    def _adds_causality(self, filled: Any, arguments: dict[str, Any]) -> bool:
        """Whether the unpatched layer hides later keys under any mask: by a buffer, where it runs as eager.

        Args:
            filled: As `hf.attend` takes it. Of a static cache the buffer would hide the end alone.
            arguments: The layer's keyword arguments, some of which older releases serve as eager alone.
        """
        if "bias" not in self._buffers or filled is not None:
            return False
        name = plain(self.config)._attn_implementation
        if name == "sdpa" and "head_mask" in _ARGUMENTS:
            return bool(arguments.get("output_attentions")) or arguments.get("head_mask") is not None
        return name == "eager"

    def _query_of_decoder(self, hidden_states: Tensor) -> Tensor:
        if not hasattr(self, "q_attn"):
            raise ValueError(
                "encoder_hidden_states came to a self-attention layer; build the model with "
                "config.add_cross_attention=True"
            )
        return self.q_attn(hidden_states)

    def _keys_of_encoder(self, encoder_states: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of cross-attention, [B, H, Tk, D]: computed once, then read from the cache."""
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                f"cross-attention needs an EncoderDecoderCache, got {type(cache).__name__}; pass "
                "EncoderDecoderCache(cache, DynamicCache()) or leave the cache to the model"
            )
        if cache is not None and cache.is_updated.get(self.layer_idx):
            stored: Any = cache.cross_attention_cache
            if hasattr(stored, "layers"):
                layer = stored.layers[self.layer_idx]
                return layer.keys, layer.values
            return stored.key_cache[self.layer_idx], stored.value_cache[self.layer_idx]
        k, v = self._heads(self.c_attn(encoder_states)).chunk(2, dim=1)
        if cache is not None:
            k, v, _ = hf.update_cache(cache.cross_attention_cache, k, v, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return k, v


def _mask_heads(out: Tensor, weights: Tensor | None, head_mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights scaled head by head, applied to the output they would have made."""
    if head_mask.dim() != 4 or head_mask.shape[2:] != (1, 1):
        raise ValueError(
            "head_mask must be one factor a head, [H] or [layers, H] in the call of the model, [1, H, 1, 1] "
            f"at the layer, got {list(head_mask.shape)}"
        )
    return out * head_mask, None if weights is None else weights * head_mask
