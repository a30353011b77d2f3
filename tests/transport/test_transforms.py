"""What is done to embeddings before distances are taken, against the formulas in plain float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from wpr import TokenGeometry
from wpr.transport.geometry_file import GeometryFileError
from wpr.transport.transforms import IDENTITY, fit, steps_of

V, D = 300, 24


def embeddings(dtype: torch.dtype = torch.float64) -> Tensor:
    """With a common direction, lengths that differ, and directions of different size."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(V, D, generator=generator, dtype=torch.float64) * torch.linspace(0.3, 2, D)
    return ((rows + 2) * (0.5 + torch.rand(V, 1, generator=generator, dtype=torch.float64))).to(dtype)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_none_is_the_matrix_itself() -> None:
    weight = embeddings()
    assert fit("none", weight)(weight) is weight
    assert IDENTITY(weight) is weight


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("centre", centred),
        ("unit", unit),
        ("centre/unit", lambda x: unit(centred(x))),
        ("unit/centre", lambda x: centred(unit(x))),
        ("unit/centre/unit", lambda x: unit(centred(unit(x)))),
    ],
)
def test_steps_in_their_order(text: str, expected: object) -> None:
    weight = embeddings()
    torch.testing.assert_close(fit(text, weight)(weight), expected(weight))  # type: ignore[operator]


def test_mean_by_frequency() -> None:
    weight = embeddings()
    frequencies = torch.rand(V, dtype=torch.float64)
    expected = weight - (frequencies / frequencies.sum()) @ weight
    torch.testing.assert_close(fit("centre-frequency", weight, frequencies)(weight), expected)


def test_leading_directions_are_gone() -> None:
    weight = centred(embeddings())
    left = fit("remove-3", weight)(weight)
    singular = torch.linalg.svdvals(weight)
    torch.testing.assert_close(torch.linalg.svdvals(left)[:-3], singular[3:], rtol=1e-6, atol=1e-6)
    assert torch.linalg.svdvals(left)[-3:].max() < 1e-6


@pytest.mark.parametrize("power", [0.125, 0.5, 1.0])
def test_whitening_makes_directions_more_equal(power: float) -> None:
    weight = centred(embeddings())
    white = fit(f"whiten-{power}", weight)(weight)
    before, after = torch.linalg.svdvals(weight) / V**0.5, torch.linalg.svdvals(white) / V**0.5
    torch.testing.assert_close(after, before ** (1 - power), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("text", ["centre/unit/shuffle-7", "shuffle-7/centre/unit"])
def test_shuffled_tokens_have_the_costs_of_others(text: str) -> None:
    weight = embeddings()
    plain, shuffled = (
        TokenGeometry.from_embeddings(weight, neighbours=20, transform=steps) for steps in ("centre/unit", text)
    )
    order = torch.randperm(V, generator=torch.Generator().manual_seed(7))
    assert (order != torch.arange(V)).any()
    ids = torch.arange(40).unsqueeze(0)
    torch.testing.assert_close(shuffled.cost(ids), plain.cost(order[ids]))
    torch.testing.assert_close(shuffled.nearest, plain.nearest[order])
    assert shuffled.scale == pytest.approx(plain.scale)
    assert not torch.equal(shuffled.cost(ids), plain.cost(ids))


def test_shuffles_are_drawn_by_their_seeds_and_follow_each_other() -> None:
    weight = embeddings()
    first, second = (fit(f"shuffle-{seed}", weight)(weight) for seed in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(fit("shuffle-1", weight)(weight), first)
    assert torch.equal(fit("shuffle-1/shuffle-2", weight)(weight), fit("shuffle-2", first)(first))


def test_tokens_without_embeddings_are_not_shuffled() -> None:
    mapped = torch.arange(V) > 4
    with pytest.raises(ValueError, match="shuffles 295 of 300 tokens"):
        TokenGeometry.from_embeddings(embeddings(), neighbours=20, transform="shuffle-1", mapped=mapped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_type_stays(dtype: torch.dtype) -> None:
    weight = embeddings(dtype)
    out = fit("centre/unit", weight)(weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), unit(centred(weight.double())), rtol=0, atol=4e-3)


def test_geometry_has_the_costs_of_the_transformed_rows() -> None:
    weight = embeddings()
    geometry = TokenGeometry.from_embeddings(weight, neighbours=None, scale=None, transform="centre/unit")
    ids = torch.arange(9).unsqueeze(0)
    torch.testing.assert_close(geometry.cost(ids)[0], torch.cdist(*2 * (unit(centred(weight))[:9],)))
    assert "euclidean cost after centre/unit" in geometry.describe()


@pytest.mark.parametrize("text", ["centre/remove-2/unit", "centre/remove-2/unit/shuffle-3"])
def test_file(tmp_path: Path, text: str) -> None:
    """The file has what was fitted, so that another machine, which may round a mean otherwise, gets the same."""
    weight = embeddings(torch.float32)
    made = TokenGeometry.from_embeddings(weight, neighbours=20, transform=text)
    made.save(tmp_path / "a")
    read = TokenGeometry.load(tmp_path / "a", weight, transform=text)
    assert torch.equal(read.embeddings, made.embeddings)
    assert read.transform.text == made.transform.text
    with pytest.raises(GeometryFileError, match=f"transform={text}, not centre/unit; build it again"):
        TokenGeometry.load(tmp_path / "a", weight, transform="centre/unit")
    with pytest.raises(GeometryFileError, match="made for other embeddings"):
        TokenGeometry.load(tmp_path / "a", made.embeddings)
    read.save(tmp_path / "b")
    assert torch.equal(TokenGeometry.load(tmp_path / "b", weight).embeddings, made.embeddings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("center/unit", "has the step 'center', which is none; did you mean centre"),
        ("centre/", "has the step ''"),
        ("remove-0", "remove-0"),
        ("whiten-2", "whiten-2"),
        ("shuffle", "did you mean shuffle-SEED"),
        ("shuffle--1", "shuffle--1"),
        ("zebra", "use steps as centre, "),
    ],
)
def test_steps_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        steps_of(text)


def test_what_cannot_be_fitted() -> None:
    weight = embeddings()
    with pytest.raises(ValueError, match="needs token_weights"):
        fit("centre-frequency", weight)
    with pytest.raises(ValueError, match=r"token_weights of shape \(3,\) for 300 tokens"):
        fit("centre-frequency", weight, torch.ones(3))
    with pytest.raises(ValueError, match="remove-24 leaves nothing of 24 directions"):
        fit("remove-24", weight)
