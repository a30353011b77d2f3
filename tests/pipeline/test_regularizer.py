"""The recipe's regularizer: settings that belong together, everything written out, and the object made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
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


def test_costs_of_another_model(tmp_path: Path) -> None:
    other = tiny.policy(seed=5)
    other.save_pretrained(tmp_path / "other")
    settings = RegularizerSettings(neighbours=8, k2=4, embeddings=str(tmp_path / "other"))
    own = RegularizerSettings(neighbours=8, k2=4)
    found = build_regularizer(settings, tiny.policy())(logits(0), logits(1), TOKENS).penalty
    assert torch.equal(found, build_regularizer(own, other)(logits(0), logits(1), TOKENS).penalty)
    assert not torch.equal(found, build_regularizer(own, tiny.policy())(logits(0), logits(1), TOKENS).penalty)


def test_costs_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    tiny.policy(vocab_size=41).save_pretrained(tmp_path / "other")
    settings = RegularizerSettings(neighbours=8, embeddings=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"other has 41 tokens and the policy 40; only a model of the same tokenizer"):
        build_regularizer(settings, tiny.policy())
