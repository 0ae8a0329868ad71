"""The gradient of a mask in Triton's interpreter; test_backward.py has it beside every other option."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cases import Case, expected, judge
from tests.kernels.test_backward import backward, check


@pytest.mark.parametrize("mask", ["trained", "trained_full", "trained_keys"])
def test_gradient_of_a_mask_has_its_own_shape(mask):
    check(Case(batch=2, q_heads=2, kv_heads=1, q_len=40, kv_len=50, mask=mask, causal=True))


@pytest.mark.parametrize("full", product([False, True], repeat=4), ids=str)
def test_gradient_is_summed_over_what_the_mask_broadcasts(full):
    sizes = (2, 2, 40, 50)
    case = Case(batch=2, q_heads=2, kv_heads=1, q_len=40, kv_len=50)
    inputs = case.build()
    mask = torch.randn([size if whole else 1 for size, whole in zip(sizes, full, strict=True)])
    inputs.options["attn_mask"] = mask.requires_grad_()
    judge(backward(inputs), expected(inputs), torch.float32, case)
    assert mask.shape == backward(inputs)["dmask"].shape
