"""`wpr geometry build` and `show`, on a model made here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from wpr.commands.token_geometry import build_geometry, show_geometry
from wpr.errors import OptionError, UserError
from wpr.recipes.tiny import prepare
from wpr.transport.geometry import TokenGeometry, input_embeddings
from wpr.transport.geometry_file import GeometryFileError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    prepare(folder, pairs=80, hidden=16, layers=1)
    return str(folder / "model")


@pytest.fixture(scope="module")
def measured(model: str) -> TokenGeometry:
    weight = input_embeddings(AutoModelForCausalLM.from_pretrained(model))
    return TokenGeometry.from_embeddings(weight, neighbours=64, transform="centre/unit")


def test_build_then_show_tell_the_same(model: str, measured: TokenGeometry, tmp_path: Path) -> None:
    path = tmp_path / "geometry.safetensors"
    message = build_geometry(model, path, "euclidean", "64", "median-nn")
    assert message == f"{measured.describe()}\nwritten to {path}"
    assert show_geometry(model, path, []) == measured.describe()


def test_a_transform_is_in_the_file(model: str, tmp_path: Path) -> None:
    build_geometry(model, tmp_path / "g", "euclidean", "8", "median-nn", "unit")
    assert "euclidean cost after unit, the 8 nearest kept" in show_geometry(model, tmp_path / "g", [])
    with pytest.raises(OptionError, match="--transform='centred' has the step 'centred', which is none"):
        build_geometry(model, tmp_path / "g", "euclidean", "8", "median-nn", "centred")


def test_a_power_is_in_the_file(model: str, tmp_path: Path) -> None:
    build_geometry(model, tmp_path / "g", "euclidean", "8", "median-nn", power="2")
    assert "euclidean cost to the power 2 after centre/unit, the 8 nearest kept" in show_geometry(
        model, tmp_path / "g", []
    )
    for power, message in (("9", "--power=9 is outside 0.1 to 4"), ("two", "--power='two' must be a number")):
        with pytest.raises(OptionError, match=message):
            build_geometry(model, tmp_path / "h", "euclidean", "8", "median-nn", power=power)
    assert not (tmp_path / "h").exists()


def test_output_embeddings(model: str, tmp_path: Path) -> None:
    untied = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=False)
    torch.nn.init.normal_(untied.lm_head.weight)
    untied.save_pretrained(tmp_path / "untied")
    path = tmp_path / "g"
    message = build_geometry(str(tmp_path / "untied"), path, "euclidean", "8", "median-nn", "none", embeddings="output")
    expected = TokenGeometry.from_model(untied, neighbours=8, embeddings="output").describe()
    assert message == f"{expected}\nwritten to {path}"
    assert show_geometry(str(tmp_path / "untied"), path, [], "output") == expected
    with pytest.raises(GeometryFileError, match="was made for other embeddings"):
        show_geometry(str(tmp_path / "untied"), path, [])


@pytest.mark.parametrize(
    ("metric", "neighbours", "scale", "words"),
    [
        ("cosine", "8", "none", ["cosine cost", "the 8 nearest kept", "scale 1 (none)"]),
        ("euclidean", "all", "0.25", ["euclidean cost", "all pairs kept", "scale 0.25"]),
    ],
)
def test_every_choice_is_in_the_file(
    metric: str, neighbours: str | None, scale: str, words: list[str], model: str, tmp_path: Path
) -> None:
    build_geometry(model, tmp_path / "g.safetensors", metric, neighbours, scale)
    message = show_geometry(model, tmp_path / "g.safetensors", [])
    for word in words:
        assert word in message


def test_show_without_a_file_measures(model: str) -> None:
    assert "the 399 nearest kept" in show_geometry(model, None, [])  # of 400: the vocabulary is smaller than k1


def test_the_default_k1_is_more_than_a_small_vocabulary_has(model: str, tmp_path: Path) -> None:
    """`wpr geometry build` without options, as its own help shows it for the tiny recipe's model."""
    message = build_geometry(model, tmp_path / "g.safetensors", "euclidean", None, "median-nn")
    assert "the 399 nearest kept" in message


@pytest.mark.parametrize(
    ("neighbours", "message"),
    [
        (
            "400",
            r"--neighbours=400 exceeds the other tokens of the vocabulary \(399\); set .* to 399 or less, or to all",
        ),
        ("0", "--neighbours=0 must be 1 or more, or all"),
        ("some", "--neighbours='some' must be a whole number or all"),
    ],
)
def test_neighbours_that_there_are_not(neighbours: str, message: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        build_geometry(model, tmp_path / "g.safetensors", "euclidean", neighbours, "median-nn")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .*choose another file with --output"):
        build_geometry(model, tmp_path / "file" / "g.safetensors", "euclidean", None, "median-nn")


def test_nearest_tokens_of_words(model: str, measured: TokenGeometry) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    (token,) = tokenizer(" the", add_special_tokens=False)["input_ids"]
    ids, costs = measured.nearest_tokens(token)
    nearest = f"{tokenizer.decode([int(ids[0])])!r} {costs[0].item():.2f}"
    lines = show_geometry(model, None, ["the", "zebra"]).splitlines()[-2:]
    assert lines[0].startswith(f"the: {nearest}, ")
    found = [float(cost) for cost in re.findall(r"' (\d+\.\d\d)", lines[0])]
    assert len(found) == 8
    assert found == sorted(found)
    pieces = tokenizer(" zebra", add_special_tokens=False)["input_ids"]
    assert lines[1].startswith(f"zebra (of {len(pieces)} tokens; the first is {tokenizer.decode([pieces[0]])!r}): ")


def test_a_file_of_another_model(model: str, tmp_path: Path) -> None:
    build_geometry(model, tmp_path / "g.safetensors", "euclidean", "64", "median-nn")
    prepare(tmp_path, seed=1, pairs=80, hidden=16, layers=1)
    with pytest.raises(GeometryFileError, match="was made for other embeddings"):
        show_geometry(str(tmp_path / "model"), tmp_path / "g.safetensors", [])


@pytest.mark.parametrize("text", ["median", "", "big", "-1"])
def test_what_is_no_scale(text: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--scale=.* must be a (positive )?number"):
        build_geometry(model, tmp_path / "g.safetensors", "euclidean", None, text)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a folder nor to be had from the hub"):
        show_geometry("nobody/nothing", None, [])
    with pytest.raises(UserError, match="holds no language model that transformers can load"):
        show_geometry(str(tmp_path), None, [])
    assert not list(tmp_path.iterdir())
