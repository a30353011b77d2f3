"""Saving and loading: round trip, and every kind of file that must be refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wpr import TokenGeometry
from wpr.transport import geometry_file
from wpr.transport.distances import PairwiseCost
from wpr.transport.geometry_file import GeometryFileError, fingerprint


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(50, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(weight: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "geometry.safetensors"
    TokenGeometry.from_embeddings(weight, neighbours=7).save(path)
    return path


def rewrite(path: Path, **changes: str) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path, metadata | changes)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("neighbours", [7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(
    metric: str, neighbours: int | None, dtype: torch.dtype, weight: torch.Tensor, tmp_path: Path
) -> None:
    weight = weight.to(dtype)
    geometry = TokenGeometry.from_embeddings(weight, metric, neighbours)
    geometry.save(tmp_path / "g")
    back = TokenGeometry.load(tmp_path / "g", weight, metric, neighbours)
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(back.cost(ids), geometry.cost(ids))
    assert (back.scale, back.scale_rule, back.neighbours) == (geometry.scale, geometry.scale_rule, neighbours)
    assert torch.equal(back.alive, geometry.alive)
    assert back.embeddings.data_ptr() == weight.data_ptr()


def test_same_values_in_another_precision_are_the_same_embeddings(weight: torch.Tensor) -> None:
    half = weight.bfloat16()
    assert fingerprint(half) == fingerprint(half.float()) == fingerprint(half.double())
    assert fingerprint(half) != fingerprint(weight)


def test_other_embeddings_are_refused(path: Path, weight: torch.Tensor) -> None:
    changed = weight.clone()
    changed[31, 2] += 1e-6
    with pytest.raises(GeometryFileError, match="made for other embeddings"):
        TokenGeometry.load(path, changed)
    with pytest.raises(GeometryFileError, match=r"50 tokens.*40 tokens"):
        TokenGeometry.load(path, weight[:40])


def test_other_settings_are_refused(path: Path, weight: torch.Tensor) -> None:
    with pytest.raises(GeometryFileError, match="neighbours=7, not 9"):
        TokenGeometry.load(path, weight, neighbours=9)
    with pytest.raises(GeometryFileError, match="'euclidean', not 'cosine'"):
        TokenGeometry.load(path, weight, metric="cosine")


def test_a_power_is_in_the_file(path: Path, weight: torch.Tensor, tmp_path: Path) -> None:
    made = TokenGeometry.from_embeddings(weight, neighbours=7, power=1.7)
    made.save(tmp_path / "g")
    back = TokenGeometry.load(tmp_path / "g", weight, power=1.7)
    assert back.power == 1.7
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(back.cost(ids), made.cost(ids))
    with pytest.raises(GeometryFileError, match=r"made with power=1.7, not 1; build it again with power=1, or ask for"):
        TokenGeometry.load(tmp_path / "g", weight, power=1)
    with pytest.raises(GeometryFileError, match=r"made with power=1, not 2"):
        TokenGeometry.load(path, weight, power=2)


def test_tokens_without_an_embedding_are_in_the_file(weight: torch.Tensor, tmp_path: Path) -> None:
    mapped = torch.arange(50) % 5 > 0
    made = TokenGeometry.from_embeddings(weight, neighbours=7, mapped=mapped, transform="centre")
    made.save(tmp_path / "g")
    back = TokenGeometry.load(tmp_path / "g", weight)
    assert torch.equal(back.mapped, mapped)
    ids = torch.arange(50).unsqueeze(0)
    assert torch.equal(back.cost(ids), made.cost(ids))


def test_a_file_from_before_powers(path: Path, weight: torch.Tensor) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | {"version": "2"}
    del metadata["power"]
    metadata["content"] = geometry_file._content_hash(tensors, metadata)
    save_file(tensors, path, metadata)
    assert TokenGeometry.load(path, weight, power=1).power == 1


def test_older_and_foreign_formats_are_refused(path: Path, weight: torch.Tensor) -> None:
    rewrite(path, version="0")
    with pytest.raises(GeometryFileError, match="format version 0, this release reads version 3"):
        TokenGeometry.load(path, weight)
    rewrite(path, format="something else")
    with pytest.raises(GeometryFileError, match="not a geometry file"):
        TokenGeometry.load(path, weight)


def test_damage_is_noticed_wherever_it_is(path: Path, weight: torch.Tensor) -> None:
    """Bytes flipped one at a time all over the file, and truncations: never a silent success with other numbers."""
    good = path.read_bytes()
    original = TokenGeometry.load(path, weight)
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        try:
            loaded = TokenGeometry.load(path, weight)
        except GeometryFileError:
            continue
        assert torch.equal(loaded.radius, original.radius)
        assert loaded.scale == original.scale
    for length in (0, 5, 100, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(GeometryFileError, match="damaged"):
            TokenGeometry.load(path, weight)


def test_missing_file_is_an_ordinary_error(tmp_path: Path, weight: torch.Tensor) -> None:
    with pytest.raises(FileNotFoundError):
        TokenGeometry.load(tmp_path / "none", weight)


def test_custom_metric_must_be_given_again(weight: torch.Tensor, tmp_path: Path) -> None:
    def squared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, y).square()

    TokenGeometry.from_embeddings(weight, squared, neighbours=7).save(tmp_path / "g")
    with pytest.raises(GeometryFileError, match="pass that function as metric"):
        TokenGeometry.load(tmp_path / "g", weight)
    assert TokenGeometry.load(tmp_path / "g", weight, squared).neighbours == 7


def test_interrupted_save_leaves_the_old_file(
    path: Path, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        TokenGeometry.from_embeddings(weight, neighbours=9).save(path)
    assert path.read_bytes() == good
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_function_of_the_same_name_is_refused(weight: torch.Tensor, tmp_path: Path) -> None:
    def power(p: float) -> PairwiseCost:
        return lambda x, y: torch.cdist(x, y).pow(p)

    TokenGeometry.from_embeddings(weight, power(1.0), neighbours=7).save(tmp_path / "g")
    assert TokenGeometry.load(tmp_path / "g", weight, power(1.0)).neighbours == 7
    with pytest.raises(GeometryFileError, match="another function"):
        TokenGeometry.load(tmp_path / "g", weight, power(2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_in_another_precision_keeps_the_edges(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=20)
    geometry.save(tmp_path / "g")
    ids = torch.arange(300).unsqueeze(0)
    double = TokenGeometry.load(tmp_path / "g", weight.double())
    assert torch.equal(double.cost(ids).isfinite(), geometry.cost(ids).isfinite())
