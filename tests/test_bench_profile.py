"""Where time goes: classes of kernels, phases, FLOPs, ranges, and what Nsight's tools are told."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from streamattn import cli
from streamattn.bench import profile
from streamattn.bench.models import ModelCase
from streamattn.bench.profile import Kernel, Step, counted, kind_of, profiled, read_ncu, rows_of, run_ncu
from streamattn.bench.resume import stamp
from tests.test_bench_models import on_the_cpu  # noqa: F401

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "set_attn_implementation"),
    reason="this transformers can't change a model's attention",
)
CASE = ModelCase("p", "train", "gpt2-nano", 1, 1, 16, dtype="float32")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("aten::mul", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "elementwise"),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>",
            "softmax",
        ),
        ("void cunn_SoftMaxForward<4, float, float, float, (anonymous)::SoftMaxForwardEpilogue>", "softmax"),
        ("void cunn_SoftMaxForward<4, float, float, float, (anonymous)::LogSoftMaxForwardEpilogue>", "loss"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::_softmax_backward_data", "softmax"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "reduction"),
        ("aten::empty_strided", "other"),
    ],
)
def test_classes_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_of_ours_are_attention() -> None:
    kernels = Path(profile.__file__).parents[1] / "kernels"
    names = [
        line.split("(")[0].removeprefix("def ")
        for file in kernels.glob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    ]
    assert len(names) > 3
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, "attention")


def test_products_of_known_size_are_counted() -> None:
    """GPT-2 of one layer and width 128: 12 * 128^2 weights in products, and the logits'."""
    tokens, width, vocabulary = 16, 128, 4096
    products = 2 * tokens * (12 * width**2 + width * vocabulary)
    scores = 4 * tokens * tokens
    attention = 4 * 32 * scores
    for name, kind in (("unfused", "matmul"), ("sdpa", "attention"), ("streamattn", "attention")):
        flops = counted(Step(CASE, name, "cpu"))
        forward, backward = flops["forward"], flops["backward"]
        assert forward["softmax"] == 5 * scores
        inside = kind == "matmul"
        assert forward["matmul"] == products + inside * attention
        assert backward["matmul"] == 2 * products + inside * 2 * attention
        if not inside:
            assert (forward["attention"], backward["attention"]) == (attention, 2.5 * attention)


def test_phases_ranges_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(profile, "sm_clock", lambda device: lambda: read.append(device) or 1000 + len(read))
    trace = tmp_path / "trace.json"
    step = Step(replace(CASE, shape="olmo2-nano"), "unfused", "cpu")
    kernels, parts, mhz = profiled(step, str(trace), warmup=1)
    assert (mhz, read) == (1003, ["cpu"] * 3), "after each phase, and neither before nor after the trace"
    names = {phase: {kernel.name for kernel in found} for phase, found in kernels.items()}
    assert "aten::_softmax" in names["forward"]
    assert "aten::_softmax_backward_data" in names["backward"]
    assert "aten::_fused_adamw_" in names["optimizer"]
    assert not any("forward" in names[phase] for phase in names), "ranges are no kernels"
    ranges = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step", "forward", "backward", "optimizer", "scores", "softmax", "values"} <= ranges
    flops = {"forward": {"matmul": 30, "softmax": 10}}
    rows = rows_of(stamp("cpu"), CASE, "unfused", kernels, parts, flops)
    for phase in ("forward", "backward", "optimizer", "step"):
        mine = [row for row in rows if row.phase == phase]
        assert sum(row.share for row in mine) == pytest.approx(1.0, abs=1e-3)
        total = sum(kernel.us for name in names for kernel in kernels[name] if phase in (name, "step"))
        assert sum(row.ms for row in mine) == pytest.approx(total / 1000, rel=1e-2)
    (softmax,) = [row for row in rows if (row.phase, row.kind) == ("forward", "softmax")]
    assert (softmax.flops, softmax.flops_share) == (10, 0.25)
    assert softmax.calls == 2, "of a layer: the call and the kernel; the loss has its own class"
    ranges = [row for row in rows if row.kind == "range"]
    assert [(row.phase, row.calls) for row in ranges] == [
        (part, 1) for part in ("scores", "softmax", "values")
    ]
    whole = parts["forward"].us / 1000
    assert 0.0 < sum(row.share for row in ranges) < 1.0
    for row in ranges:
        assert row.ms == pytest.approx(row.share * whole, abs=2e-4 * whole)


def test_unfused_attention_is_right() -> None:
    for shape in ("gpt2-nano", "olmo2-nano"):
        case = replace(CASE, shape=shape)
        losses = []
        for name in ("unfused", "sdpa"):
            step = Step(case, name, "cpu")
            step.forward()
            assert step.loss is not None
            losses.append(step.loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


NCU = """==PROF== Connected
"ID","Kernel Name","sm__warps_active.avg.pct_of_peak_sustained_active","lts__t_sector_hit_rate.pct","gpu__time_duration.sum"
"","","%","%","ns"
"0","gemm","50.0","80.5","1,000"
"1","gemm","30.0","79.5","3,000"
"2","softmax","10.0","",""
"""  # noqa: E501


def test_what_ncu_prints_is_read() -> None:
    gemm, softmax = read_ncu(NCU)
    assert gemm == {
        "kernel": "gemm",
        "calls": 2,
        "occupancy %": 40.0,
        "L1 hits %": None,
        "L2 hits %": 80.0,
        "ns": 2000.0,
    }
    assert (softmax["calls"], softmax["occupancy %"], softmax["ns"]) == (1, 10.0, None)
    assert read_ncu("==ERROR== no\n") == []


def test_why_ncu_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_ncu(["x"], 1) == ([], "ncu is not installed")
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\nexit 1\n")
    tool.chmod(0o755)
    found, reason = run_ncu(["x"], 1)
    assert (found, reason) == ([], "==ERROR== ERR_NVGPUCTRPERM - no permission")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = {phase: [Kernel("aten::mm", 2, 30.0), Kernel("aten::mul", 1, 10.0)] for phase in profile.PHASES}
    monkeypatch.setattr(profile, "profiled", lambda *args: (kernels, {}, 1980))
    monkeypatch.setattr(profile, "counted", lambda step: {"forward": {"matmul": 9, "softmax": 1}})
    path = tmp_path / "x.csv"
    assert cli.main(["profile", "--csv", str(path), "--layers", "1", "--seq-len", "8"]) == 0
    shown = capsys.readouterr().out
    assert "the longest of 2 operators" in shown
    (nsys,) = [line for line in shown.splitlines() if line.startswith("nsys profile ")]
    assert "--capture-range=cudaProfilerApi" in nsys
    (ncu,) = [line for line in shown.splitlines() if line.startswith("ncu ")]
    assert "--profile-from-start off" in ncu
    assert "lts__t_sector_hit_rate.pct" in ncu
    for line in (nsys, ncu):
        assert "--once --attention streamattn --shape gpt2-nano --layers 1 --seq-len 8" in line
    rows = list(csv.DictReader(path.open()))
    assert {row["sm_mhz"] for row in rows} == {"1980"}
    assert [row["kind"] for row in rows if row["phase"] == "step"] == ["softmax", "matmul", "elementwise"]
    assert [row["share"] for row in rows if row["kind"] == "matmul"] == ["0.75"] * 4
    for option in ("--once", "--ncu"):
        with pytest.raises(SystemExit, match="need a CUDA device"):
            cli.main(["profile", option])
    with pytest.raises(SystemExit, match=r"^streamattn profile: .*gpt2-mega"):
        cli.main(["profile", "--shape", "gpt2-mega"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        cli.main(["profile", "--device", "cuda"])
    assert not torch.cuda.is_available()
