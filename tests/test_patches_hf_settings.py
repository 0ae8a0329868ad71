"""What a patched layer asks of its model's configuration at every call."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import GPT2Config, MistralConfig, PretrainedConfig

import patches.hf


class Renamed(PretrainedConfig):
    model_type = "renamed"
    attribute_map: ClassVar[dict[str, str]] = {"layer_types": "blocks"}


class Computed(PretrainedConfig):
    model_type = "computed"
    sliding_window = 7  # a default of the class

    @property
    def layer_types(self) -> list[str]:
        return ["full_attention"] * self.sliding_window


class Answering(PretrainedConfig):
    model_type = "answering"

    def __getattr__(self, name: str) -> Any:
        if name == "layer_types":
            return ["sliding_attention"]
        raise AttributeError(name)


@pytest.mark.parametrize("cls", [GPT2Config, Renamed, Computed, Answering])
def test_a_setting_is_what_a_configuration_answers(cls: type[PretrainedConfig]) -> None:
    config = cls()
    seen = [config]
    if find_spec("transformers.masking_utils") is not None:
        from patches.views import LayerConfig, view

        seen.append(view(LayerConfig, config))
    changes: list[dict[str, Any]] = [{}, {"sliding_window": 3}, {"blocks": ["a"]}, {"sliding_window": 2}]
    for change in changes:
        for name, value in change.items():
            setattr(config, name, value)
        for each in seen:
            for name in ("sliding_window", "layer_types", "blocks", "missing"):
                assert patches.hf.setting(each, name) == getattr(each, name, None)
            assert not patches.hf.setting(each, patches.hf._OUTPUT_ATTENTIONS)
    config.output_attentions = True
    assert all(patches.hf.setting(each, patches.hf._OUTPUT_ATTENTIONS) is True for each in seen)


def test_a_setting_of_anything_else() -> None:
    assert patches.hf.setting(SimpleNamespace(sliding_window=4), "sliding_window") == 4
    assert patches.hf.setting(SimpleNamespace(), "sliding_window") is None


@pytest.mark.skipif(not hasattr(PretrainedConfig, "per_layer_config"), reason="every layer has the same")
def test_a_setting_that_differs_between_layers_is_refused() -> None:
    layers: dict[str, Any] = {"per_layer_config": {0: {"sliding_window": 4}}}
    config = MistralConfig(num_hidden_layers=2, sliding_window=8, **layers)
    with pytest.raises(RuntimeError, match="per-layer"):
        patches.hf.setting(config, "sliding_window")
