"""Whole models: what is timed, judged, refused and written, on small models and the CPU."""

from __future__ import annotations

import csv
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from streamattn import cli
from streamattn.bench import contestants, models
from streamattn.bench.contestants import CONTESTANTS
from streamattn.bench.e2e import CASES
from streamattn.bench.models import Entry, ModelCase, ModelRow, measure, milliseconds, training_step, turn
from streamattn.bench.resume import Died

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "set_attn_implementation"),
    reason="this transformers can't change a model's attention",
)
TRAIN = ModelCase("t", "train", "gpt2-nano", 1, 2, 16, dtype="float32", warmup=1)
GENERATE = replace(TRAIN, work="generate", new_tokens=3)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Sleeps(torch.autograd.Function):
    """Forward takes 20 ms, backward 40."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.04)
        return grads[0] * 2


def test_sleeps_of_known_length_are_timed() -> None:
    weight = nn.Parameter(torch.ones(1))

    def model(input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=Sleeps.apply(weight).sum())  # pyright: ignore[reportOptionalMemberAccess]

    optimizer = torch.optim.AdamW([weight], lr=0.0)
    optimizer.register_step_post_hook(lambda *args: time.sleep(0.01))
    step = training_step(TRAIN, "cpu", model, torch.zeros(1, dtype=torch.long), optimizer)
    step()
    least = [min(times) for times in zip(*(milliseconds(step()) for _ in range(5)), strict=True)]
    for time_of_part, slept in zip(least, (20.0, 40.0, 10.0), strict=True):
        assert slept <= time_of_part < slept + 9.0
    assert weight.grad is None
    assert weight.item() == 1.0, "at a rate of 0 every step does the same"


@pytest.mark.parametrize("case", [TRAIN, GENERATE], ids=lambda case: case.work)
def test_every_contestant_is_timed_and_judged(case: ModelCase) -> None:
    rows = measure(case, CONTESTANTS, "cpu", repeats=2, rounds=2)
    assert [row.contestant for row in rows] == list(CONTESTANTS)
    medians = {row.contestant: row.step_median_ms or 0.0 for row in rows}
    backends = {row.contestant: row.backend for row in rows if row.backend}
    assert backends == {"eager": "math", "sdpa": "flash", "streamattn": "flash"}
    for row in rows:
        if row.contestant == "sdpa_cudnn":
            assert (row.status, row.steps) == ("unsupported: cudnn needs an NVIDIA GPU", 0)
            continue
        assert (row.status, row.steps, row.device, row.peak_mib) == ("ok", 4, "CPU", None)
        assert row.step_median_ms
        tokens = 2 * (3 if case.work == "generate" else 16)
        assert row.tokens_per_s == pytest.approx(tokens / row.step_median_ms * 1000, rel=1e-2)
        assert row.speedup == pytest.approx(medians["sdpa"] / row.step_median_ms, rel=1e-2)
        if row.contestant == "removed":
            assert row.error is None
        else:
            assert row.error is not None and row.error < 1e-4
        if case.work == "train":
            assert row.step_mean_ms and row.forward_mean_ms and row.backward_mean_ms and row.optimizer_mean_ms
            total = row.forward_mean_ms + row.backward_mean_ms + row.optimizer_mean_ms
            assert row.step_mean_ms == pytest.approx(total, rel=1e-2)
        else:
            assert row.forward_mean_ms is None


@pytest.mark.parametrize("shape", ["gpt2-nano", "olmo2-nano"])
def test_equal_layers_are_compiled_once(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(layer: nn.Module) -> None:
        layer._compiled_call_impl = torch.compile(layer._call_impl, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = replace(TRAIN, shape=shape, layers=3, mode="compiled-layers")
    rows = measure(case, ["sdpa", "streamattn"], "cpu", repeats=1, rounds=1)
    assert [(row.status, row.graph_breaks) for row in rows] == [("ok", 0)] * 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each attention"


def test_layers_are_not_compiled_to_generate() -> None:
    (row,) = measure(replace(GENERATE, mode="compiled-layers"), ["sdpa"], "cpu", repeats=1, rounds=1)
    assert row.status.startswith("unsupported: layers are compiled where they are trained")


def test_an_implementation_whose_package_is_missing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"flash_attention_2", "flash_attention_3", "flex_attention"} == set(contestants.ON_DEMAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        rows = measure(TRAIN, ["sdpa", "flash_attention_2"], "cpu", repeats=1, rounds=1)
    assert (rows[0].status, rows[1].step_median_ms) == ("ok", None)
    assert rows[1].status.startswith("ImportError")


def test_dropout_and_autocast() -> None:
    case = replace(TRAIN, dropout=0.5, dtype="bfloat16", shape="olmo2-nano")
    rows = measure(case, ["sdpa", "streamattn"], "cpu", repeats=1, rounds=1)
    assert [row.status for row in rows] == ["ok", "ok"]
    assert rows[1].error is not None and rows[1].error < 0.05, "judged without dropout"


@pytest.mark.parametrize("case", [TRAIN, GENERATE], ids=lambda case: case.work)
def test_a_wrong_attention_gets_no_figures(case: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(model: Any) -> Any:
        contestants.register("removed", contestants.no_attention)
        model.set_attn_implementation("removed")
        return model

    monkeypatch.setattr(contestants, "patch_model", blind)
    right, wrong = measure(case, ["sdpa", "streamattn"], "cpu", repeats=1, rounds=1)
    assert right.status == "ok"
    assert wrong.status.startswith("wrong: ")
    assert "is off by" in wrong.status
    assert (wrong.step_median_ms, wrong.tokens_per_s, wrong.speedup, wrong.steps) == (None, None, None, 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("no"), "out of memory"),
        (RuntimeError("odd\nlines"), "RuntimeError: odd"),
    ],
)
def test_what_a_peer_fails_at_is_a_word(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training_step

    def failing(case: Any, device: Any, model: Any, *rest: Any) -> Any:
        if model.config._attn_implementation != "eager":
            return step(case, device, model, *rest)

        def fail() -> list[float]:
            raise error

        return fail

    monkeypatch.setattr(models, "training_step", failing)
    rows = measure(TRAIN, ["eager", "sdpa"], "cpu", repeats=1, rounds=1)
    assert [row.status for row in rows] == [status, "ok"]
    assert rows[0].step_median_ms is None


def test_ours_may_run_out_of_memory_but_not_fail() -> None:
    for error, status in (
        (torch.OutOfMemoryError("no"), "out of memory"),
        (RuntimeError("odd"), "wrong: fails: RuntimeError: odd"),
    ):
        entry = Entry("streamattn")
        with models.failures_of(entry):
            raise error
        assert entry.status == status


def test_another_backend_than_the_name_says_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the contestant for cuDNN, let onto a CPU, and of one whose name is right there."""
    monkeypatch.setattr(contestants, "NAMED", {})
    monkeypatch.setattr(models, "NAMED", {"sdpa_cudnn": "cudnn", "sdpa": "flash"})
    rows = measure(TRAIN, ["sdpa", "sdpa_cudnn"], "cpu", repeats=1, rounds=1)
    assert (rows[0].status, rows[0].backend, rows[0].speedup) == ("ok", "flash", 1.0)
    assert rows[1].status == "unsupported: flash served it, not cudnn"
    assert rows[1].backend is rows[1].step_median_ms is rows[1].speedup is None


def test_dropout_is_looked_at_with_dropout() -> None:
    """PyTorch's attention on a CPU has a fused backend only without."""
    (row,) = measure(replace(TRAIN, dropout=0.5), ["sdpa"], "cpu", repeats=1, rounds=1)
    assert row.backend == "math"


def test_the_clock_is_read_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def clock() -> int:
        read.append(len(read))
        return 1000 + len(read)

    monkeypatch.setattr(models, "sm_clock", lambda device: clock)
    rows = measure(TRAIN, ["eager", "sdpa", "sdpa_cudnn"], "cpu", repeats=1, rounds=2)
    assert [row.sm_mhz for row in rows] == [1004, 1003, None]


def test_no_mask_and_a_static_cache_do_not_go_together() -> None:
    (row,) = measure(replace(GENERATE, mode="compiled"), ["sdpa_cudnn"], "cpu", repeats=1, rounds=1)
    assert row.status.startswith("unsupported: ")


def test_first_steps_that_do_not_count() -> None:
    entry = Entry("sdpa", times=[])
    calls = iter([[0.0, 0.1], [1.0, 1.001], [2.0, 2.002]])
    entry.step = lambda: next(calls)
    turn(entry, 1, "cpu", keep=False)
    turn(entry, 2, "cpu", keep=True)
    assert entry.times is not None
    assert [round(ms, 6) for (ms,) in entry.times] == [1.0, 2.0]


def row_of(case: ModelCase, name: str, status: str = "ok") -> ModelRow:
    on = models.stamp("cpu")
    return ModelRow(**asdict(on), **asdict(case), contestant=name, status=status)


def run_in_this_process(monkeypatch: pytest.MonkeyPatch, status: str = "ok") -> list[ModelCase]:
    """In place of processes; the cases that were run."""
    ran: list[ModelCase] = []

    def apart(function: Any, *arguments: Any) -> Any:
        if function is not measure:
            return function(*arguments)
        ran.append(arguments[0])
        if status == "died":
            raise Died("gone")
        return [row_of(arguments[0], name, status) for name in arguments[1]]

    monkeypatch.setattr(models, "apart", apart)
    return ran


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_in_this_process(monkeypatch)
    path = tmp_path / "x.csv"
    arguments = ["bench", "model", "--csv", str(path), "--seq-lens", "8", "16", "--warmup", "0", "1"]
    assert cli.main([*arguments, "--dtypes", "float32", "bfloat16"]) == 0
    wanted = [(t, d, w) for t in (8, 16) for d in ("float32", "bfloat16") for w in (0, 1)]
    assert [(case.seq_len, case.dtype, case.warmup) for case in ran] == wanted
    assert len(list(csv.DictReader(path.open()))) == 8 * len(CONTESTANTS)
    assert "gpt2-nano, train 2x16, bfloat16, eager, warm-up 1" in " ".join(capsys.readouterr().out.split())
    ran.clear()
    drawn: list[tuple[str, str]] = []
    monkeypatch.setattr(models.report, "draw", lambda file, folder: drawn.append((file, folder)) or ["a.png"])
    capsys.readouterr()
    assert cli.main([*arguments, "--dtypes", "float32", "bfloat16", "--plot", "pictures"]) == 0
    assert ran == []
    assert drawn == [(str(path), "pictures")]
    shown = capsys.readouterr().out
    assert "a.png" in shown
    assert "in the file already" in shown
    assert cli.main([*arguments, "--dropout", "0.1"]) == 0
    assert len(ran) == 4, "float32 alone by default"
    assert len(list(csv.DictReader(path.open()))) == 12 * len(CONTESTANTS)


@pytest.mark.parametrize("status", ["wrong: x", "died"])
def test_what_is_wrong_or_dies_fails_the_run(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_in_this_process(monkeypatch, status)
    assert cli.main(["bench", "e2e", "--csv", str(tmp_path / "x.csv")]) == 1
    assert [case.case for case in ran] == ["cpu-gpt2", "cpu-olmo2", "cpu-generate"]


def test_files_of_another_benchmark_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n")
    with pytest.raises(SystemExit, match="other columns"):
        cli.main(["bench", "model", "--csv", str(path)])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        cli.main(["bench", "e2e", "--csv", str(path), "--device", "cuda"])


def test_the_named_cases() -> None:
    shapes = {
        name: (case.shape, case.layers, case.batch, case.seq_len)
        for name, case in CASES.items()
        if case.work == "train" and not name.startswith("cpu")
    }
    assert shapes == {
        "gpt2-16x1024": ("gpt2-small", None, 16, 1024),
        "gpt2-4x8192": ("gpt2-small", None, 4, 8192),
        "gpt2-xl-4x1024": ("gpt2-xl", None, 4, 1024),
        "olmo2-2x4096": ("olmo2-7b", 4, 2, 4096),
        "olmo2-1x16384": ("olmo2-7b", 4, 1, 16384),
        "gpt2-dropout": ("gpt2-small", None, 16, 1024),
    }
    for case in CASES.values():
        contestants.configuration(case.shape, case.layers, case.seq_len, case.dropout)
