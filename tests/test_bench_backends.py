"""Which backend ran, by names of kernels that were seen on GPUs, and by what really runs on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from streamattn import attention
from streamattn.bench import backends, profile
from streamattn.bench.backends import backend_of, names_in, recording, served
from streamattn.bench.providers import Unsupported

KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "cudnn",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "cudnn",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>, false, true>": "flash",
    "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>": "flash",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>": "flash",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>)": "efficient",
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": "efficient",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...> > >": "fa3",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor": "fa4",
    "triton_tem_fused_flex_attention_0": "flex",
    "triton_tem_fused_flex_attention_backward_2": "flex",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>": "math",
    "void at::native::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>": "math",
    "triton_per_fused__softmax__to_copy_mul_0": "math",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "flash",
    "aten::_softmax_backward_data": "math",
}
OTHERS = [
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "void at::native::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>",
    "triton_red_fused__log_softmax_nll_loss_forward_1",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, false>",
    "aten::_log_softmax",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align8>",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>",
    "Memset (Device)",
]


@pytest.mark.parametrize(("name", "backend"), KERNELS.items(), ids=lambda text: text[:40])
def test_a_kernel_names_its_backend(name: str, backend: str) -> None:
    assert backend_of([*OTHERS, name, *OTHERS]) == backend


def test_other_kernels_name_none() -> None:
    assert backend_of(OTHERS) is backend_of([]) is None


def test_our_kernels_name_the_files_that_they_are_in() -> None:
    files = {"backward": "triton", "forward": "triton", "mask_gradient": "triton"}
    shared = ("segments", "qk_prologue")  # beside others
    seen: dict[str, str | None] = {}
    for file in (Path(backends.__file__).parents[1] / "kernels").glob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            name = line.removeprefix("def ").split("(")[0]
            if line.startswith("def ") and name.endswith("_kernel"):
                seen[name] = backend_of([name])
                expected = files.get(file.stem, file.stem.split("_")[0])
                assert seen[name] == (None if file.stem in shared else expected), name
    assert set(seen.values()) == {"hopper", "triton", "decode", "wide", None}


def test_several_stand_in_their_order_and_scores_written_out_only_alone() -> None:
    names = ["decode_fwd_kernel", "decode_combine_kernel", "attention_bwd_dq_kernel"]
    assert backend_of(names) == "decode + triton"
    assert backend_of(["softmax_warp_forward", "hopper_fwd_kernel"]) == "hopper"


def fake(*events: tuple[str, str]) -> Any:
    found = [SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind)) for name, kind in events]
    return SimpleNamespace(events=lambda: found, start=lambda: None, stop=lambda: None)


def test_kernels_are_told_from_operators() -> None:
    seen = fake(("aten::_scaled_dot_product_flash_attention", "CPU"), ("hopper_fwd_kernel", "CUDA"))
    assert names_in(seen, "cuda") == ["hopper_fwd_kernel"]
    assert names_in(seen, "cpu") == ["aten::_scaled_dot_product_flash_attention"]


def test_a_gpu_is_recorded_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    profiler = fake(("hopper_fwd_kernel", "CUDA"))
    profiler.stop = lambda: said.append("stop")

    def profile(activities: list[Any], **options: Any) -> Any:
        said.append([activity.name for activity in activities])
        return profiler

    monkeypatch.setattr(backends, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    with recording("cuda") as names:
        said.append("work")
    assert names == ["hopper_fwd_kernel"]
    assert said == [["CPU", "CUDA"], "work", "synchronize", "stop"]


Q = torch.randn(1, 2, 16, 8)


def ran(work: Any) -> str | None:
    with recording("cpu") as names:
        work()
    return backend_of(names)


def test_what_runs_on_the_cpu() -> None:
    def gradients() -> None:
        q = Q.clone().requires_grad_()
        F.scaled_dot_product_attention(q, q, q).sum().backward()

    assert ran(lambda: F.scaled_dot_product_attention(Q, Q, Q)) == "flash"
    assert ran(gradients) == "flash"
    assert ran(lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5)) == "math"
    assert ran(lambda: attention(Q, Q, Q)) == "flash"
    assert ran(lambda: attention(Q, Q, Q, window_size=4)) == "flash", "strip by strip"
    assert ran(lambda: attention(Q, Q, Q, backend="reference")) == "reference"
    assert ran(lambda: (Q @ Q.mT).softmax(-1) @ Q) == "math"
    assert ran(lambda: Q @ Q.mT) is None


@pytest.mark.parametrize("failing", ["start", "stop", "events"])
def test_a_profiler_that_fails_costs_nothing_but_what_it_knew(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    profiler, done = fake(("hopper_fwd_kernel", "CPU")), []
    setattr(profiler, failing, fail)
    monkeypatch.setattr(backends, "profile", lambda **options: profiler)
    with recording("cpu") as names:
        done.append(1)
    assert (names, done) == ([], [1])


def test_what_fails_inside_is_told_and_the_next_is_recorded() -> None:
    with pytest.raises(KeyError, match="mine"), recording("cpu"):
        raise KeyError("mine")
    assert ran(lambda: F.scaled_dot_product_attention(Q, Q, Q)) == "flash"


def test_what_a_row_says() -> None:
    assert served(["hopper_fwd_kernel"], "triton") == "hopper", "what ran, whatever was expected"
    assert served([], "hopper") == "hopper (predicted)"
    assert served(OTHERS, None) is None
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert served([flash], "flash", named=True) == "flash"
    assert served([], "cudnn", named=True) == "cudnn (predicted)"
    for names in ([flash], [flash, "cudnn_generated_fort_native_sdpa_sm90"]):
        with pytest.raises(Unsupported, match=r"^flash.* served it, not cudnn$"):
            served(names, "cudnn", named=True)


def test_the_operators_of_a_profile_are_attention_by_the_same_names() -> None:
    """`streamattn profile` classes kernels too; what is fused here is attention there."""
    fused = [name for name, backend in KERNELS.items() if backend != "math"]
    assert {name: profile.kind_of(name) for name in fused} == dict.fromkeys(fused, "attention")
