"""What a fine-tuning job prints at its end: losses, speed, memory, and a sample of the model's text."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed
from transformers.trainer_utils import TrainOutput

from streamattn.data import TokenBlocks
from streamattn.shared_trainer import SharedTrainer

SAMPLE_PROMPT, SAMPLE_LENGTH = 32, 64


def print_summary(
    trainer: Trainer,
    result: TrainOutput | None,
    evaluated: list[dict[str, Any]],
    loss: float,
    steps: int,
    seconds: float,
    began: float,
) -> None:
    """Print the table of results and, of a run that did not diverge, the sample.

    Args:
        trainer: after training.
        result: of `Trainer.train`; None if the checkpoint gone on from was of the last step.
        evaluated: the entries of the history that have a held-out loss.
        loss: the final held-out loss.
        steps: that this process has trained.
        seconds: that they took, without evaluation.
        began: `time.perf_counter()` when the job began.
    """
    arguments = trainer.args
    dataset = trainer.train_dataset
    assert isinstance(dataset, TokenBlocks)
    blocks = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    blocks //= trainer.cp_size if isinstance(trainer, SharedTrainer) else 1
    tokens = steps * blocks * dataset.blocks.shape[1]
    held_out_loss = f"{loss:.4f}"
    if evaluated and evaluated[0]["step"] < trainer.state.global_step:
        first = evaluated[0]["eval_loss"]
        held_out_loss += f" ({loss / first:.2f} of the first, {first:.4f})"
    table = Table(show_header=False, title="results")
    table.add_column()
    table.add_column(overflow="fold")  # a path is of no use cut short
    if result is not None:
        table.add_row("training loss", f"{result.training_loss:.4f} (mean over {steps} steps)")
    table.add_row("held-out loss", held_out_loss)
    table.add_row("held-out perplexity", f"{math.inf if loss > 700 else math.exp(loss):.2f}")
    if result is not None:
        speed = f"{tokens / seconds:,.0f} over {arguments.world_size} process(es), without evaluation"
        table.add_row("tokens/s", speed)
    minutes, rest = divmod(round(time.perf_counter() - began), 60)
    table.add_row("wall time", f"{minutes} min {rest} s with preparation, evaluation and saving")
    table.add_row("peak memory", _peak_memory(arguments.device))
    table.add_row("saved in", Text(str(arguments.output_dir)))  # brackets in a path are no markup
    console = Console()
    console.print(table)
    if not math.isfinite(loss):
        note = f"the run diverged: its held-out loss is {loss}, so there is no sample"
        console.print(f"{note}; try a smaller learning_rate", soft_wrap=True)
        return
    if trainer.is_fsdp_enabled:
        return  # a sharded model computes on all processes together
    prompt, continuation = _sample(trainer)
    console.print("sample (prompt, then | and what the model wrote):", style="bold")
    console.print(f"{prompt}|{continuation}", markup=False, highlight=False, soft_wrap=True)


def _peak_memory(device: torch.device) -> str:
    """Of this process: what torch allocated on its GPU, else its resident set."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return f"{peak / 2**30:.2f} GiB on {torch.cuda.get_device_name(device)}"
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there, KiB on Linux
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB resident"


def _sample(trainer: Trainer) -> tuple[str, str]:
    """The start of a held-out block and how the model goes on."""
    model, tokenizer, held_out = trainer.model, trainer.processing_class, trainer.eval_dataset
    assert isinstance(model, PreTrainedModel)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert isinstance(held_out, TokenBlocks)
    block = held_out[0]["input_ids"]
    prompt = block[: min(SAMPLE_PROMPT, len(block) // 2)].unsqueeze(0).to(model.device)  # [1, T]
    new_tokens = min(SAMPLE_LENGTH, len(block) - prompt.shape[1])
    set_seed(trainer.args.seed)
    model.eval()
    tokens = model.generate(  # type: ignore[operator]
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=50,
        temperature=0.8,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    read, written = tokens[0].split([prompt.shape[1], len(tokens[0]) - prompt.shape[1]])
    return str(tokenizer.decode(read)), str(tokenizer.decode(written))
