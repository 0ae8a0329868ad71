"""What needs no second process; tests/distributed has whole models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn.shared_trainer import check_loss, eval_batches, group_of


class Rows:
    """A data set of [2] tokens, each a row's number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((2,), index)
        return {"input_ids": row, "labels": row.clone()}


@pytest.mark.parametrize("count", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_row_is_evaluated_once(count: int, groups: int) -> None:
    """In as many rounds of each group, which all take part in collectives."""
    rounds = [list(eval_batches(Rows(count), 2, groups, group)) for group in range(groups)]
    assert len({len(each) for each in rounds}) == 1
    labels = torch.cat([batch["labels"] for each in rounds for batch in each])
    counted = labels[labels[:, 1] != -100]
    assert sorted(counted[:, 1].tolist()) == list(range(count))


def test_processes_that_make_no_groups() -> None:
    arguments: Any = SimpleNamespace(world_size=3)
    assert group_of(arguments, 1) is None
    with pytest.raises(ValueError, match=r"3 process\(es\) make no groups of 2; launch a multiple of 2"):
        group_of(arguments, 2)


def test_a_loss_of_a_models_own() -> None:
    config: Any = SimpleNamespace(output_router_logits=True, model_type="mixtral")
    with pytest.raises(ValueError, match="auxiliary loss of mixtral's routers is not served"):
        check_loss(config)
    config.output_router_logits = False
    check_loss(config)
