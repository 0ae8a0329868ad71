"""Generation from patched models of several families: token for token what unpatched eager attention says.

Every way of decoding on every kind of cache, in float32, with prompts of uneven length where a batch is one.
Windows are smaller than the prompts, so that they slide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patches import patch_model
from tests import hf_families
from tests.hf_families import LENGTH, present, spy_layers
from tests.hf_models import cache_argument, left_padding, tokens
from tests.hf_wrapped import DEEP, layers, pair, spared_square_masks

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

INTERFACE = present("Llama", "Mistral", "Gemma 2", "gpt-oss", "Llama 4")
DECODERS = [*DEEP, *INTERFACE]
SEQ2SEQ = present("BART", "T5", "Whisper")
COUNT = 64


def prompts(name: str, rows: int = 2) -> dict[str, Tensor]:
    """What a model reads before it generates: prompts of uneven length, padded on the left."""
    if name in SEQ2SEQ:
        arguments = hf_families.inputs(name, "left" if name != "Whisper" else None)[0]
        return {key: value[:rows] for key, value in arguments.items() if "decoder" not in key}
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    return {"input_ids": ids[:rows], "attention_mask": mask[:rows]}


def generated(model: Any, arguments: dict[str, Any], count: int = COUNT, **options: Any) -> Tensor:
    """`count` new tokens, greedy unless `options` say otherwise."""
    lengths = {"min_new_tokens": count, "max_new_tokens": count}
    with torch.no_grad():
        torch.manual_seed(4)
        return model.generate(**arguments, **{"do_sample": False, **lengths, **options})


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 3.0},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2, "temperature": 3.0},
}
# What else GPT-2 and OLMo-2 do, greedy or on a dynamic cache, is in the tests of their patches.
CASES = [
    *(
        (name, way, cache)
        for name in DEEP
        for way, cache in (
            ("beams", "static"),
            ("sampling", "static"),
            ("sampled beams", "dynamic"),
            ("sampled beams", "static"),
        )
    ),
    *((name, "greedy", cache) for name in [*INTERFACE, *SEQ2SEQ] for cache in ("dynamic", "static", "none")),
    *(
        (name, way, cache)
        for name in present("Llama", "Gemma 2", "gpt-oss", "BART")
        for way in WAYS
        for cache in ("dynamic", "static")
        if way != "greedy"
    ),
]


@pytest.mark.parametrize(("name", "way", "cache"), CASES)
def test_decoding(name: str, way: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(name)
    options = {**WAYS[way], "no_repeat_ngram_size": 2}
    if cache == "static":
        options["cache_implementation"] = "static"
    elif cache == "none":
        options["use_cache"] = False
    count = COUNT if way == "greedy" and cache == "dynamic" else 24
    expected = generated(reference, prompts(name), count, **options)
    patch_model(model)
    calls = spy_layers(monkeypatch)
    found = generated(model, prompts(name), count, **options)
    assert len(calls) >= layers(model)
    assert spared_square_masks(name, calls) or (name in DEEP and cache == "static")
    assert torch.equal(found, expected)
    assert len(set(found.flatten().tolist())) > 6  # it says something


def alone(model: Any, name: str) -> list[Tensor]:
    """What a model says to each prompt by itself, without padding."""
    ids, mask = prompts(name).values()
    rows = [row[seen.bool()][None] for row, seen in zip(ids, mask, strict=True)]
    each = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    return [generated(model, one, 24)[0, one["input_ids"].shape[1] :] for one in each]


@pytest.mark.parametrize("name", DECODERS)
def test_uneven_prompts_are_generated_as_alone(name: str) -> None:
    """huggingface/transformers#29075: a row must not see the padding before it."""
    model, reference = pair(name)
    expected = torch.stack(alone(reference, name))
    if not torch.equal(generated(reference, prompts(name), 24)[:, LENGTH:], expected):
        pytest.skip("in this release padding is seen unpatched too")
    patch_model(model)
    assert torch.equal(generated(model, prompts(name), 24)[:, LENGTH:], expected)
    assert torch.equal(torch.stack(alone(model, name)), expected)


# Several queries on a cache that isn't empty


@pytest.mark.parametrize(("size", "cache"), [(4, "dynamic"), (7, "dynamic"), (4, "static")])
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_in_chunks(name: str, size: int, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(name)
    expected = generated(reference, prompts(name), 24)
    options = {"prefill_chunk_size": size, "cache_implementation": cache}
    try:
        right = torch.equal(generated(reference, prompts(name), 24, **options), expected)
    except IndexError:
        right = False
    if not right:
        pytest.skip("in this release chunks go wrong unpatched too")
    patch_model(model)
    calls = spy_layers(monkeypatch)
    found = generated(model, prompts(name), 24, **options)
    assert torch.equal(found, expected)
    assert max(recorded["q"].shape[2] for recorded in calls) == size
    assert spared_square_masks(name, calls) or (name in DEEP and cache == "static")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_that_goes_on_from_a_cache(name: str, padded: bool) -> None:
    """Two continuations of one prefix, and a second turn after the first one's answer."""
    model, reference = pair(name)
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7 if padded else 0)
    patch_model(model)
    key = cache_argument(model)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        prefix = model(ids[:, :12], attention_mask=mask[:, :12], position_ids=places[:, :12], use_cache=True)[
            key
        ]
    for seed in (1, 2):
        arguments = {"input_ids": ids[:, :12], "attention_mask": mask[:, :12]}
        cache = copy.deepcopy(prefix)
        for turn in range(2):
            arguments = spoken(arguments, tokens(2, 5, seed + 7 * turn))
            expected = generated(reference, arguments, 16)
            found: Any = generated(model, arguments, 16, return_dict_in_generate=True, **{key: cache})
            assert torch.equal(found.sequences, expected)
            arguments = spoken(arguments, expected[:, -16:])
            cache = found[key]


def spoken(arguments: dict[str, Tensor], new: Tensor) -> dict[str, Tensor]:
    """A prompt with more tokens after it."""
    ids = torch.cat([arguments["input_ids"], new], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([arguments["attention_mask"], torch.ones_like(new)], dim=1),
    }


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_decoder_that_starts_with_several_tokens(name: str, cache: str) -> None:
    model, reference = pair(name)
    arguments = {**prompts(name), "decoder_input_ids": tokens(2, 6, seed=3)}
    expected = generated(reference, arguments, 24)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}  # which is the default
    found = generated(patch_model(model), arguments, 24, **options)
    assert torch.equal(found, expected)


# Drafts by another model, and by what was said before

DRAFTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "small model": lambda name, patched: {"assistant_model": assistant(name, patched)},
    "prompt lookup": lambda name, patched: {"prompt_lookup_num_tokens": 3},
}


def assistant(name: str, patched: bool) -> Any:
    """A model that guesses right only now and then: the same one with noise."""
    model = pair(name)[0]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return patch_model(model) if patched else model


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "small model") for name in [*DECODERS, *SEQ2SEQ]),
        *(
            (name, "prompt lookup") for name in [*DECODERS, *SEQ2SEQ] if name != "Whisper"
        ),  # which hears no tokens
    ],
)
def test_assisted_decoding(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several drafted tokens at once on a cache, which is cut back to what was right."""
    model, reference = pair(name)
    arguments = prompts(name, rows=1)
    plain = generated(reference, arguments, 24)
    try:
        expected = generated(reference, arguments, 24, **DRAFTS[how](name, False))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        pytest.skip(f"in this release it fails unpatched too: {error}")
    patch_model(model)
    for patched in (False, True):
        with monkeypatch.context() as patch:
            calls = spy_layers(patch)
            found = generated(model, arguments, 24, **DRAFTS[how](name, patched))
            drafts = [recorded["q"].shape[2] for recorded in calls[2 * layers(model) :]]
        assert torch.equal(found, expected)
        assert any(1 < length < 7 for length in drafts)
    assert torch.equal(expected, plain)


# Weights of every step


@pytest.mark.parametrize("name", [name for name in [*DECODERS, *SEQ2SEQ] if name != "Llama 4"])
def test_weights_of_every_step(name: str) -> None:
    model, reference = pair(name)
    options = {"output_attentions": True, "return_dict_in_generate": True}
    found: Any = generated(patch_model(model), prompts(name, rows=1), 8, **options)
    expected: Any = generated(reference, prompts(name, rows=1), 8, **options)
    keys = [key for key in expected if key.endswith("attentions")]
    assert keys
    for key in keys:
        assert len(found[key]) == len(expected[key])
        for a, b in zip(flat(found[key]), flat(expected[key]), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def flat(weights: Any) -> list[Tensor]:
    """Tensors out of tuples of them, or of tuples of those."""
    return [weights] if isinstance(weights, Tensor) else [x for each in weights for x in flat(each)]
