"""The recipe's regularizer: settings that belong together, everything written out, and the object made from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.model_geometry import regularizer_on
from wpr.regularizers import Sum, Wasserstein
from wpr.regularizers.registry import ALIASES, REGULARIZERS, make_regularizer
from wpr.regularizers.spec import RegularizerSpec
from wpr.regularizers.wasserstein_settings import PRESETS, TRANSFORMS
from wpr.transport.geometry import TokenGeometry, input_embeddings

from_settings = RegularizerSpec.from_settings
PLAIN = [name for name in REGULARIZERS if name != "wasserstein"]
SOLVER: dict[str, Any] = {
    "lam": 3.0, "k2": 7, "iterations": 4, "tolerance": 0.5, "marginals": "unbalanced", "rho": 2.0, "floor": 0.0,
    "debias": False, "gauge": "raw", "scaled": False,
}  # fmt: skip
GEOMETRY: dict[str, Any] = {"metric": "cosine", "power": 2.0, "neighbours": 5, "scale": 2.0, "embeddings": "some/model"}
OTHER: dict[str, Any] = {"preset": "paper"} | GEOMETRY | SOLVER


def logits(seed: int) -> torch.Tensor:
    return torch.randn(6, tiny.TOKENS, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.arange(6)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_written_out(preset: Any) -> None:
    found = from_settings(preset=preset).resolved()
    geometry = {"metric": "euclidean", "neighbours": 512, "scale": "median-nn", "embeddings": None}
    if TRANSFORMS[preset] != "none":
        geometry["transform"] = TRANSFORMS[preset]
    assert found == {"name": "wasserstein", "preset": preset, **geometry, **vars(PRESETS[preset])}


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_every_part_can_be_set_by_itself(name: str, value: Any) -> None:
    before = from_settings().resolved()
    after = from_settings(**{name: value}).resolved()
    assert after[name] == value
    if name != "preset":
        assert {key: part for key, part in after.items() if part != before.get(key)}.keys() <= {name}


def test_nothing_given_is_the_recommended_preset() -> None:
    assert from_settings().resolved() == from_settings(name="wpr", preset="semantic").resolved()


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_regularizer(alias: str) -> None:
    assert from_settings(alias).resolved() == from_settings(ALIASES[alias]).resolved()


@pytest.mark.parametrize("name", PLAIN)
def test_f_divergences_are_written_out(name: str) -> None:
    found = from_settings(name).resolved()
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
    assert from_settings(name, **{part: other}).resolved() != from_settings(name).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [name for name in OTHER if name != "gauge"])
def test_parts_of_wasserstein_mean_nothing_to_others(part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}=.* has no meaning for rkl; leave it out"):
        from_settings("rkl", **{part: OTHER[part]})


@pytest.mark.parametrize(
    ("name", "part", "value"), [("wasserstein", "estimator", "paper"), ("wpr", "alpha", 0.5), ("js", "alpha", 0.5)]
)
def test_parts_of_others(name: str, part: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{part}=.* has no meaning for {name}"):
        from_settings(name, **{part: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "wassersten"}, "did you mean 'wasserstein'"),
        ({"scale": "median"}, "scale='median' must be median-nn, none or a number"),
        ({"power": 0.0}, "power=0 is outside 0.1 to 4; set 1 for distances"),
        ({"power": 5}, "power=5 is outside 0.1 to 4"),
        ({"k2": 0}, "k2=0 must be an integer of at least 1"),
        ({"preset": "semantic", "floor": 1e-16}, "floor=1e-16 has no meaning with marginals='unbalanced'"),
        ({"name": "alpha", "alpha": 0.0}, "alpha"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_settings(**settings)


@pytest.mark.parametrize("settings", [{"neighbours": 0}, {"neighbours": -1}, {"scale": 0.0}, {"scale": -1.0}])
def test_no_neighbours_and_no_scale(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        from_settings(**settings)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("estimator", ["gradient", "paper"])
def test_f_divergences_are_built(name: str, estimator: Any) -> None:
    built = from_settings(name, estimator=estimator).build()
    expected = make_regularizer(name, estimator=estimator)
    assert type(built) is type(expected)
    found, wanted = (kind(logits(0), logits(1), TOKENS) for kind in (built, expected))
    assert torch.equal(found.penalty, wanted.penalty)


def test_options_reach_f_divergences() -> None:
    assert repr(from_settings("alpha", alpha=0.3, gauge="raw").build()) == (
        "Alpha(0.3, estimator='gradient', gauge='raw')"
    )


@pytest.mark.parametrize(
    ("settings", "geometry", "options"),
    [
        ({"neighbours": 8}, {"neighbours": 8, "transform": "centre/unit"}, {}),
        ({"neighbours": 8, "transform": "unit"}, {"neighbours": 8, "transform": "unit"}, {}),
        ({"neighbours": 8, "transform": "unit/shuffle-1"}, {"neighbours": 8, "transform": "unit/shuffle-1"}, {}),
        ({"neighbours": 8, "preset": "unbalanced"}, {"neighbours": 8}, {"preset": "unbalanced"}),
        ({"neighbours": 8, "preset": "paper", "lam": 2.0}, {"neighbours": 8}, {"preset": "paper", "lam": 2.0}),
        ({"neighbours": 8, "power": 2.0}, {"neighbours": 8, "power": 2.0, "transform": "centre/unit"}, {}),
        (
            {"neighbours": 8, "preset": "unbalanced", "scale": 0.5, "rho": 1.0},
            {"neighbours": 8, "scale": 0.5},
            {"preset": "unbalanced", "rho": 1.0},
        ),
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
    built = regularizer_on(reference, from_settings(**settings, k2=4))
    made = TokenGeometry.from_embeddings(input_embeddings(reference), **geometry)
    expected = Wasserstein(made, options.pop("preset", "semantic"), k2=4, **options)
    found, wanted = (kind(logits(0), logits(1), TOKENS) for kind in (built, expected))
    assert torch.equal(found.penalty, wanted.penalty)
    assert found.penalty.abs().max() > 0


@pytest.mark.parametrize(
    ("settings", "tokens", "setting", "message"),
    [
        ({"k2": 128}, 96, "k2", "k2=128 exceeds the vocabulary (96 tokens); set k2 to 96 or less"),
        ({"k2": 8, "neighbours": 96}, 96, "neighbours", "set neighbours to 95 or less, or to all"),
    ],
)
def test_a_vocabulary_that_is_too_small(settings: dict[str, Any], tokens: int, setting: str, message: str) -> None:
    found = from_settings(**settings).check_vocabulary(tokens)
    assert found is not None
    assert found[0] == setting
    assert message in found[1]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({"k2": 96, "neighbours": 95}, 96), ({"k2": 2, "neighbours": "all"}, 2), ({"name": "reverse-kl"}, 2), ({}, 513)],
)
def test_a_vocabulary_that_is_large_enough(settings: dict[str, Any], tokens: int) -> None:
    assert from_settings(**settings).check_vocabulary(tokens) is None


def test_what_was_not_asked_for_by_number_is_lowered_to_the_vocabulary() -> None:
    spec, notes = from_settings("paper", lam=50).fitted(96)
    assert spec == from_settings("paper", lam=50, k2=96, neighbours=95)
    assert notes == ["k1 is 95, all other tokens of a vocabulary of 96.", "k2 is 96, the whole vocabulary."]
    for large_enough in (from_settings("paper"), from_settings("paper", neighbours="all"), from_settings("rkl")):
        assert large_enough.fitted(5000) == (large_enough, [])
    with pytest.raises(ValueError, match=r"k2=97 exceeds the vocabulary \(96 tokens\); set k2 to 96 or less"):
        from_settings("paper", k2=97).fitted(96)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("rkl", {"name": "reverse-kl"}),
        ("alpha:alpha=0.3,estimator=paper", {"name": "alpha", "alpha": 0.3, "estimator": "paper"}),
        ("semantic", {}),
        ("paper", {"preset": "paper"}),
        ("wpr:preset=paper", {"preset": "paper"}),
        ("semantic:lam=10,k2=7,neighbours=all,scale=none,debias=false",
         {"lam": 10.0, "k2": 7, "neighbours": "all", "scale": "none", "debias": False}),
        ("semantic:scale=0.5,neighbours=12,embeddings=my/model,rho=1e1,marginals=balanced",
         {"scale": 0.5, "neighbours": 12, "embeddings": "my/model", "rho": 10.0, "marginals": "balanced"}),
    ],
)  # fmt: skip
def test_texts_are_settings(text: str, settings: dict[str, Any]) -> None:
    assert RegularizerSpec.parse(text) == from_settings(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "semanti",
            "there is no regularizer 'semanti'; did you mean 'semantic'\\? use one of paper, unbalanced, semantic, ",
        ),
        (
            "semantic:lamb=3",
            "'lamb=3' of .* is no setting of a regularizer; write key=value with one of preset, metric",
        ),
        ("semantic:lam", "'lam' of .* is no setting"),
        ("semantic:lam=much", "lam='much' must be a number"),
        ("semantic:k2=1.5", "k2='1.5' must be a whole number"),
        ("semantic:metric=taxi", "metric='taxi' must be euclidean or cosine"),
        ("semantic:neighbours=none", "neighbours"),
        ("semantic:debias=yes", "debias='yes' must be true or false"),
        ("semantic:preset=paper", "preset='paper' has no meaning for semantic"),
        ("semantic:estimator=paper", "estimator='paper' has no meaning for semantic"),
        ("rkl:lam=3", "lam=3.0 has no meaning for rkl"),
    ],
)
def test_texts_that_say_nothing(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegularizerSpec.parse(text)


@pytest.mark.parametrize(
    "text",
    ["reverse-kl + 4*semantic", "rkl+4*semantic", " reverse-kl  +  4.0 * semantic ", "reverse-kl + 4e0*semantic"],
)
def test_sums_in_a_text(text: str) -> None:
    spec = RegularizerSpec.parse(text)
    assert spec == RegularizerSpec.from_plain([{"name": "reverse-kl"}, {"name": "semantic", "weight": 4.0}])
    assert [part.weight for part in spec.parts] == [1.0, 4.0]


def test_a_sum_can_be_written_and_read() -> None:
    spec = RegularizerSpec.parse("reverse-kl + 4*semantic:lam=1e+1,transform=centre/unit + 0.5*alpha:alpha=0.3")
    assert RegularizerSpec.from_plain(spec.given()) == spec
    assert RegularizerSpec.from_plain(spec.resolved()).resolved() == spec.resolved()
    assert spec.costs.transform == "centre/unit"
    assert spec.parts[1].settings().lam == 10.0


def test_a_sum_is_built_on_one_geometry() -> None:
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    built = RegularizerSpec.parse("2*reverse-kl + 4*unbalanced + paper").build(weight)
    assert isinstance(built, Sum)
    assert [part_weight for part_weight, _ in built.parts] == [2.0, 4.0, 1.0]
    assert built.geometry is not None
    alone = RegularizerSpec.parse("3*reverse-kl").build()
    assert isinstance(alone, Sum)
    assert alone.parts[0][0] == 3.0


def test_a_sum_on_a_small_vocabulary() -> None:
    fitted, notes = RegularizerSpec.parse("reverse-kl + 4*semantic").fitted(50)
    assert fitted.costs.neighbours == 49
    assert fitted.parts[1].settings().k2 == 50
    assert len(notes) == 2
    assert RegularizerSpec.parse("reverse-kl + semantic:k2=60").check_vocabulary(50) is not None


def test_runs_from_before_transforms_and_powers_stay_the_same() -> None:
    assert not {"transform", "power"} & set(RegularizerSpec.parse("unbalanced:power=1").resolved())
    assert RegularizerSpec.parse("semantic:transform=unit").resolved()["transform"] == "unit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reverse-kl + 0*semantic", "weight=0.0 of semantic must be a finite positive number"),
        (
            "unbalanced + paper:neighbours=4",
            "parts of a sum have neighbours=512 and neighbours=4; they are measured on",
        ),
        ("unbalanced + paper:k2=4", "parts of a sum have k2=128 and k2=4"),
        ("unbalanced:power=2 + paper", "parts of a sum have power=2.0 and power=1.0"),
        ("semantic + paper", "parts of a sum have transform=centre/unit and transform=none"),
        ("reverse-kl + nothing", "there is no regularizer 'nothing'"),
        ("reverse-kl + -1*semantic", "weight=-1.0 of semantic must be a finite positive number"),
        ("..*semantic", "there is no regularizer '..\\*semantic'"),
        ("4*semantic:weight=3", "has the weights 4 and 3; keep one of them"),
        ("reverse-kl +", "there is no regularizer 'reverse-kl \\+'"),
        ("semantic:transform=units", "transform='units' has the step 'units'"),
    ],
)
def test_sums_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegularizerSpec.parse(text)


def test_a_sum_of_nothing_and_of_sums() -> None:
    with pytest.raises(ValueError, match="a sum of nothing"):
        RegularizerSpec.from_plain([])
    with pytest.raises(ValueError, match="a sum within a sum"):
        RegularizerSpec.sum_of([RegularizerSpec.parse("rkl + fkl")])


def test_unknown_settings_are_named() -> None:
    with pytest.raises(TypeError, match="unknown setting 'neighbors'; did you mean 'neighbours'"):
        from_settings("semantic", neighbors=3)


@pytest.mark.parametrize("text", ["rkl", "alpha:alpha=0.3", "paper:lam=50,metric=cosine", "semantic:neighbours=all"])
def test_what_is_given_makes_the_same(text: str) -> None:
    spec = RegularizerSpec.parse(text)
    assert from_settings(**spec.given()) == spec
    assert from_settings(**spec.resolved()).resolved() == spec.resolved()


@pytest.mark.parametrize("text", ["paper", "unbalanced:lam=3", "semantic", "semantic:transform=none,power=2,k2=4"])
@pytest.mark.parametrize("sum_of", ["{}", "reverse-kl + 2*{}"])
def test_records_are_read_back(text: str, sum_of: str) -> None:
    spec = RegularizerSpec.parse(sum_of.format(text))
    again = RegularizerSpec.from_record(json.loads(json.dumps(spec.resolved())))
    assert again.resolved() == spec.resolved()
    assert again.costs == spec.costs
    again.fitted(600 if "k2" in text else 40)  # what was not set is lowered to a small vocabulary


def test_records_of_older_releases() -> None:
    """In which `semantic` had no transform."""
    old = {**RegularizerSpec.parse("unbalanced:rho=4").resolved(), "preset": "semantic"}
    assert RegularizerSpec.from_record(old) == RegularizerSpec.parse("unbalanced:rho=4")


def test_geometries_are_measured_once() -> None:
    weight, cache = input_embeddings(tiny.policy()), {}
    first, second = (RegularizerSpec.parse(text).build(weight, cache) for text in ("unbalanced:k2=4", "paper:k2=4"))
    assert first.geometry is second.geometry
    assert len(cache) == 1
    assert RegularizerSpec.parse("paper:k2=4,metric=cosine").build(weight, cache).geometry is not first.geometry
    with pytest.raises(ValueError, match=r"pass the reference model's embeddings \(V, d\)"):
        RegularizerSpec().build()


def test_presets_are_names_of_make_regularizer_too() -> None:
    geometry = TokenGeometry.from_embeddings(input_embeddings(tiny.policy()), neighbours=8)
    made = make_regularizer("paper", geometry=geometry, k2=4, lam=7.0)
    assert repr(made) == repr(Wasserstein(geometry, "paper", k2=4, lam=7.0))
