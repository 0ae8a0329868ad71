"""`transformers.Trainer` for sequences that several processes share: context parallelism of whole models.

The processes form a mesh dp x cp: those of one cp group (neighbours by rank) get the same batches, each a
shard of every sequence's tokens; the groups get different ones, as processes do under DDP or FSDP, which
average gradients over all processes. `streamattn.parallel` makes the attention layers exact; what else a
model does must be done to each token alone, and `shared_logits` shows whether it is.

Labels are shifted before they are sharded, so that a shard's last token keeps the label that lies on another
rank, and positions go with their tokens. The loss is the sum over a rank's tokens times the number of
processes over the count of all tokens that have a label in the global batch, accumulated steps included; its
mean over the processes, and so the gradient, is that of one process on all of it.

Left out on purpose: losses that models make themselves (label smoothing, routers' auxiliary losses).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import PretrainedConfig, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from streamattn import parallel
from streamattn.checkpoints import RunTrainer

SHARED_TOLERANCE = 0.05
"""Of the largest logit: half precision stays far below it, a model that mixes tokens elsewhere far above."""

_IGNORED = -100


class SharedTrainer(RunTrainer):
    """A Trainer whose processes share sequences in groups.

    Args:
        group: this process's cp group, of neighbouring ranks.
        **options: those of ``transformers.Trainer``; the model's attention layers are patched.
    """

    def __init__(self, *, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(**options)
        self.group = group
        self.cp_size = dist.get_world_size(group)
        self.items: Tensor | None = None
        # What `compute_loss` returns is scaled for accumulation and for the mean over processes; so the
        # releases call a loss that has taken num_items_in_batch.
        self.model_accepts_loss_kwargs = True

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Sequences in a step, over all processes."""
        return self._train_batch_size * args.gradient_accumulation_steps * args.world_size // self.cp_size

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process's cp group."""
        with self._as_one_of_the_groups():
            return super().get_train_dataloader()

    @contextmanager
    def _as_one_of_the_groups(self) -> Iterator[None]:
        """While accelerate shares out batches, let it count cp groups and not processes."""
        state: Any = self.accelerator.state
        before = state.num_processes, state.process_index
        state.num_processes, state.process_index = (number // self.cp_size for number in before)
        try:
            yield
        finally:
            state.num_processes, state.process_index = before

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; counts the labels of all groups' batches."""
        found = super().get_batch_samples(*args, **kwargs)
        items = torch.zeros((), dtype=torch.int64, device=self.args.device)
        for batch in found[0]:
            items += (batch["labels"][:, 1:] != _IGNORED).sum().to(items.device)
        dist.all_reduce(items)
        self.items = items // self.cp_size
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Trainer's; with checkpointing, layers are computed again in its backward."""
        with parallel.sharing(args[1]["input_ids"].shape[1], self.group):
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The share of this process's tokens; see the module's docstring."""
        assert self.items is not None and not return_outputs
        return token_loss(model, inputs, self.group) * (dist.get_world_size() / self.items)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        *args: Any,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> EvalLoopOutput:
        """The loss on a data set: the mean over all of its labels.

        All groups go as many rounds; in the last one some repeat a sequence, without its labels.
        """
        arguments, dataset = self.args, dataloader.dataset
        model: Any = self.model
        if not self.is_in_train and arguments.bf16_full_eval:
            model.to(torch.bfloat16)
        elif not self.is_in_train and arguments.fp16_full_eval:
            model.to(torch.float16)
        model.eval()
        half = torch.bfloat16 if arguments.bf16 else torch.float16
        total = torch.zeros(2, dtype=torch.float64, device=arguments.device)
        groups, group = dist.get_world_size() // self.cp_size, dist.get_rank() // self.cp_size
        for inputs in eval_batches(dataset, arguments.eval_batch_size, groups, group):
            inputs = {name: x.to(arguments.device) for name, x in inputs.items()}
            enabled = arguments.bf16 or arguments.fp16
            with (
                torch.no_grad(),
                torch.autocast(arguments.device.type, half, enabled=enabled),
                parallel.sharing(inputs["input_ids"].shape[1], self.group),
            ):
                total[0] += token_loss(model, inputs, self.group)
            total[1] += (inputs["labels"][:, 1:] != _IGNORED).sum() / self.cp_size
        dist.all_reduce(total)
        loss = (total[0] / total[1]).item()
        size = len(dataset)  # type: ignore[arg-type]
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type]
            label_ids=None,
            metrics={f"{metric_key_prefix}_loss": loss},
            num_samples=size,
        )


def group_of(arguments: TrainingArguments, size: int) -> dist.ProcessGroup | None:
    """The cp group of this process; None for groups of one. All processes call this.

    Raises:
        ValueError: the processes don't make whole groups, or batches aren't drawn in each of them.
    """
    if size == 1:
        return None
    if arguments.world_size % size:
        raise ValueError(
            f"context_parallel_size: {arguments.world_size} process(es) make no groups of {size}; launch a "
            f"multiple of {size} with torchrun --nproc-per-node"
        )
    split = arguments.accelerator_config
    for key in ("dispatch_batches", "split_batches"):  # one process would deal batches out to all others
        if getattr(split, key, None):
            raise ValueError(f"accelerator_config.{key}: not served with context_parallel_size; leave it out")
    group: Any = dist.new_subgroups(size, timeout=arguments.ddp_timeout_delta)[0]
    return group


def check_loss(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that adds a loss of its own to that of the tokens."""
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"context_parallel_size: the auxiliary loss of {config.model_type}'s routers is not served; set "
            "output_router_logits to false, or leave the key out"
        )


def eval_batches(dataset: Any, batch_size: int, groups: int, group: int) -> Iterator[dict[str, Tensor]]:
    """Batches of one group of several, as many for each."""
    for start in range(0, len(dataset), batch_size * groups):
        first = start + group * batch_size
        rows = [dataset[min(i, len(dataset) - 1)] for i in range(first, first + batch_size)]
        batch = default_collate(rows)
        batch["labels"][max(len(dataset) - first, 0) :] = _IGNORED
        yield batch


def token_loss(model: nn.Module, inputs: dict[str, Any], group: dist.ProcessGroup) -> Tensor:
    """Sum of the cross entropies of this rank's tokens, float32; inside of `parallel.sharing`.

    Args:
        model: a causal language model with patched layers.
        inputs: ``input_ids`` and ``labels`` [B, T], the whole sequences'; labels are not shifted yet.
        group: the ranks that share them.
    """
    logits = model(**shard_inputs(inputs["input_ids"], group)).logits.float()
    labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=_IGNORED)
    labels = parallel.shard(labels, group, fill=_IGNORED).to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum")


def shard_inputs(tokens: Tensor, group: dist.ProcessGroup) -> dict[str, Any]:
    """A model's arguments for this rank's shard of tokens [B, T].

    The mask of ones keeps models from taking the jump between a shard's chunks for the start of a document.
    """
    ids = parallel.shard(tokens, group)
    places = parallel.positions(tokens.shape[1], group, tokens.device)
    return {
        "input_ids": ids,
        "position_ids": places.unsqueeze(0).expand(len(ids), -1),
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
    }


def shared_logits(model: nn.Module, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Logits [B, T, vocabulary] of tokens [B, T], on each of the ranks that compute them together."""
    with torch.no_grad(), parallel.sharing(tokens.shape[1], group):
        logits = model(**shard_inputs(tokens, group)).logits
    return parallel.unshard(logits, group, seq_len=tokens.shape[1])


def compare_shared(model: nn.Module, tokens: Tensor, expected: Tensor, group: dist.ProcessGroup) -> str:
    """What to say of the difference between `shared_logits` and those of one process.

    Raises:
        ValueError: it is more than rounding explains.
    """
    difference = (shared_logits(model, tokens, group).float() - expected).abs().max().item()
    size, largest = dist.get_world_size(group), expected.abs().max().item()
    if not difference <= SHARED_TOLERANCE * largest:
        raise ValueError(
            f"context_parallel_size: shared by {size} processes the logits of {type(model).__name__} differ "
            f"by {difference:.2e} of {largest:.2e}: it mixes tokens outside of its attention; leave the key "
            "out, or take another model"
        )
    return f"the same of {size} processes that share the sequence: {difference:.2e}"
