"""OLMo-2's attention layer on `streamattn.attention`.

Contract: outputs and gradients of the eager layer. Self-attention is causal unless a complete mask comes, as
a user's own 4-D one is: then that alone says who sees whom. The norms of q and k act over the full
projection, before the heads are split. On a GPU `qk_norm_rope` norms and rotates q and k in one pass, but not
where another library has replaced a norm or the rotary function, or somebody listens on a norm: there the
norms are called as modules, and the rotary function is looked up in the model's module each time. Projections
are always called as modules, since adapters wrap them.

Layout: q [B, Hq, T, D], k and v [B, Hkv, T, D]: grouped heads are never repeated.

Differs from eager: queries that see no key (padding) give 0 where eager gives the mean of the values. A loss
reads one such row: labels are shifted, so the last place of left padding predicts the first token. Attention
weights, when asked for, are those before dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2Model, Olmo2RMSNorm

from patches import hf, hosts, interface
from streamattn.prologue import qk_norm_rope

_ARGUMENTS = hf.argument_names(Olmo2Attention.forward)
_MODEL_ARGUMENTS = hf.argument_names(Olmo2Model.forward)
_ROTARY, _NORM = modeling_olmo2.apply_rotary_pos_emb, Olmo2RMSNorm.forward
_OWN_FORMULAS = _ROTARY.__module__ == _NORM.__module__ == modeling_olmo2.__name__
_ONE_PASS_DEVICE = "cuda"  # elsewhere the modules are called: PyTorch would compute the same steps
_LISTENERS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_documents(model: Olmo2Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model with patched layers: see `hf.refuse_documents`."""
    hf.refuse_documents(_MODEL_ARGUMENTS, model, args, kwargs)


class StreamOlmo2Attention(Olmo2Attention):
    """`Olmo2Attention` with the same state, running on `streamattn.attention`. Made by `patch_model`."""

    decoder = Olmo2Model
    decoder_hook = None if interface.makes_masks(Olmo2Model) else staticmethod(refuse_documents)

    @staticmethod
    def unsupported(module: Olmo2Attention) -> str | None:
        """The reason why `module` can't be served, or None."""
        return hf.unsupported(module, Olmo2Attention.forward, "position_embeddings", "attention_mask")

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The layer's output; arguments and results as `Olmo2Attention.forward` of the installed release.

        Args:
            hidden_states: [B, Tq, E].
            *args: the other arguments by position.
            **kwargs: the other arguments by name: `position_embeddings` (cos, sin), each [B, Tq, D];
                `attention_mask` in any form HuggingFace makes.

        Returns:
            ``(out [B, Tq, E], weights [B, Hq, Tq, Tk] or None)``.

        Raises:
            ValueError: a cache or mask of a kind that can't be read, with what to pass instead.
        """
        if args:
            kwargs.update(zip(_ARGUMENTS[1:], args, strict=False))
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        v = self._heads(self.v_proj(hidden_states))
        cos, sin = kwargs["position_embeddings"]
        if self._in_one_pass(q, k, cos):
            weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.variance_epsilon
            q, k = qk_norm_rope(q, k, *weights, cos, sin, head_dim=self.head_dim, eps=eps)
        else:
            q, k = self._heads(self.q_norm(q)), self._heads(self.k_norm(k))
            q, k = modeling_olmo2.apply_rotary_pos_emb(q, k, cos, sin)

        cache, filled = hf.cache_of(kwargs), None
        if cache is not None:
            position = kwargs.get("cache_position")
            k, v, filled = hf.update_cache(cache, k, v, self.layer_idx, position, sin=sin, cos=cos)
        mask = kwargs.get("attention_mask")
        if q.shape[2] > 1 and not hf.is_complete(mask):
            mask = hosts.documents_by_positions(self, mask, kwargs, q.shape[2], k.shape[2])
        out, weights = hf.attend(
            q,
            k,
            v,
            causal=not hf.is_complete(mask),
            mask=mask,
            scale=self.scaling,
            dropout_p=self.attention_dropout if self.training else 0.0,
            filled=filled,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
            need_weights=hf.weights_wanted(self, kwargs),
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights

    def _in_one_pass(self, q: Tensor, k: Tensor, cos: Tensor) -> bool:
        """Whether `qk_norm_rope` computes what the norms and the rotary function would, on this device."""
        return (
            q.device.type == _ONE_PASS_DEVICE
            and type(q) is type(k) is Tensor
            and q.dtype == k.dtype
            and cos.shape[1:] == (q.shape[1], self.head_dim)
            and not cos.requires_grad  # learned frequencies: qk_norm_rope has no gradient of them
            and _OWN_FORMULAS
            and modeling_olmo2.apply_rotary_pos_emb is _ROTARY
            and Olmo2RMSNorm.forward is _NORM
            and not _has_any_global_hook()
            and _is_plain(self.q_norm, q)
            and _is_plain(self.k_norm, k)
            and self.q_norm.variance_epsilon == self.k_norm.variance_epsilon
        )

    def _heads(self, states: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D], a view."""
        return states.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


def _is_plain(norm: nn.Module, x: Tensor) -> bool:
    """Whether calling a norm on x, a whole projection, is its class's formula and nothing else."""
    return (
        type(norm) is Olmo2RMSNorm
        and "forward" not in norm.__dict__
        and not any(getattr(norm, name) for name in _LISTENERS)
        and type(norm.weight) in (Tensor, nn.Parameter)
        and norm.weight.shape == x.shape[2:]
    )
