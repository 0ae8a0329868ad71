"""HuggingFace's own common model tests pass on patched models: what `tests/hf_suite` runs, held to a list.

Every test that is skipped is named below with the words that say why, and a name that no longer belongs there
is an error too. The skips are the suite's own: they are the same without a patch. What fails are the tests
that `tests/hf_suite/suite.py` narrows, where they run as they were shipped: one that doesn't fail so needs no
narrowing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.hf_suite.release import RELEASE, Unreachable, fetch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

SKIPPED = {
    "test_attn_implementation_composite_models": "not a composite model",
    "test_can_load_from_already_mapped_keys": "No conversion found",
    "test_can_load_with_device_context_manager": "requires accelerator",
    "test_can_load_with_global_device_set": "requires accelerator",
    "test_can_set_attention_dynamically_composite_model": "not composite",
    "test_cpu_offload": "requires accelerator",
    "test_disk_offload_bin": "requires accelerator",
    "test_disk_offload_safetensors": "requires accelerator",
    "test_eager_matches_batched_and_grouped_inference_*": "does not support grouped_mm",
    "test_eager_matches_sdpa_inference_24_*": "does not support output_attentions",  # by its signature
    "test_encoder_decoder_loss_no_double_shift": "No sequence-to-sequence",
    "test_flash_attn_2_*": "requires Flash Attention",
    "test_flash_attn_3_*": "requires Flash Attention 3",
    "test_flash_attn_4_*": "requires Flash Attention 4",
    "test_flash_attn_kernels_inference_equivalence": "requires the kernels library",
    "test_flash_attn_kernels_mps_inference_equivalence": "requires MPS",
    "test_flex_attention_with_grads": "requires accelerator",
    "test_internal_model_config_and_subconfig_are_same": "No subconfigs",
    "test_keep_in_fp32_modules": "no _keep_in_fp32_modules",
    "test_keep_in_fp32_modules_exist": "no _keep_in_fp32_modules",
    "test_kernels_can_load_without_crashing": "requires the kernels library",
    "test_model_parallelism": "requires multiple accelerators",
    "test_model_rope_with_partial_rotation": "does not have",
    "test_moe_models_record_router_logits": "no sparse experts",
    "test_output_router_logits_from_config": "no `output_router_logits`",
    "test_resize_*_with_deepspeed*": "requires deepspeed",
    "test_resize_position_vector_embeddings": "does not have position embeddings",
    "test_reverse_loading_mapping": "No conversion found",
    "test_sdpa_can_compile_dynamic": "requires accelerator",
    "test_sdpa_can_dispatch_composite_models": "does not support SDPA",  # it means: not composite
    "test_sdpa_can_dispatch_on_flash": "requires accelerator",
    "test_torch_compile_for_training": "test is slow",  # and wants an accelerator
    "test_vision_axial_rope": "no axial RoPE",
}
"""Test, as a pattern -> words of the reason for which the suite skips it, whatever the family."""

_NO_WINDOW = {"test_sliding_window_mask": "does not support sliding window"}

SKIPPED_BY_FAMILY = {
    "GPT2": {
        **_NO_WINDOW,
        "test_model_rope_scaling_*": "does not support RoPE scaling",
        "test_tied_head_has_a_tp_plan_entry": "does not have a TP plan",
        "test_tp_plan_matches_params": "does not have a TP plan",
    },
    "Olmo2": _NO_WINDOW,
    "Llama": _NO_WINDOW,
    "Qwen3": {},
    "Gemma2": {
        **_NO_WINDOW,  # says the suite, which looks for a switch that this configuration doesn't have
        "test_sdpa_can_dispatch_non_composite_models_as_shipped": "does not support SDPA",
    },
}

AS_SHIPPED = {
    "test_can_set_attention_dynamically_as_shipped": "check_attn_implementation",
}
"""Test that the suite narrows -> words of its failure without that, whatever the family.

They ask a model for its implementation's name right after making it, and a patched one says "streamattn".
"""

_RENAMED = {"test_sdpa_can_dispatch_non_composite_models_as_shipped": "_attn_implementation"}

AS_SHIPPED_BY_FAMILY = {
    "GPT2": _RENAMED,
    "Olmo2": _RENAMED,
    "Llama": _RENAMED,
    "Qwen3": _RENAMED,
    "Gemma2": {},
}

RUNS_LAYERS = (
    "test_attention_outputs",
    "test_batching_equivalence",
    "test_determinism",
    "test_eager_matches_sdpa_inference_0*",
    "test_eager_matches_sdpa_inference_1*",
    "test_eager_matches_sdpa_inference_20_*",
    "test_hidden_states_output",
    "test_inputs_embeds_matches_input_ids",
    "test_model_outputs_equivalence",
    "test_retain_grad_hidden_states_attentions",
    "test_save_load",
    "test_training*",
)
"""Tests that must have run patched layers."""


def run_suite(folder: Path) -> dict[str, list[dict[str, object]]]:
    """What became of each phase of each common test on patched models, by family.

    One process for all of them: it imports half of transformers and of torch.
    """
    try:
        release = fetch()
    except Unreachable as error:
        pytest.skip(str(error))
    report = folder / "report.jsonl"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(release / "src"), str(ROOT)]),
        "HF_SUITE_TESTS": str(release / "tests"),
        "HF_SUITE_REPORT": str(report),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_TEST_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # The suite has markers and warnings of its own.
    options = ["-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "-p", "tests.hf_suite.report"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "tests/hf_suite/suite.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode in (0, 1), process.stdout[-4000:] + process.stderr[-4000:]
    entries: dict[str, list[dict[str, object]]] = {}
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        entries.setdefault(entry["family"], []).append(entry)
    return entries


def unlisted(found: dict[str, str], listed: dict[str, str]) -> list[str]:
    """Tests found that no pattern with the right words allows."""
    return [
        f"{test}: {reason}"
        for test, reason in found.items()
        if not any(fnmatchcase(test, pattern) and words in reason for pattern, words in listed.items())
    ]


def outdated(found: dict[str, str], listed: dict[str, str], tests: set[str]) -> list[str]:
    """Patterns that match no test, and tests that a pattern names but that were not found."""
    return [pattern for pattern in listed if not any(fnmatchcase(test, pattern) for test in tests)] + [
        test for test in tests - found.keys() if any(fnmatchcase(test, pattern) for pattern in listed)
    ]


def problems(family: str, entries: list[dict[str, object]]) -> list[str]:
    """What is not as listed above."""
    layers: dict[str, int] = defaultdict(int)
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for entry in entries:
        test, reason = str(entry["test"]), str(entry["reason"])
        layers[test] = max(layers[test], int(str(entry["layers"])))
        if entry["outcome"] == "skipped":
            skipped[test] = reason
        elif entry["outcome"] == "failed":
            failed[test] = reason
    tests = set(layers)
    skips = SKIPPED | SKIPPED_BY_FAMILY[family]
    failures = AS_SHIPPED | AS_SHIPPED_BY_FAMILY[family]
    passed = tests - skipped.keys() - failed.keys()
    idle = [test for test in tests if layers[test] == 0 and any(fnmatchcase(test, p) for p in RUNS_LAYERS)]
    return [
        *(f"failed: {test}" for test in unlisted(failed, failures)),
        *(f"skipped: {test}" for test in unlisted(skipped, skips)),
        *(f"fails no more, narrow it no more: {test}" for test in outdated(failed, failures, tests)),
        *(f"skipped no more, take it off the list: {test}" for test in outdated(skipped, skips, tests)),
        *(f"no patched layer ran: {test}" for test in idle),
        *([] if len(passed) >= 90 else [f"only {len(passed)} passed"]),
    ]


def test_the_common_tests_pass_on_patched_models(tmp_path: Path) -> None:
    entries = run_suite(tmp_path)
    assert entries.keys() == SKIPPED_BY_FAMILY.keys()
    found = {family: problems(family, entries[family]) for family in entries}
    assert not any(found.values()), f"{found} with transformers {RELEASE}"
