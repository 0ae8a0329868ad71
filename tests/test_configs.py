"""Every file in configs/ loads, and each shape is the model that its name promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Olmo2Config, TrainingArguments

from streamattn.job import load_shape, read_job

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
JOBS = sorted(CONFIGS.glob("*.yaml"))

# name: (d_model, d_ff, layers, query heads, key heads, positions, millions of parameters)
SHAPES = {
    "gpt2-nano": (128, 512, 4, 4, 4, 256, 1.35),
    "gpt2-small": (768, 3072, 12, 12, 12, 1024, 124.4),
    "gpt2-medium": (1024, 4096, 24, 16, 16, 1024, 354.8),
    "gpt2-large": (1280, 5120, 36, 20, 20, 1024, 774.0),
    "gpt2-xl": (1600, 6400, 48, 25, 25, 1024, 1557.6),
    "gpt2-2.7b": (2560, 10240, 32, 32, 32, 1024, 2648.9),
    "olmo2-nano": (128, 384, 4, 4, 2, 256, 1.84),
    "olmo2-1b": (2048, 8192, 16, 16, 16, 4096, 1484.9),
    "olmo2-7b": (4096, 11008, 32, 32, 32, 4096, 7298.6),
    "olmo2-13b": (5120, 13824, 40, 40, 40, 4096, 13716.2),
    "olmo2-32b": (5120, 27648, 64, 40, 8, 4096, 32234.3),
    "olmo2-7b-mha": (4096, 11008, 30, 32, 32, 4096, 6893.9),
    "olmo2-32b-mha": (8192, 27648, 60, 64, 64, 4096, 58526.1),
    "olmo2-70b-mha": (8192, 28672, 80, 64, 64, 4096, 79495.8),
}


def test_every_shape_is_listed_here() -> None:
    assert {path.stem for path in (CONFIGS / "shapes").glob("*.yaml")} == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str) -> None:
    d_model, d_ff, layers, heads, kv_heads, positions, millions = SHAPES[name]
    config = load_shape(name)
    assert isinstance(config, GPT2Config if name.startswith("gpt2") else Olmo2Config)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        d_model,
        layers,
        heads,
    )
    assert (config.n_inner if isinstance(config, GPT2Config) else config.intermediate_size) == d_ff
    assert getattr(config, "num_key_value_heads", heads) == kv_heads
    assert config.max_position_embeddings == positions
    if isinstance(config, Olmo2Config) and not name.endswith("nano"):
        assert d_model // heads == 128
        assert config.vocab_size == 100352
        rope = config.to_dict().get("rope_parameters") or {"rope_theta": config.rope_theta}
        assert rope["rope_theta"] == 500_000
        assert config.rms_norm_eps == 1e-6
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=5e-3)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("olmo2") and "nano" not in name])
def test_what_is_published_and_what_is_assumed_is_said(name: str) -> None:
    text = (CONFIGS / "shapes" / f"{name}.yaml").read_text(encoding="utf-8")
    (width,) = [line for line in text.splitlines() if line.startswith("intermediate_size")]
    assert width.endswith("# assumed") == name.endswith("-mha")
    assert ("as published" in text) != name.endswith("-mha")


@pytest.mark.sweep
def test_the_default_job_learns(tmp_path: Path) -> None:
    """Real text, whole, as its user runs it: what it prints at its end, and its time on two free cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = ["finetune", "configs/gpt2-nano_stdlib_cpu.yaml", "--output_dir", str(tmp_path / "out")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "streamattn", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    seconds = time.monotonic() - began
    print(done.stdout, f"{seconds:.0f} s", sep="\n")  # pytest -s shows it
    assert done.returncode == 0, done.stderr
    printed = re.search(r"held-out loss\W+(\d+\.\d+) \(\d\.\d\d of the first, (\d+\.\d+)\)", done.stdout)
    assert printed is not None
    assert float(printed[1]) <= 0.7 * float(printed[2])
    assert seconds < 240


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job(path: Path, tmp_path: Path) -> None:
    """It loads, its arguments are accepted, its sequences fit the model, and its name says what it is."""
    job = read_job([str(path), "--output_dir", str(tmp_path)])
    model, _, hardware = path.stem.split("_")
    assert job.shape == model
    assert job.patch
    config = load_shape(job.shape or "")
    assert job.seq_len is not None
    assert job.seq_len <= config.max_position_embeddings
    # A GPU's precisions are refused where there is none.
    arguments = TrainingArguments(**job.training | {"use_cpu": True, "tf32": None})
    assert arguments.bf16 == hardware.endswith("h100")
    gpus = hardware.removesuffix("h100").removesuffix("x")
    assert job.context_parallel_size == int(gpus if gpus.isdigit() else 1)
    assert arguments.eval_on_start


def test_there_is_a_job_for_each_promised_place() -> None:
    names = [path.stem for path in JOBS]
    assert "gpt2-nano_stdlib_cpu" in names
    assert any(name.startswith("gpt2") and name.endswith("h100") for name in names)
    assert any(name.startswith("olmo2") and name.endswith("h100") for name in names)
