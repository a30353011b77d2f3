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
from wpr.transport.geometry import TokenGeometry, fingerprint
from wpr.transport.precision import full_precision
from wpr.transport.transforms import NONE, Transform

FORMAT = "wpr-geometry"
VERSION = 3
READABLE = ("1", "2", "3")
"""The first version had no transforms, the second neither powers nor tokens without embeddings."""
_TENSORS = ("radius", "nearest", "alive", "probe")
_TRANSFORM = "transform."
"""Before the names of what a transform fitted."""


class GeometryFileError(ValueError):
    """A geometry file that cannot be used: the message says why and what to do."""


def save(geometry: TokenGeometry, path: Path) -> None:
    """Write ``geometry`` to ``path``; an older file there is replaced only by a complete new one."""
    from safetensors.torch import save as to_bytes

    tensors = {"radius": geometry.radius, "nearest": geometry.nearest, "alive": geometry.alive.to(torch.uint8)}
    tensors["probe"] = _probe(geometry.metric, geometry.embeddings, geometry.mapped)
    tensors |= {_TRANSFORM + name: tensor for name, tensor in geometry.transform.tensors.items()}
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "metric": geometry.metric.name,
        "neighbours": str(geometry.neighbours),
        "scale": float(geometry.scale).hex(),
        "scale_rule": geometry.scale_rule,
        "embeddings": geometry.source or fingerprint(geometry.embeddings),
        "transform": geometry.transform.text,
        "power": float(geometry.power).hex(),
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


def load(
    path: Path,
    weight: Tensor,
    metric: str | PairwiseCost | Metric | None,
    neighbours: Any,
    transform: str = "any",
    power: Any = "any",
) -> TokenGeometry:
    """Read and check a file written by `save`; see `TokenGeometry.load`."""
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise GeometryFileError(
            f"{path} is not a geometry file; build one with TokenGeometry.from_model(...).save(...)"
        )
    if metadata.get("version") not in READABLE:
        raise GeometryFileError(
            f"{path} has format version {metadata.get('version')}, this release reads version {VERSION}; build it again"
        )
    missing = {"metric", "neighbours", "scale", "scale_rule", "embeddings", "content"} - set(metadata)
    content = _content_hash(tensors, metadata)
    fitted = {name.removeprefix(_TRANSFORM): tensors.pop(name) for name in list(tensors) if name.startswith(_TRANSFORM)}
    if missing or set(tensors) != set(_TENSORS) or metadata["content"] != content:
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
    made = metadata.get("transform", NONE)
    if transform != "any" and transform != made:
        raise GeometryFileError(
            f"{path} was made with transform={made}, not {transform}; build it again with transform={transform}, or "
            f"ask for {made}"
        )
    raised = float.fromhex(metadata.get("power", "0x1p0"))
    if power != "any" and power != raised:
        raise GeometryFileError(
            f"{path} was made with power={raised:g}, not {power:g}; build it again with power={power:g}, or ask for "
            f"{raised:g}"
        )
    source = None if made == NONE else metadata["embeddings"]
    steps = Transform(made, {name: tensor.to(weight.device) for name, tensor in fitted.items()})
    weight = steps(weight)
    if not torch.allclose(_probe(resolved, weight, tensors["radius"] >= 0), tensors["probe"], rtol=1e-3, atol=1e-6):
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
        transform=steps,
        source=source,
        power=raised,
    )


def _probe(metric: Metric, weight: Tensor, mapped: Tensor) -> Tensor:
    """Distances between the first tokens that have embeddings ``(8, 8)``, which tell one metric from another."""
    rows = weight[mapped.nonzero().squeeze(-1)[:8].to(weight.device)].to(torch.float64)
    with full_precision(rows.device):
        return metric.pairwise(rows, rows).fill_diagonal_(0).to(device="cpu", dtype=torch.float32)


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
