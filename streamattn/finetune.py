"""Fine-tune a causal language model with StreamAttn patched in.

``torchrun --nproc-per-node N -m streamattn.finetune configs/<name>.yaml [--key value ...]``, or
``streamattn finetune ...`` in one process. The loop, DDP, precision, schedule, logging, evaluation and
checkpoints are ``transformers.Trainer``'s; `streamattn.job` reads the job, `streamattn.data` the text,
`streamattn.processes` joins the others and notices their loss, `streamattn.run_folder` minds the output
folder and finds the checkpoint to go on from, `streamattn.summary` prints the results, and this file builds
the trainer.

A mistake in the job or in the launch ends the process with one line on stderr and status 2, before training,
and leaves ``output_dir`` as it was; of several processes one speaks. A checkpoint that can't be written ends
it in one line too, which says how to go on, and so do a process that is lost (status 1) and SIGTERM (143).
No run overwrites another: an unfinished one goes on or is left alone, a finished one, or with ``--resume``
one that can't go on, is moved aside when the first step comes next.

Left out on purpose: a training loop.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from patches import patch_model, patch_report
from streamattn import processes
from streamattn.checkpoints import (
    RecordWorldSize,
    RunTrainer,
    blocks_of_step,
    check_same_shape,
    last_checkpoint,
    trainer_state,
)
from streamattn.data import (
    TokenBlocks,
    hub_or_cache,
    pack,
    read_blocks,
    read_documents,
    train_tokenizer,
    write_blocks,
)
from streamattn.job import (
    Job,
    check_batches,
    check_causal,
    job_keys,
    load_pretrained,
    load_shape,
    one_line,
    read_job,
)
from streamattn.run_folder import (
    Finished,
    RunFolder,
    cannot_go_on,
    cannot_write,
    checkpoint_to_resume,
    last_step,
    writing,
)
from streamattn.shared_trainer import SharedTrainer, check_loss, compare_shared, group_of
from streamattn.summary import print_summary

COMPARED_TOKENS = 512


class Refused(ValueError):
    """The job can't be started as it was asked for, or what it trains can't be saved."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job.

    Args:
        argv: ``CONFIG [--key value ...]``; None = the process's arguments.

    Returns:
        The exit status: 0; 2 after a mistake and 130 after Ctrl-C, each printed as one line. Where another
        process is lost, or after SIGTERM, the process ends here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print("usage: streamattn finetune CONFIG.yaml [--key value ...] [--resume [CHECKPOINT]]")
        print(f"keys: {', '.join(sorted(job_keys()))}, and every field of transformers.TrainingArguments")
        return 0 if arguments else 2
    began = time.perf_counter()
    status, job, folder, trainer = 0, None, None, None
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        try:
            job = read_job(arguments)
            folder = RunFolder(job, os.environ)
            processes.join(job)
            with hub_or_cache(job.model, job.tokenizer, job.data):
                trainer, checkpoint = build_trainer(job, folder)
        except (ValueError, OSError) as error:
            raise Refused(one_line(error)) from error
        except RuntimeError as error:
            if (why := processes.loss(error)) is not None:
                processes.end(1, lambda: f"streamattn finetune: {why}; give the command again")
            raise
        # Also around what is said of a loss: torchrun's SIGTERM comes while this process is about to speak.
        with _stopping(job, folder, trainer):
            try:
                train(trainer, checkpoint, began)
            except (Refused, Finished):
                raise
            except Exception as error:
                if (why := processes.loss(error)) is not None:
                    processes.end(1, partial(_farewell, why, job, folder, trainer))
                if (line := cannot_write(error, folder.path)) is None:
                    raise
                raise Refused(f"{line}; {_way_on(job, trainer)}") from error
    except Refused as error:
        processes.let_the_first_speak()
        print(f"streamattn finetune: {one_line(error)}", file=sys.stderr)
        status = 2
    except processes.RefusedElsewhere:
        processes.let_the_first_speak(everywhere=True)
        status = 2
    except Finished as note:
        if speaks:
            print(note)
    except KeyboardInterrupt:
        if speaks:
            print(f"streamattn finetune: interrupted; {_way_on(job, trainer)}", file=sys.stderr)
        status = 130
    finally:
        if folder is not None:
            folder.close()
    # DDP's reducer must not be the last to hold the process group: it would keep the GIL while it waits for
    # Gloo's thread, which may wait for the GIL.
    del trainer
    gc.collect()
    processes.leave()
    return status


def build_trainer(job: Job, folder: RunFolder) -> tuple[Trainer, str | None]:
    """Everything up to the first step: arguments, tokenizer, blocks of text, the patched model.

    Args:
        job: the job.
        folder: its ``output_dir``; the caller closes it.

    Returns:
        The trainer, and the checkpoint to go on from.

    Raises:
        ValueError: the job asks for something that doesn't fit together.
        OSError: a process group that can't be joined.
        RefusedElsewhere: another process found the mistake.
        Finished: there is nothing left to do, and nothing was touched.
    """
    with _refusing("transformers.TrainingArguments"):
        values: dict[str, Any] = job.training | {"use_cpu": processes.uses_cpu(job)}
        if not processes.joined():  # one process: accelerate would ask the backend for a group
            values["ddp_backend"] = None
        arguments = TrainingArguments(**values)
    group = group_of(arguments, job.context_parallel_size)
    checkpoint, starts = checkpoint_to_resume(job, arguments, folder)
    set_seed(arguments.seed)
    if job.model is not None:
        config = load_pretrained(AutoConfig, "model", job.model)
    else:
        config = load_shape(job.shape or "", beside=job.config.parent)
    if checkpoint is not None:
        check_same_shape(checkpoint, config)
    text, mistake = None, None
    with arguments.main_process_first(local=arguments.save_on_each_node, desc="tokenizing"):
        place = folder.prepared if starts else folder.path
        try:
            text = _prepare_text(job, arguments, config, checkpoint, place)
        except Exception as error:
            mistake = error
    processes.raise_in_one_process(mistake)
    assert text is not None
    tokenizer, train_blocks, held_out = text
    if job.model is not None:
        # Training keeps float32 weights, whatever the file holds; bf16: true computes in bfloat16 from them.
        model = load_pretrained(AutoModelForCausalLM, "model", job.model, config=config).float()
    else:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        with _refusing(f"shape: {job.shape}"):
            try:
                model = AutoModelForCausalLM.from_config(config)
            except KeyError as error:  # from a table of names, the activations' for one
                texts = {key: value for key, value in config.to_dict().items() if isinstance(value, str)}
                fields = [key for key, value in texts.items() if value in error.args]
                if not fields:
                    raise
                raise ValueError(f"{' or '.join(fields)}: unknown name {error}") from error
            _logits(model, torch.zeros(1, 2, dtype=torch.long), arguments)  # sizes that don't fit fail here
    check_causal(model.config)
    if group is not None:
        check_loss(model.config)
    check_batches(arguments, len(train_blocks), len(held_out), job.context_parallel_size)
    # From here on a bar would be one of a checkpoint's saving.
    disable_progress_bar()
    _spare_warnings(model)
    console = Console(quiet=arguments.process_index != 0)
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"{type(model).__name__}, {count / 1e6:.1f} M parameters, vocabulary {config.vocab_size}; "
        f"{len(train_blocks)} blocks of {train_blocks.blocks.shape[1]} tokens, {len(held_out)} held out",
        soft_wrap=True,
    )
    if job.patch:
        _patch(model, held_out, arguments, console, group)
    batch = blocks_of_step(arguments, job.context_parallel_size)
    trainer_class: Any = RunTrainer if group is None else partial(SharedTrainer, group=group)
    with _refusing("transformers.Trainer"):
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=train_blocks,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=default_data_collator,
            callbacks=[RecordWorldSize(arguments.world_size, batch)],
        )
    # Before all others: TensorBoard's would write into a folder that is about to move.
    trainer.callback_handler.callbacks.insert(0, _Begun(folder if starts else None, console))
    trainer.remove_callback(PrinterCallback if arguments.disable_tqdm else ProgressCallback)
    trainer.add_callback(_Losses() if arguments.disable_tqdm else _LossesAndBar())
    return trainer, checkpoint


@contextmanager
def _refusing(what: str, begun: _Begun | None = None) -> Iterator[None]:
    """Until training has begun, turn any error into a `Refused` of one line that starts with ``what``."""
    try:
        yield
    except (Refused, Finished):
        raise
    except Exception as error:  # which one differs between releases, and from one key to the next
        if begun is not None and begun.yes:
            raise
        raise Refused(f"{what}: {one_line(error)}") from error


def _spare_warnings(model: PreTrainedModel) -> None:
    """Say what transformers would rightly guess, but with a warning."""
    # It looks for the kind of loss in the class's name; GPT2LMHeadModel's has none.
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    # A tied head isn't missing from a checkpoint.
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    model._keys_to_ignore_on_save = tied | set(model._keys_to_ignore_on_save or ())


def _prepare_text(
    job: Job, arguments: TrainingArguments, config: PretrainedConfig, checkpoint: str | None, folder: Path
) -> tuple[PreTrainedTokenizerBase, TokenBlocks, TokenBlocks]:
    """Tokenizer, training and held-out blocks, in ``folder``.

    Made by the main process of a run that starts, read back by the others and by a run that goes on.
    """
    longest = getattr(config, "max_position_embeddings", None)
    seq_len = job.seq_len or longest
    if seq_len is None:
        raise ValueError(f"seq_len: expected a number, for {type(config).__name__} names no longest sequence")
    if longest is not None and seq_len > longest:
        raise ValueError(f"seq_len: expected at most the model's {longest} positions, got {seq_len}")
    vocab_size, pretrained = getattr(config, "vocab_size", None), job.tokenizer or job.model
    if vocab_size is None:
        raise ValueError(f"expected a causal language model, {type(config).__name__} has no vocab_size")
    made_from = {"data": job.data, "seq_len": seq_len, "tokenizer": pretrained, "vocab_size": vocab_size}
    fresh = arguments.should_save and checkpoint is None
    blocks = None if fresh else read_blocks(folder / "blocks", made_from)
    if blocks is None and not arguments.should_save:
        raise ValueError(
            f"output_dir: expected the main process's text in {folder / 'blocks'}, which is not "
            "there; put output_dir on a file system that all nodes share"
        )
    texts, held_out_texts = read_documents(job.data, leave_out=job.output_dir) if blocks is None else ([], [])

    if pretrained is not None:
        tokenizer = load_pretrained(AutoTokenizer, "tokenizer", pretrained)
    elif fresh:
        tokenizer = train_tokenizer(texts, vocab_size)
        with writing(job.output_dir):
            tokenizer.save_pretrained(folder / "tokenizer")
    else:
        trained = folder / "tokenizer"
        trained = str(trained) if trained.is_dir() else checkpoint or ""
        tokenizer = load_pretrained(PreTrainedTokenizerFast, "tokenizer", trained)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: expected one with an end-of-text token, {pretrained!r} has none")
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"tokenizer: {len(tokenizer)} tokens but the model's vocabulary holds {vocab_size}; pass a "
            "tokenizer and a model that belong together"
        )
    if checkpoint is not None:
        saved = load_pretrained(AutoTokenizer, "resume", checkpoint)
        if saved.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"tokenizer: not the vocabulary of {checkpoint}; go on with the same tokenizer")
    if blocks is None:
        packed = [pack(part, tokenizer, seq_len) for part in (texts, held_out_texts)]
        for name, part in zip(("training", "held-out"), packed, strict=True):
            if not len(part):
                raise ValueError(
                    f"data: the {name} part of {job.data or 'the standard library'!r} is shorter than one "
                    f"block of {seq_len} tokens; give more text or a smaller seq_len"
                )
        with writing(job.output_dir):
            write_blocks(folder / "blocks", made_from, *packed)
        blocks = TokenBlocks(packed[0]), TokenBlocks(packed[1])
    return tokenizer, *blocks


def _patch(
    model: PreTrainedModel,
    held_out: TokenBlocks,
    arguments: TrainingArguments,
    console: Console,
    group: torch.distributed.ProcessGroup | None,
) -> None:
    """Patch ``model`` and print what changed: layers, and logits of one real sequence, also of a group's."""
    model.to(arguments.device)  # type: ignore[arg-type]
    tokens = held_out[0]["input_ids"][:COMPARED_TOKENS].unsqueeze(0).to(arguments.device)  # [1, T]
    before = _logits(model, tokens, arguments)
    try:
        patch_model(model)
    except ValueError as error:
        # Its own remedies are for Python. Of the layers, each on an indented line, one stands for all.
        what, *lines = str(error).splitlines()
        layers = [line.strip() for line in lines if line.startswith(" ")]
        what += f" {layers[0]}" if layers else ""
        what += f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
        raise ValueError(f"patch: {what}; pass --patch false, or take another model") from error
    after = _logits(model, tokens, arguments)
    console.print(str(patch_report(model)), markup=False, highlight=False, soft_wrap=True)
    difference = (after - before).abs().max().item()
    note = f"largest logit {before.abs().max():.2e}"
    if difference == 0.0 and arguments.device.type == "cpu":
        note += "; on the CPU PyTorch's own kernel computes both"
    console.print(
        f"largest logit difference to the unpatched model on {tokens.shape[1]} tokens of held-out text: "
        f"{difference:.2e} ({note})",
        soft_wrap=True,
    )
    if group is not None:
        with _precision(arguments):
            note = compare_shared(model, tokens, after, group)
        console.print(note, soft_wrap=True)


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: torch.Tensor, arguments: TrainingArguments) -> torch.Tensor:
    """[1, T, vocabulary] float32, computed in the precision that training uses."""
    model.eval()
    with _precision(arguments):
        return model(input_ids=tokens, use_cache=False).logits.float()


def _precision(arguments: TrainingArguments) -> torch.autocast:
    """The precision that training uses."""
    half = torch.bfloat16 if arguments.bf16 else torch.float16
    return torch.autocast(arguments.device.type, dtype=half, enabled=arguments.bf16 or arguments.fp16)


class _Losses(TrainerCallback):
    """Prints a line for each step that Trainer logs, without the times, which the results have."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        names = {"eval_loss": "held-out loss", "grad_norm": "gradient norm"}
        shown = [
            f"{names.get(key, key.replace('_', ' '))} {value:.4g}"
            for key, value in logs.items()
            if isinstance(value, int | float) and not key.endswith(("epoch", "runtime", "per_second", "flos"))
        ]
        if state.is_world_process_zero and "train_runtime" not in logs:
            step = f"{state.global_step:{len(str(state.max_steps))}}/{state.max_steps}"
            self.write(f"step {step}: {', '.join(shown)}")

    def write(self, line: str) -> None:
        print(line, flush=True)


class _LossesAndBar(_Losses, ProgressCallback):
    """The same above Trainer's bar."""

    def write(self, line: str) -> None:
        (print if self.training_bar is None else self.training_bar.write)(line)


class _Begun(TrainerCallback):
    """Knows whether everything is set up and the first step comes next; only then makes room for the run.

    It stops a run that has no step left, of which Trainer would do one more.

    Args:
        folder: of a run that starts there; None for one that goes on.
        console: where to say what was moved.
    """

    yes = False

    def __init__(self, folder: RunFolder | None, console: Console) -> None:
        self.folder, self.console = folder, console

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > state.max_steps:
            raise Refused(
                f"resume: the checkpoint is at step {state.global_step} but this job ends at step "
                f"{state.max_steps}; pass a larger max_steps or num_train_epochs"
            )
        if self.folder is not None and not self.yes:  # auto_find_batch_size begins again
            # Each process has opened its blocks by now, for DDP was set up by all of them together.
            with (
                args.main_process_first(local=args.save_on_each_node, desc="taking the output folder"),
                _refusing("output_dir"),
            ):
                try:
                    notes = self.folder.take() if args.should_save else []
                except ValueError as error:  # it names the key itself
                    raise Refused(one_line(error)) from error
                for note in notes:
                    self.console.print(note, markup=False, soft_wrap=True)
        if state.global_step == state.max_steps:
            raise Finished(args.output_dir, state.global_step)
        self.yes = True


def _begun(trainer: Trainer) -> _Begun:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, _Begun))


def _way_on(job: Job | None, trainer: Trainer | None) -> str:
    """What to do when a run has ended too early."""
    if job is None or trainer is None or not _begun(trainer).yes:
        return "no step was trained, so give the same command again"  # a checkpoint may be an earlier run's
    found, _ = last_checkpoint(job.output_dir)
    if found is not None:
        return f"go on from {found} with --resume"
    if (reason := cannot_go_on(job.output_dir)) is not None:
        return f"the run can't go on ({reason}); --resume moves it aside and starts from the beginning"
    return "there is no checkpoint yet, so start again"


def _stopping(job: Job, folder: RunFolder, trainer: Trainer) -> AbstractContextManager[None]:
    """While it trains, SIGTERM ends the process with a line, unless Trainer makes a checkpoint of it."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        return nullcontext()
    why = "stopped by SIGTERM, as when another process of the launch is lost or the job is cancelled"
    return processes.ending_on_sigterm(partial(_farewell, why, job, folder, trainer))


def _farewell(why: str, job: Job, folder: RunFolder, trainer: Trainer) -> str:
    launcher = os.environ.get("TORCHELASTIC_RUN_ID") is not None
    way_on = "torchrun starts it again" if launcher and not folder.last_try else _way_on(job, trainer)
    return f"streamattn finetune: {why}; {way_on}"


def train(trainer: Trainer, checkpoint: str | None, began: float | None = None) -> None:
    """Train, evaluate, save, and print the results.

    Args:
        trainer: of `build_trainer`, and
        checkpoint: what it returned with it.
        began: `time.perf_counter()` when the job began; None: now.

    Raises:
        Refused: an optimizer, a schedule or a checkpoint that transformers can't begin with.
        Finished: the checkpoint is of the last step, and the model of that step is saved already.
    """
    arguments = trainer.args
    start = time.perf_counter()
    began = start if began is None else began
    first_step = first_logged = 0
    if checkpoint is not None:
        state = trainer_state(Path(checkpoint))
        first_step, first_logged = state["global_step"], len(state["log_history"])
    try:
        from_where = "" if checkpoint is None else f", resuming from {checkpoint}"
        with _refusing(f"transformers.Trainer{from_where}", _begun(trainer)):
            result = trainer.train(resume_from_checkpoint=checkpoint)
    except Finished:
        if last_step(Path(arguments.output_dir or "")) == trainer.state.global_step:
            raise
        # Killed between its last checkpoint and its end: what is left is to evaluate and save.
        trainer.is_in_train = False
        if arguments.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
        result = None
    seconds = time.perf_counter() - start
    history = trainer.state.log_history
    seconds -= sum(entry.get("eval_runtime", 0.0) for entry in history[first_logged:])
    evaluated = [entry for entry in history if "eval_loss" in entry]
    up_to_date = bool(evaluated) and evaluated[-1]["step"] == trainer.state.global_step
    trainer.save_model()  # first: with bf16_full_eval an evaluation leaves half precision behind
    final = evaluated[-1] if up_to_date and not arguments.load_best_model_at_end else trainer.evaluate()
    trainer.save_state()
    if result is not None:
        trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", final)
    if trainer.is_world_process_zero():
        steps = trainer.state.global_step - first_step
        print_summary(trainer, result, evaluated, final["eval_loss"], steps, seconds, began)


if __name__ == "__main__":
    sys.exit(main())
