"""A training step without its numbers: what it computes, moves and holds, counted on fake tensors.

The model of a fine-tuning job, patched and under autocast as there, runs forward and backward on tensors that
have shapes and no storage (torch's FakeTensorMode), in a second or two for a model of any size, and every
operation is seen: its floating-point operations (torch.utils.flop_counter's formulas), the bytes that it
reads and writes, and the storages that it makes, from their first to their last moment. So nothing is assumed
of an architecture. What a GPU does otherwise than a CPU, on which the fake tensors are, is put in place:
autocast's list of operations in float32, dropout with its mask in one byte, and OLMo-2's norms and rotation
in one pass.

Left out on purpose: what the host and the allocator cost (launches, rounding, blocks that are kept unused),
and whatever kernels hold but attention's float32 sums.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PretrainedConfig

from patches import patch_model

# Of what autocast computes in float32 on CUDA (PyTorch's "CUDA Ops that can autocast to float32") and not on
# a CPU, what language models call.
_IN_FLOAT32 = {
    *("pow", "__pow__", "rsqrt", "reciprocal", "exp", "log", "softplus", "sum", "prod", "cumsum", "norm"),
    *("layer_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss"),
}

_PRODUCT = re.compile("m[mv](?![a-z])|matmul|convol|linear|einsum|dot")
"""In the names of operations whose time is that of their products."""


class Operation(NamedTuple):
    """One kernel, or call of a library: its name, floating-point operations, bytes read and written."""

    name: str
    flops: int
    bytes: int


class Attention(NamedTuple):
    """One call of attention, of all rows and query heads; the window as the op has it."""

    is_backward: bool
    batch: int
    num_heads: int
    head_dim: int
    window_left: int
    window_right: int


@dataclass
class Step:
    """What one micro-step does.

    Attributes:
        parameters: elements of each, in the model's order.
        layer_parameters: elements of the largest layer's.
        outside_parameters: elements of what belongs to no layer: embeddings, the last norm, the head.
        forward: operations of the forward and the loss, without attention.
        backward: those of the backward, and of layers computed again.
        attention: its calls.
        held: bytes that the forward leaves for the backward.
        peak: the most bytes in use beside the weights at any moment, gradients included where they are kept.
    """

    parameters: list[int]
    layer_parameters: int
    outside_parameters: int
    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    held: int = 0
    peak: int = 0


Workspace = Callable[[Attention, int], int]
"""Bytes that a call of attention holds while it runs, of the call and the tokens of a row in this process."""


class _AsOnGpu(TorchFunctionMode):
    """On CPU tensors, autocast and dropout as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and kwargs["training"]:  # it passes all but its input by name
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if getattr(func, "__name__", "") in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return func(*args, **kwargs)


def _bytes(x: Tensor) -> int:
    """Of the elements; of an expanded tensor those that are there."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


class _Counter(TorchDispatchMode):
    """Writes every operation into a `Step`."""

    def __init__(self, step: Step, workspace: Workspace) -> None:
        super().__init__()
        self.step, self.workspace = step, workspace
        self.into = step.forward
        self.live = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, formula = kwargs or {}, flop_registry.get(func.overloadpacket)
        if formula is None and _PRODUCT.search(func.name()):  # asked first: torch logs what fails inside
            what = "a mixture of experts" if "grouped" in func.name() else "a model with such products"
            raise NotImplementedError(f"{what} can't be planned yet: {func.name()}, which isn't counted")
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not made:
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        storages = {id(x.untyped_storage()) for x in given}
        fresh = [x for x in made if id(x.untyped_storage()) not in storages]
        for x in fresh:
            self._born(x.untyped_storage())
        summed = func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
        if not summed or args[0]._is_view():  # else autograd sums gradients in place, though never fake ones
            self.step.peak = max(self.step.peak, self.live)
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        if "window_left" in named:
            self._attention(named if "dout" in named else {**named, "out": made[0]}, "dout" in named)
        elif (fresh or func._schema.is_mutable) and "empty" not in func.name():
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
            written = made if func._schema.is_mutable else fresh
            self.into.append(Operation(func.name(), flops, sum(map(_bytes, (*given, *written)))))
        return out

    def _attention(self, named: dict[str, Any], is_backward: bool) -> None:
        batch, heads, length, head_dim = named["out"].shape
        window = named["window_left"], named["window_right"]
        call = Attention(is_backward, batch, heads, head_dim, *window)
        self.step.attention.append(call)
        self.step.peak = max(self.step.peak, self.live + self.workspace(call, length))

    def _born(self, storage: Any) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.live -= size


def trace(
    config: PretrainedConfig,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    *,
    workspace: Workspace,
    checkpointing: bool = False,
    sharded: bool = False,
    accumulates: bool = False,
    shared: bool = False,
    gpu: bool = True,
) -> Step:
    """One micro-step of one process.

    Args:
        config: of the model.
        batch: rows.
        tokens: of each row in this process.
        dtype: that autocast computes in; float32: none.
        workspace: bytes of a call of attention.
        checkpointing: layers keep their inputs alone, and are computed again.
        sharded: as FSDP2 does it: weights come in ``dtype``, and a gradient leaves as soon as it is there.
        accumulates: gradients are there already; they are not part of the peak then.
        shared: the loss is `shared_trainer.token_loss`'s.
        gpu: what a GPU does; False: what a CPU does, where all of it can be measured without one.

    Raises:
        NotImplementedError: a product whose floating-point operations torch has no formula for.
        Exception: whatever else a model raises on sizes, dtypes or operations that don't fit.
    """
    half, as_there = dtype != torch.float32, _AsOnGpu if gpu else nullcontext
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(config)
        model.loss_type = "ForCausalLM"
        model.config.use_cache = False
        patch_model(model)
        for module in model.modules():
            if gpu and hasattr(module, "_in_one_pass"):  # OLMo-2's, which takes no fake tensor by itself
                module._in_one_pass = lambda *args: True
        if checkpointing:
            # A function mode isn't on while the backward runs: what is computed again there needs its own.
            options = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), as_there())}
            newest = hasattr(model, "activation_checkpointing_enable")
            getattr(model, f"{'activation' if newest else 'gradient'}_checkpointing_enable")(options)
        model.train()
        layers = max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len)
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        parameters = [p.numel() for p in model.parameters()]
        step = Step(parameters, max(sizes), sum(parameters) - sum(sizes))
        for parameter in model.parameters():
            if sharded:
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            elif accumulates:
                parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        counter = _Counter(step, workspace)
        with counter, as_there():
            loss = _loss(model, ids, torch.autocast("cpu", dtype) if half else nullcontext(), shared)
            step.held, counter.into = counter.live, step.backward
            loss.backward()
    return step


def _loss(model: Any, ids: Tensor, autocast: Any, shared: bool) -> Tensor:
    """As Trainer's, whose accelerate turns outputs into float32, and as `shared_trainer.token_loss`."""
    inputs = {"attention_mask": torch.ones_like(ids)} if shared else {"labels": ids}
    with autocast:
        outputs = model(input_ids=ids, **inputs)
    logits = outputs.logits.float()
    if not shared:
        return outputs.loss
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
