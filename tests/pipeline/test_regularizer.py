"""The recipe's regularizer: settings that belong together, everything written out, and the object made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.ppo import tiny
from wpr.pipeline.errors import UserError
from wpr.pipeline.models import load_causal
from wpr.pipeline.recipe import ModelSettings
from wpr.pipeline.regularizer import RegularizerSettings, build_regularizer
from wpr.regularizers import Wasserstein
from wpr.regularizers.registry import ALIASES, REGULARIZERS, make_regularizer
from wpr.regularizers.wasserstein_settings import PRESETS
from wpr.transport.geometry import TokenGeometry, input_embeddings

PLAIN = [name for name in REGULARIZERS if name != "wasserstein"]
SOLVER: dict[str, Any] = {
    "lam": 3.0, "k2": 7, "iterations": 4, "tolerance": 0.5, "marginals": "unbalanced", "rho": 2.0, "floor": 0.0,
    "debias": False, "gauge": "raw", "scaled": False,
}  # fmt: skip
GEOMETRY: dict[str, Any] = {"metric": "cosine", "neighbours": 5, "scale": 2.0, "embeddings": "some/model"}
OTHER: dict[str, Any] = {"preset": "paper"} | GEOMETRY | SOLVER


def logits(seed: int) -> torch.Tensor:
    return torch.randn(6, tiny.TOKENS, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.arange(6)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_written_out(preset: Any) -> None:
    found = RegularizerSettings(preset=preset).resolved()
    geometry = {"metric": "euclidean", "neighbours": 512, "scale": "median-nn", "embeddings": None}
    assert found == {"name": "wasserstein", "preset": preset, **geometry, **vars(PRESETS[preset])}


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_every_part_can_be_set_by_itself(name: str, value: Any) -> None:
    before = RegularizerSettings().resolved()
    after = RegularizerSettings(**{name: value}).resolved()
    assert after[name] == value
    if name != "preset":
        assert {key: part for key, part in after.items() if part != before[key]}.keys() <= {name}


def test_nothing_given_is_the_recommended_preset() -> None:
    assert RegularizerSettings().resolved() == RegularizerSettings(name="wpr", preset="semantic").resolved()


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_regularizer(alias: str) -> None:
    assert RegularizerSettings(alias).resolved() == RegularizerSettings(ALIASES[alias]).resolved()


@pytest.mark.parametrize("name", PLAIN)
def test_f_divergences_are_written_out(name: str) -> None:
    found = RegularizerSettings(name).resolved()
    assert (found["name"], found["estimator"]) == (name, "gradient")
    assert found.get("alpha") == (0.5 if name == "alpha" else None)


@pytest.mark.parametrize(
    "part",
    ["estimator", "gauge"],
)
@pytest.mark.parametrize("name", PLAIN)
def test_what_changes_the_penalty_changes_what_is_written_out(name: str, part: str) -> None:
    """A stage is compared with its record by this: a part that is missing would change without a word."""
    other = {"estimator": "paper", "gauge": "raw"}[part]
    assert RegularizerSettings(name, **{part: other}).resolved() != RegularizerSettings(name).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [name for name in OTHER if name != "gauge"])
def test_parts_of_wasserstein_mean_nothing_to_others(part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}=.* has no meaning for rkl; leave it out"):
        RegularizerSettings("rkl", **{part: OTHER[part]})


@pytest.mark.parametrize(
    ("name", "part", "value"), [("wasserstein", "estimator", "paper"), ("wpr", "alpha", 0.5), ("js", "alpha", 0.5)]
)
def test_parts_of_others(name: str, part: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{part}=.* has no meaning for {name}"):
        RegularizerSettings(name, **{part: value})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "wassersten"}, "did you mean 'wasserstein'"),
        ({"scale": "median"}, "scale='median' must be median-nn, none or a number"),
        ({"k2": 0}, "k2=0 must be an integer of at least 1"),
        ({"preset": "semantic", "floor": 1e-16}, "floor=1e-16 has no meaning with marginals='unbalanced'"),
        ({"name": "alpha", "alpha": 0.0}, "alpha"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RegularizerSettings(**settings)


@pytest.mark.parametrize("settings", [{"neighbours": 0}, {"neighbours": -1}, {"scale": 0.0}, {"scale": -1.0}])
def test_no_neighbours_and_no_scale(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        RegularizerSettings(**settings)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("estimator", ["gradient", "paper"])
def test_f_divergences_are_built(name: str, estimator: Any) -> None:
    built = build_regularizer(RegularizerSettings(name, estimator=estimator), None)
    expected = make_regularizer(name, estimator=estimator)
    assert type(built) is type(expected)
    found, wanted = (kind(logits(0), logits(1), TOKENS) for kind in (built, expected))
    assert torch.equal(found.penalty, wanted.penalty)


def test_options_reach_f_divergences() -> None:
    assert repr(build_regularizer(RegularizerSettings("alpha", alpha=0.3, gauge="raw"), None)) == (
        "Alpha(0.3, estimator='gradient', gauge='raw')"
    )


@pytest.mark.parametrize(
    ("settings", "geometry", "options"),
    [
        ({"neighbours": 8}, {"neighbours": 8}, {}),
        ({"neighbours": 8, "preset": "paper", "lam": 2.0}, {"neighbours": 8}, {"preset": "paper", "lam": 2.0}),
        ({"neighbours": 8, "scale": 0.5, "rho": 1.0}, {"neighbours": 8, "scale": 0.5}, {"rho": 1.0}),
        (
            {"neighbours": "all", "scale": "none", "metric": "cosine", "preset": "paper"},
            {"neighbours": None, "scale": None, "metric": "cosine"},
            {"preset": "paper"},
        ),
    ],
)
def test_wasserstein_is_built_on_the_reference(
    settings: dict[str, Any], geometry: dict[str, Any], options: dict[str, Any]
) -> None:
    options, reference = dict(options), tiny.policy()
    built = build_regularizer(RegularizerSettings(**settings, k2=4), reference)
    made = TokenGeometry.from_embeddings(input_embeddings(reference), **geometry)
    expected = Wasserstein(made, options.pop("preset", "semantic"), k2=4, **options)
    found, wanted = (kind(logits(0), logits(1), TOKENS) for kind in (built, expected))
    assert torch.equal(found.penalty, wanted.penalty)
    assert found.penalty.abs().max() > 0


def saved(folder: Path, tokenizer: Any = None, **changes: Any) -> str:
    """A model's folder, with its tokenizer."""
    tiny.policy(**changes).save_pretrained(folder)
    (tokenizer or tiny.tokenizer()).save_pretrained(folder)
    return str(folder)


def with_swapped_tokens(first: str, second: str) -> Any:
    """The tests' tokenizer, but two tokens have each other's id."""
    inner = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    ids = inner["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(inner)), eos_token="</s>")


@pytest.mark.parametrize("rows", [tiny.TOKENS, tiny.TOKENS + 24])
def test_costs_of_another_model(tmp_path: Path, rows: int) -> None:
    """Of the same tokenizer, from another file; its matrix may be padded further."""
    other = saved(tmp_path / "other", seed=5, vocab_size=rows)
    reference = load_causal(ModelSettings(saved(tmp_path / "own")))
    settings = RegularizerSettings(neighbours=8, k2=4, embeddings=other)
    own = RegularizerSettings(neighbours=8, k2=4)
    found = build_regularizer(settings, reference)(logits(0), logits(1), TOKENS).penalty
    weight = input_embeddings(load_causal(ModelSettings(other)))[: tiny.TOKENS]
    expected = Wasserstein(TokenGeometry.from_embeddings(weight, neighbours=8), k2=4)
    assert torch.equal(found, expected(logits(0), logits(1), TOKENS).penalty)
    assert not torch.equal(found, build_regularizer(own, reference)(logits(0), logits(1), TOKENS).penalty)


def test_costs_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Two tokenizers of one size are told apart by their tokens, and the first that differ are named."""
    other = saved(tmp_path / "other", with_swapped_tokens("w3", "w7"))
    reference = load_causal(ModelSettings(saved(tmp_path / "own")))
    settings = RegularizerSettings(neighbours=8, k2=4, embeddings=other)
    ids = tiny.tokenizer().get_vocab()
    first, second = sorted([ids["w3"], ids["w7"]])
    told = f"2 ids differ, the first are {first} is 'w7' and not 'w3', {second} is 'w3' and not 'w7'"
    with pytest.raises(ValueError, match=f"has another tokenizer than .*own: {told}.*; only a model of the same"):
        build_regularizer(settings, reference)


def test_a_token_that_only_one_of_them_has(tmp_path: Path) -> None:
    """In both matrices there is a row for it: one of them is padded."""
    larger = tiny.tokenizer()
    larger.add_tokens(["<new>"])
    rows = tiny.TOKENS + 8
    other = saved(tmp_path / "other", larger, vocab_size=rows)
    reference = load_causal(ModelSettings(saved(tmp_path / "own", vocab_size=rows)))
    with pytest.raises(ValueError, match=r"1 ids differ, the first are \d+ is '<new>' and not None \(None: no token\)"):
        build_regularizer(RegularizerSettings(neighbours=8, k2=4, embeddings=other), reference)


def test_a_matrix_that_is_padded_less(tmp_path: Path) -> None:
    other = saved(tmp_path / "other")
    reference = load_causal(ModelSettings(saved(tmp_path / "own", vocab_size=tiny.TOKENS + 1)))
    with pytest.raises(
        ValueError, match="other has embeddings of 40 tokens and the policy of 41: the tokenizer is the"
    ):
        build_regularizer(RegularizerSettings(neighbours=8, k2=4, embeddings=other), reference)


def test_a_model_without_a_tokenizer_gives_no_costs(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "other")
    reference = load_causal(ModelSettings(saved(tmp_path / "own")))
    settings = RegularizerSettings(neighbours=8, k2=4, embeddings=str(tmp_path / "other"))
    with pytest.raises(
        UserError, match="regularizer.embeddings: .*other holds no tokenizer that transformers can load"
    ):
        build_regularizer(settings, reference)


@pytest.mark.parametrize(
    ("settings", "tokens", "setting", "told"),
    [
        ({"k2": 128}, 96, "k2", "k2=128 exceeds the vocabulary (96 tokens); set k2 to 96 or less"),
        ({"k2": 8, "neighbours": 96}, 96, "neighbours", "set neighbours to 95 or less, or to all"),
        ({"preset": "paper", "k2": 8}, 512, "neighbours", "neighbours=512 exceeds the other tokens of the vocabulary"),
    ],
)
def test_a_vocabulary_that_is_too_small(settings: dict[str, Any], tokens: int, setting: str, told: str) -> None:
    found = RegularizerSettings(**settings).check_vocabulary(tokens)
    assert found is not None
    assert found[0] == setting
    assert told in found[1]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({"k2": 96, "neighbours": 95}, 96), ({"k2": 2, "neighbours": "all"}, 2), ({"name": "reverse-kl"}, 2), ({}, 513)],
)
def test_a_vocabulary_that_is_large_enough(settings: dict[str, Any], tokens: int) -> None:
    assert RegularizerSettings(**settings).check_vocabulary(tokens) is None
