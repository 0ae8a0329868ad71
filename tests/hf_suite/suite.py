"""HuggingFace's common model tests on patched models: one class a family. Run by `tests/test_hf_suite.py`.

Contract. ``HF_SUITE_TESTS`` is the folder of tests in a source distribution of transformers, whose code comes
first on the path. Every model of the family that a test builds, loads or copies is patched as soon as its
constructor has ended. The tests of eager against sdpa switch one copy to eager by `set_attn_implementation`,
which undoes no patch: here that copy is unpatched, so that eager stands against patched. No other attention
layer runs unpatched, and each patched one that runs calls the op: every test ends with that count.

The tests of `READ_NAME` are narrowed: there a patched model is given the name back that it had, as a user may
by `set_attn_implementation`. Its layers stay patched. Each runs as it was shipped too, under a name that ends
in ``_as_shipped``, and there it has to fail.

Left out on purpose: generation and export, whose tests the distribution doesn't ship.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.testing_utils import torch_device

import patches.hf
from patches import patch_model, unpatch_model
from patches.registry import is_patched
from streamattn import functional

_PACKAGE = "hf_tests"  # not `tests`, which is ours


def _common_tests() -> Any:
    """`test_modeling_common`, with empty stand-ins for the two mixins that the distribution leaves out."""
    package = ModuleType(_PACKAGE)
    package.__path__ = [os.environ["HF_SUITE_TESTS"]]
    sys.modules[_PACKAGE] = package
    for path, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        folder = f"{_PACKAGE}.{path.split('.')[0]}"
        module = ModuleType(f"{_PACKAGE}.{path}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules.update({folder: ModuleType(folder), module.__name__: module})
    return importlib.import_module(f"{_PACKAGE}.test_modeling_common")


common = _common_tests()

AS_SHIPPED = "_as_shipped"
"""End of the name of a test that runs beside its narrowed self."""

READ_NAME = ("test_can_set_attention_dynamically", "test_sdpa_can_dispatch_non_composite_models")
"""Compare the name of a model's implementation with the one that they gave it.

A wholly patched model has "streamattn" for a name, by which transformers' functions know to make compact
masks, until the user gives it another.
"""


class Tester:
    """What the common tests ask of a family: its sizes, a tiny configuration and inputs for it."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, config_class: Any, overrides: Mapping[str, Any]) -> None:
        self._config_class, self._overrides = config_class, overrides

    def get_config(self) -> Any:
        sizes = {
            "vocab_size": 99,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.2,  # the default makes every softmax nearly uniform
        }
        return self._config_class(**{**sizes, **self._overrides})

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(3, 99, shape, device=torch_device)
        mask = torch.ones(shape, dtype=torch.long, device=torch_device).tril()
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Strict:
    """numpy for the comparisons with eager, which let one row of seven differ; the padded row is just one.

    They take the mean over rows of "close"; the minimum asks for every row.
    """

    mean = staticmethod(np.min)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Patched(common.GenerationTesterMixin, common.ModelTesterMixin):
    """The common tests with every model of a family patched.

    Attributes:
        package: name of one in `transformers.models`.
        prefix: of the family's class names.
        overrides: settings of the tiny configuration.
    """

    test_can_init_all_missing_weights_before_2023 = True  # by default left out for families of that age
    package: str
    prefix: str
    overrides: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        package = importlib.import_module(f"transformers.models.{cls.package}")
        heads = ("Model", "LMHeadModel", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
        names = [f"{cls.prefix}{head}" for head in (*heads, "ForQuestionAnswering")]
        cls.all_model_classes = tuple(getattr(package, name) for name in names if hasattr(package, name))
        cls.base = getattr(package, f"{cls.prefix}PreTrainedModel")
        cls.config_class = getattr(package, f"{cls.prefix}Config")
        for test in READ_NAME:
            setattr(cls, test + AS_SHIPPED, getattr(common.ModelTesterMixin, test))

    @pytest.fixture(autouse=True)
    def every_model_is_patched(
        self, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
    ) -> Iterator[None]:
        self.model_tester = Tester(self.config_class, self.overrides)
        test = self._testMethodName
        against_eager, reads_name = "eager_matches_sdpa" in test, test in READ_NAME
        post_init, set_implementation = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation
        forward, packed = functional.attention_forward, patches.hf.packed_attention
        ran: Counter[str] = Counter()

        def patch_at_the_end(model: PreTrainedModel) -> None:
            post_init(model)
            if isinstance(model, self.base):
                name: Any = model.config._attn_implementation
                patch_model(model)
                if reads_name:
                    set_implementation(model, name)

        def unpatch_for_eager(model: PreTrainedModel, name: Any, *args: Any, **kwargs: Any) -> None:
            set_implementation(model, name, *args, **kwargs)
            if name == "eager":
                unpatch_model(model)

        def count_layer(module: Any, args: Any) -> None:
            if type(module).__name__.endswith("Attention"):
                ran["patched" if is_patched(module) else module.config._attn_implementation] += 1

        def count_op(*args: Any, **kwargs: Any) -> Any:
            ran["ops"] += 1
            return forward(*args, **kwargs)

        def count_packed(*args: Any, **kwargs: Any) -> Any:
            ran["ops"] += 1
            return packed(*args, **kwargs)

        monkeypatch.setattr(PreTrainedModel, "post_init", patch_at_the_end)
        if against_eager or reads_name:
            # A family that HuggingFace doesn't run on sdpa would not be tested at all.
            monkeypatch.setattr(self.base, "_supports_sdpa", True)
        if against_eager:
            monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", unpatch_for_eager)
            monkeypatch.setattr(common, "np", Strict())
        monkeypatch.setattr(functional, "attention_forward", count_op)
        monkeypatch.setattr(patches.hf, "packed_attention", count_packed)
        handle = register_module_forward_pre_hook(count_layer)
        try:
            yield
        finally:
            handle.remove()
        record_property("layers", ran["patched"])
        layers = ("patched", "eager") if against_eager else ("patched",)
        assert ran == Counter(dict.fromkeys((*layers, "ops"), ran["patched"])), ran


_GROUPED = MappingProxyType({"num_key_value_heads": 2, "intermediate_size": 64})
_WIDE = MappingProxyType({**_GROUPED, "head_dim": 16})


class TestGPT2(Patched, unittest.TestCase):
    package, prefix = "gpt2", "GPT2"


class TestOlmo2(Patched, unittest.TestCase):
    package, prefix, overrides = "olmo2", "Olmo2", _GROUPED


class TestLlama(Patched, unittest.TestCase):
    package, prefix, overrides = "llama", "Llama", _GROUPED


class TestQwen3(Patched, unittest.TestCase):
    package, prefix, overrides = "qwen3", "Qwen3", _WIDE


class TestGemma2(Patched, unittest.TestCase):
    package, prefix, overrides = "gemma2", "Gemma2", _WIDE
