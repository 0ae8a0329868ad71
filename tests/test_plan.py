"""The plan: what is reckoned from counts and speeds, what is marked and said, and what it is held against."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from patches import patch_model
from streamattn import cli, parallel, plan
from streamattn.bench.memory import at_peak, history_on_cpu
from streamattn.job import load_shape
from streamattn.parallel import collectives
from streamattn.parallel.call import heads_last
from streamattn.pattern import UNBOUNDED
from streamattn.plan import Split, Work, predict
from streamattn.speeds import Speeds
from streamattn.step import Attention
from tests.test_speeds import comm_csv, kernel_csv

ROOT = Path(__file__).parents[1]
GPT2_NANO = 4096 * 128 + 256 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128  # parameters, the head tied


def work(**options: Any) -> Work:
    return Work(config=load_shape("gpt2-nano"), seq_len=128, **options)


def links(ms: float) -> Speeds:
    """Every collective of any size and number takes about so many milliseconds, or 0."""
    speeds = Speeds()
    speeds.link_ms = lambda operation, world, size, notes: ms  # type: ignore[method-assign]
    return speeds


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process as the first of four whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_moments_gradients_and_buckets_are_those_of_torch(four_ranks: None) -> None:
    model = AutoModelForCausalLM.from_config(load_shape("gpt2-nano"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    moments = sum(change.size for change in history_on_cpu(optimizer.step))
    made: list[Any] = []
    buckets = sum(
        change.size for change in history_on_cpu(lambda: made.append(DistributedDataParallel(model)))
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    for options, more in (
        ({}, 0),
        ({"accumulation": 2}, gradients),
        ({"gpus": 4}, buckets),
        ({"gpus": 4, "accumulation": 2}, gradients + buckets),
    ):
        split = predict(work(**options), 1, Speeds())
        assert split.fixed == pytest.approx(weights + moments + more, rel=0.01)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp_holds_what_is_reckoned(accumulation: int, four_ranks: None) -> None:
    """But for the layer on its way while another works: on the CPU there is none."""
    config = load_shape("olmo2-nano")
    config.num_hidden_layers = 8
    model: Any = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"
    patch_model(model).train()
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    mesh = init_device_mesh("cpu", (4,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    ids = torch.randint(2, config.vocab_size, (1, 128))

    def micro_step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    model.set_requires_gradient_sync(accumulation == 1)  # as accelerate
    gradients = sum(change.size for change in history_on_cpu(micro_step))
    model.set_requires_gradient_sync(True)
    count = sum(parameter.numel() for parameter in model.parameters())
    found = 12 * count // 4 + gradients + at_peak(history_on_cpu(micro_step))[0]
    what = Work(config, 128, gpus=4, accumulation=accumulation, dtype="float32", fsdp=True)
    assert predict(what, 1, Speeds()).peak == pytest.approx(found + layer, rel=0.005)


@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_mode_sends_what_is_reckoned(
    mode: str, kv_heads: int, four_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and sizes of collectives, of a real call's forward and backward."""
    monkeypatch.setattr("streamattn.parallel.gather.MIN_GROUP_BYTES", 1)  # several groups of heads
    sent: set[tuple[str, int]] = set()
    for name, named in (("all_gather", "all_gather"), ("all_to_all", "all_to_all"), ("pass_on", "send_recv")):
        original = getattr(collectives, name)

        def noted(x: Any, group: Any, original: Any = original, named: str = named) -> Any:
            pending = original(x, group)
            sent.add((named, max(x.nbytes, pending.result.nbytes)))
            return pending

        monkeypatch.setattr(collectives, name, noted)
    q, k, v = (torch.randn(2, n, 32, 16, requires_grad=True) for n in (4, kv_heads, kv_heads))
    if mode == "ring":  # it passes float32 sums beside what has the tensors' dtype
        q, k, v = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    parallel.attention(q, k, v, causal=True, mode=mode).sum().backward()

    config = load_shape("olmo2-nano")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, kv_heads, 16
    what = Work(config, 128, gpus=4, batch=2, dtype=str(q.dtype).removeprefix("torch."))
    sharing = plan._Sharing(what, 4, mode)
    reckoned: set[tuple[str, int]] = set()
    speeds = links(0.0)
    speeds.link_ms = lambda operation, world, size, notes: reckoned.add((operation, int(size))) or 0.0  # type: ignore[method-assign]
    for is_backward in (False, True):
        sharing.exchange_ms(Attention(is_backward, 2, 4, 16, UNBOUNDED, 0), 0.0, speeds, [])
    assert reckoned == sent
    assert sharing.tokens == 32


@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
def test_a_mode_holds_what_is_reckoned(mode: str, four_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside arguments and results, of a real call around an attention that holds nothing itself."""
    monkeypatch.setattr("streamattn.parallel.gather.MIN_GROUP_BYTES", 1)

    class Hollow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v, q)
            return heads_last(q, q.shape[3], q.shape[2]), q.new_empty(q.shape[:3])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return tuple(heads_last(x, x.shape[3], x.shape[2]) for x in ctx.saved_tensors[:3])

    hollow: Any = Hollow.apply

    def gradients(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return *(heads_last(x, x.shape[3], x.shape[2]) for x in (q, k, v)), None

    module = f"streamattn.parallel.{mode}"
    monkeypatch.setattr(f"{module}.forward", lambda q, k, v, *options: hollow(q, k, v))
    if mode != "ulysses":
        monkeypatch.setattr(f"{module}.backward", gradients)
    tokens, heads, head_dim = 512, 8, 64
    q, k, v = (torch.randn(1, heads, tokens, head_dim, requires_grad=True) for _ in range(3))
    config = load_shape("olmo2-nano")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, heads, head_dim
    sharing = plan._Sharing(Work(config, 4 * tokens, 4, dtype="float32"), 4, mode)
    made: list[Any] = []
    forward = history_on_cpu(lambda: made.append(parallel.attention(q, k, v, causal=True, mode=mode)))
    dout = torch.ones_like(made[0])
    backward = history_on_cpu(lambda: made.append(torch.autograd.grad(made[0], (q, k, v), dout)))
    sums = 4 * q.numel() + 4 * q.numel() // head_dim
    for is_backward, changes in ((False, forward), (True, backward)):
        call = Attention(is_backward, 1, heads, head_dim, UNBOUNDED, 0)
        results = 3 * q.nbytes if is_backward else q.nbytes
        found = at_peak(changes)[0] - results
        reckoned = sharing.workspace(call, tokens) - sums * is_backward // (
            sharing.groups if mode == "gather" else 1
        )
        assert found * 0.9 <= reckoned <= found * 1.3, (is_backward, found, reckoned)


def test_auto_takes_the_mode_that_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, grouped = load_shape("olmo2-1b"), load_shape("olmo2-32b")
    assert [plan._Sharing(Work(plain, 32768, 8), cp).mode for cp in (1, 2, 4)] == ["-", "ulysses", "ulysses"]
    assert [plan._Sharing(Work(grouped, 32768, 8), cp).mode for cp in (2, 4, 8)] == [
        "gather",
        "gather",
        "ulysses",
    ]
    monkeypatch.setattr("streamattn.parallel.functional.MAX_GATHERED_BYTES", 1)
    assert plan._Sharing(Work(load_shape("gpt2-xl"), 4096, 2), 2).mode == "ring"  # 25 heads


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "choose_mode", lambda *given, **options: "gather")


@pytest.mark.usefixtures("gathering")
def test_gathering_hides_all_but_its_first_group() -> None:
    config = load_shape("olmo2-1b")
    sharing = plan._Sharing(Work(config, 65536, 2, batch=1), 2)
    assert (sharing.mode, sharing.groups) == ("gather", 4)
    forward = Attention(False, 1, 16, 128, UNBOUNDED, 0)
    copies = sharing.exchange_ms(forward, 0.0, links(0.0), [])
    for attention_ms, shown in ((0.0, 4 * 3.0), (100.0, 3.0), (4.0, 3.0 + 3 * 2.0)):
        assert sharing.exchange_ms(forward, attention_ms, links(3.0), []) == pytest.approx(copies + shown)
    backward = forward._replace(is_backward=True)
    both = sharing.exchange_ms(backward, 100.0, links(3.0), []) - sharing.exchange_ms(
        backward, 0.0, links(0.0), []
    )
    assert both == pytest.approx(3.0 + 3.0)  # the first group's way, and the last one's back


def test_gradients_hide_behind_the_backward_but_for_the_last_bucket() -> None:
    one = predict(work(), 1, Speeds())
    slow, fast = (predict(work(gpus=2), 1, links(ms)) for ms in (5.0, 1e-6))
    assert one.reduce_ms == 0.0
    assert fast.reduce_ms == pytest.approx(1e-6)
    # 5.4 MB: buckets of 1 MiB and the rest
    backward = 10.0 - slow.reduce_ms
    assert 0.0 < backward < one.compute_ms + one.attention_ms
    tokens = (one.tokens_per_s, slow.tokens_per_s)
    assert tokens[1] == pytest.approx(2 * 128 / slow.step_ms * 1e3)
    assert tokens[0] == pytest.approx(128 / one.step_ms * 1e3)


def test_fsdp_gathers_in_every_pass_and_scatters_in_the_last() -> None:
    layers = GPT2_NANO / (12 * 128**2 + 13 * 128)  # as if all were layers
    for ms, shown in ((1e6, (3 + 3 + 1) * layers * 1e6), (1e-6, (3 + 2 + 2) * 1e-6)):
        split = predict(work(gpus=2, accumulation=3, fsdp=True), 1, links(ms))
        assert split.reduce_ms == pytest.approx(shown, rel=1e-3)


def test_attention_is_shared_out_and_accumulation_repeats_it() -> None:
    one, two, often = (
        predict(work(gpus=gpus, accumulation=steps, dtype="float32"), gpus, Speeds())
        for gpus, steps in ((1, 1), (2, 1), (1, 3))
    )
    assert two.attention_ms == pytest.approx(one.attention_ms / 2)
    # 4 layers, 4 heads of 32, 128 * 129 / 2 pairs, at half of 50 TFLOP/s
    assert one.attention_ms == pytest.approx(14 * 4 * 4 * 32 * 128 * 129 / 2 / 25e12 * 1e3)
    assert often.attention_ms == pytest.approx(3 * one.attention_ms)
    assert often.optimizer_ms == one.optimizer_ms


def measured(folder: Path) -> tuple[str, str]:
    """Files in which all is measured that two GPUs need for gpt2-nano at 256 tokens."""
    shares = dict(peak_share=0.5, gb_s=1000.0, copy_share=0.25)
    rows = [
        dict(part=part, head_dim=32, seq_len=length, **shares)
        for part in ("forward", "backward")
        for length in (128, 256)
    ]
    times = {
        (name, 2, megabytes): 0.1
        for name in ("all_reduce", "all_gather", "all_to_all", "send_recv")
        for megabytes in (1, 64)
    }
    return kernel_csv(folder / "kernel.csv", rows), comm_csv(folder / "comm.csv", times)


@pytest.mark.usefixtures("gathering")
def test_what_was_measured_is_told_from_what_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel, comm = measured(tmp_path)
    command = ["info", "--plan", "gpt2-nano", "--seq", "256", "--kernel-csv", kernel, "--comm-csv", comm]
    assert cli.main([*command, "--gpus", "2"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines() if "measured speeds" in line] == [["2", "x", "1"]]
    assert re.findall("simulated: .*", shown) == [
        "simulated: attention of a part of the queries at the speed of as many keys",
        "simulated: all_gather of less than 1 MB at the bus bandwidth of 1 MB",
        "simulated: all_to_all of less than 1 MB at the bus bandwidth of 1 MB",
    ]
    assert cli.main([*command, "--gpus", "4"]) == 0
    shown = capsys.readouterr().out
    assert "measured speeds" not in shown
    assert "simulated: all_reduce of 4 GPUs at the bus bandwidth of 2" in shown
    assert cli.main([*command, "--gpus", "1", "--seq", "512"]) == 0
    assert "simulated: attention of 512 tokens as of 256, the nearest measured" in capsys.readouterr().out


@pytest.mark.usefixtures("gathering")
def test_the_files_that_are_checked_in_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--plan", "gpt2-nano", "--seq", "512", "--gpus", "2", "--cp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "attention_h200.csv, no comm CSV" in shown
    # attention's speeds are there, of lengths from 512; no others
    assert "simulated: attention of 256 tokens as of 512, the nearest measured" in shown
    assert "simulated: attention's" not in shown
    for word in ("products in bfloat16 at 700 TFLOP/s", "memory at 4200 GB/s", "all_reduce at 200 GB/s"):
        assert f"simulated: {word}" in shown
    whose = "139 GiB of NVIDIA H200; CUDA's context, which takes some of it, is in no number here"
    assert f"memory of a GPU: {whose}" in shown
    assert "the model has 256 positions: a job needs max_position_embeddings: 512 in its shape" in shown
    assert "1 x 2" in shown
    assert "2 x 1" not in shown


def split_of(**options: Any) -> Split:
    usual = dict(dp=2, cp=1, mode="-", fixed=0, held=0, peak=2**30, compute_ms=1.0, attention_ms=1.0)
    usual |= dict(exchange_ms=0.0, reduce_ms=0.0, optimizer_ms=0.0, tokens=9, assumed=())
    return Split(**(usual | options))  # type: ignore[arg-type]


def test_the_fastest_that_fits_is_the_best() -> None:
    splits = [split_of(peak=2**31), split_of(tokens=7), split_of(tokens=8, assumed=("x",))]
    for memory, words in (
        (2**30, ["measured speeds, does not fit", "measured speeds", "simulated, best"]),
        (None, ["measured speeds, best", "measured speeds", "simulated"]),
    ):
        assert list(plan.table(splits, memory).columns[-1].cells) == words


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["info", "--plan=gpt2-nano", "--seq", "128", "--gpus", "1"]
    assert cli.main([*command, "--memory-gib", "0.01"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "gpt2-mano"], "shape: no file '.*'; near it: .*gpt2-nano"),
        (
            ["--plan", "gpt2-nano", "--cp", "3"],
            "--cp: expected a divisor of the 4 GPUs .*, got 3; leave it out",
        ),
        (
            ["--plan", "gpt2-nano", "--cp", "2"],
            "leaves each at least 128 of the 128 tokens, got 2; leave it out",
        ),
        (["--plan", "gpt2-nano", "--kernel-csv", "gone.csv"], "can't read 'gone.csv': No such file"),
        (["--plan", "gpt2-nano", "--kernel-csv", "README.md"], "README.md: expected rows with figures"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", *words, "--seq", "128", "--gpus", "4"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("streamattn info: ")
    assert re.search(message, line), line


def test_a_model_that_cannot_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_shape("olmo2-nano")
    config.hidden_act = "no such function"
    config.save_pretrained(tmp_path)
    assert cli.main(["info", "--plan", str(tmp_path), "--seq", "128", "--gpus", "1"]) == 2
    assert re.fullmatch(r"streamattn info: olmo2: .*no such function.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "words"), [("mixtral", ["--fsdp", "--gpus", "2"]), ("gpt_oss", ["--dtype", "float32"])]
)
def test_products_that_are_not_counted_are_refused_in_one_line(
    name: str, words: list[str], tmp_path: Path
) -> None:
    """In a process of its own, for torch's log goes around what pytest captures."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_local_experts=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128)
    AutoConfig.for_model(name, **sizes, **heads).save_pretrained(tmp_path)
    command = [
        sys.executable,
        "-m",
        "streamattn",
        "info",
        "--plan",
        str(tmp_path),
        "--seq",
        "128",
        "--gpus",
        "1",
    ]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = f"{name}: a mixture of experts can't be planned yet: aten::_grouped_mm, which isn't counted"
    assert done.stderr.splitlines()[-1] == f"streamattn info: {wanted}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_attention_heads", 0, "num_attention_heads of 1 or more, got 0"),
        ("num_attention_heads", -4, "num_attention_heads of 1 or more, got -4"),
        ("num_key_value_heads", -2, "num_key_value_heads: expected a divisor of the 4 heads, got -2"),
        ("head_dim", -32, "olmo2: .*negative"),
    ],
)
def test_a_saved_model_with_wrong_heads_is_one_line(
    field: str, value: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_shape("olmo2-nano").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}), encoding="utf-8")
    assert cli.main(["info", "--plan", str(tmp_path), "--seq", "128", "--gpus", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--memory-gib", value) for value in ("nan", "inf", "-1", "0", "much")),
        *(("--seq", value) for value in ("²", "４", "0", "-1", "99999999999999999999")),
    ],
)
def test_numbers_are_plain_and_in_range(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "--plan", "gpt2-nano", "--seq", "128", "--gpus", "1", f"{option}={value}"])
    assert re.search(f"argument {option}: expected a .*number .*, got '{value}'", capsys.readouterr().err)


def test_sizes_beyond_tensors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--seq", "999999999", "--micro-batch-size", "999999999"]
    assert cli.main(["info", "--plan", "gpt2-nano", "--gpus", "1", *large]) == 2
    assert re.fullmatch("streamattn info: gpt2: .*overflow.*\n", capsys.readouterr().err)


def test_splits_of_less_than_two_tiles_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = "left out: splits that leave a GPU fewer than 128 tokens of a sequence"
    for gpus, splits in (("4", ["4 x 1", "2 x 2"]), ("2", ["2 x 1", "1 x 2"])):
        assert cli.main(["info", "--plan", "gpt2-nano", "--seq", "256", "--gpus", gpus]) == 0
        shown = capsys.readouterr().out
        assert (
            re.findall(r"^ *(\d+ x \d+) ", shown.split("tokens/s")[1].split("gpt2-nano:")[0], re.M) == splits
        )
        assert (left_out in shown) == (gpus == "4")


def test_a_saved_model_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_shape("olmo2-nano").save_pretrained(tmp_path)
    assert cli.main(["info", "--plan", str(tmp_path), "--seq", "128", "--gpus", "1"]) == 0
    assert "1 x 1" in capsys.readouterr().out
