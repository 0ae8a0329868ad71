"""The regressions of tests/regressions once more, on the kernels: the fixtures of this folder say where."""

# ruff: noqa: F403
from __future__ import annotations

import pytest

from tests.regressions.test_alignment import *
from tests.regressions.test_compile import *
from tests.regressions.test_determinism import *
from tests.regressions.test_dropout import *
from tests.regressions.test_grouped_heads import *
from tests.regressions.test_masks import *
from tests.regressions.test_packing import *
from tests.regressions.test_precision import *
from tests.regressions.test_shapes import *
from tests.regressions.test_size import *
from tests.regressions.test_strides import *

pytestmark = pytest.mark.gpu
