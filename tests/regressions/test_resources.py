"""Shared memory: a large head_dim gets a smaller tile, on GPUs whose blocks have least of it too.

Needs Triton's compiler and no GPU: the launchers are asked what they would launch, and that is compiled.
`tests/kernels/test_tiles_compiled.py` compiles every row of the tables in this way (``pytest -m sweep``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamattn.dispatch import MAX_TRITON_HEAD_DIM
from streamattn.kernels.tiles import architecture

pytest.importorskip("triton", reason="Triton is not installed")

from tests import offline
from tests.kernels.conftest import INTERPRETING
from tests.kernels.test_tiles_compiled import launches

__all__ = ["launches"]  # the fixture
pytestmark = pytest.mark.skipif(INTERPRETING, reason="run it without TRITON_INTERPRET=1")


# triton-lang/triton#8182: out of shared memory at a large head_dim
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 6), (12, 0)], ids=str)
def test_the_widest_heads_fit_a_block(
    capability: tuple[int, int],
    launches: Callable[..., dict[str, offline.Launch]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = architecture(capability)
    monkeypatch.setitem(offline.CAPABILITY, rows, 10 * capability[0] + capability[1])
    compiled = {
        name: offline.compiled(launch, rows, tmp_path)
        for name, launch in launches(rows, torch.bfloat16, MAX_TRITON_HEAD_DIM, {}).items()
    }
    assert set(compiled) == {"forward", "dq", "dkdv"}
    for name, binary in compiled.items():
        assert 0 < binary.shared <= offline.SHARED_BYTES[rows], name
