"""Geometry files: radii and scale in safetensors, written atomically, refused when stale, foreign or damaged."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.transport.distances import Metric, PairwiseCost, resolve_metric
from wpr.transport.geometry import TokenGeometry
from wpr.transport.precision import full_precision

FORMAT = "wpr-geometry"
VERSION = 1
_TENSORS = ("radius", "nearest", "alive", "probe")


class GeometryFileError(ValueError):
    """A geometry file that cannot be used: the message says why and what to do."""


def save(geometry: TokenGeometry, path: Path) -> None:
    """Write ``geometry`` to ``path``; an older file there is replaced only by a complete new one."""
    from safetensors.torch import save as to_bytes

    tensors = {"radius": geometry.radius, "nearest": geometry.nearest, "alive": geometry.alive.to(torch.uint8)}
    tensors["probe"] = _probe(geometry.metric, geometry.embeddings)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "metric": geometry.metric.name,
        "neighbours": str(geometry.neighbours),
        "scale": float(geometry.scale).hex(),
        "scale_rule": geometry.scale_rule,
        "embeddings": fingerprint(geometry.embeddings),
    }
    metadata["content"] = _content_hash(tensors, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(to_bytes(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: Path, weight: Tensor, metric: str | PairwiseCost | Metric | None, neighbours: Any) -> TokenGeometry:
    """Read and check a file written by `save`; see `TokenGeometry.load`."""
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise GeometryFileError(
            f"{path} is not a geometry file; build one with TokenGeometry.from_model(...).save(...)"
        )
    if metadata.get("version") != str(VERSION):
        raise GeometryFileError(
            f"{path} has format version {metadata.get('version')}, this release reads version {VERSION}; build it again"
        )
    missing = {"metric", "neighbours", "scale", "scale_rule", "embeddings", "content"} - set(metadata)
    if missing or set(tensors) != set(_TENSORS) or metadata["content"] != _content_hash(tensors, metadata):
        raise GeometryFileError(
            f"{path} is damaged: its content does not match its checksum; delete it and build it again"
        )
    if metadata["embeddings"] != fingerprint(weight):
        raise GeometryFileError(
            f"{path} was made for other embeddings ({len(tensors['radius'])} tokens) than these ({weight.shape[0]} "
            f"tokens of size {weight.shape[1]}); build a geometry for this model"
        )
    kept = None if metadata["neighbours"] == "None" else int(metadata["neighbours"])
    if neighbours != "any" and neighbours != kept:
        raise GeometryFileError(
            f"{path} was made with neighbours={kept}, not {neighbours}; build it again with neighbours={neighbours}, "
            f"or ask for {kept}"
        )
    resolved = _matching_metric(path, metadata["metric"], metric)
    if not torch.allclose(_probe(resolved, weight), tensors["probe"], rtol=1e-3, atol=1e-6):
        raise GeometryFileError(
            f"{path} was made with another function called {resolved.name!r}: it gives other costs for the first "
            f"tokens; "
            "pass the function that the file was made with, or build it again"
        )
    return TokenGeometry(
        embeddings=weight,
        metric=resolved,
        neighbours=kept,
        radius=tensors["radius"].to(weight.device),
        nearest=tensors["nearest"].to(weight.device),
        alive=tensors["alive"].bool().to(weight.device),
        scale=float.fromhex(metadata["scale"]),
        scale_rule=metadata["scale_rule"],
    )


def _probe(metric: Metric, weight: Tensor) -> Tensor:
    """Costs between tokens at the start of the vocabulary ``(8, 8)``, which tell one metric from another."""
    rows = weight[:8].to(torch.float64)
    with full_precision(rows.device):
        return metric.pairwise(rows, rows).fill_diagonal_(0).to(device="cpu", dtype=torch.float32)


def fingerprint(weight: Tensor) -> str:
    """SHA-256 of the embeddings' shape and values. The same values in bf16, float32 or float64 give the same
    fingerprint.
    """
    digest = hashlib.sha256(f"{tuple(weight.shape)}".encode())
    for block in weight.detach().split(4096):
        digest.update(block.to(device="cpu", dtype=torch.float64).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise GeometryFileError(
            f"{path} is damaged or not a safetensors file ({error}); delete it and build it again"
        ) from error


def _content_hash(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 of the tensors and of all metadata but this hash itself."""
    digest = hashlib.sha256(repr(sorted(item for item in metadata.items() if item[0] != "content")).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _matching_metric(path: Path, stored: str, asked: str | PairwiseCost | Metric | None) -> Metric:
    if asked is None:
        if stored.startswith("custom:"):
            raise GeometryFileError(
                f"{path} was made with the function {stored.removeprefix('custom:')!r}; pass that function as metric"
            )
        return resolve_metric(stored)
    metric = resolve_metric(asked)
    if metric.name != stored:
        raise GeometryFileError(
            f"{path} was made with metric {stored!r}, not {metric.name!r}; build it again with the metric that you "
            f"want, or ask for {stored!r}"
        )
    return metric
