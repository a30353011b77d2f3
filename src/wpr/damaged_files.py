"""Files of models and checkpoints that are not whole: cut off by a full disk or a broken copy, or overwritten.

Headers, end records and lengths are looked at, not the numbers themselves: a checkpoint of many gigabytes takes
milliseconds, and what is found is found before anything is loaded.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path

MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json",
    "*.index.json", "model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin", "adapter_model*.bin",
)  # fmt: skip
"""What transformers and PEFT read of a model's folder; what else lies there is its owner's affair."""


class DamagedFileError(ValueError):
    """A model that cannot be loaded; the message names the file and what to do."""


def refuse_damaged_model(name: str) -> None:
    """Refuse a model's folder, or a hub model in the local cache, with a file that is not whole."""
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    if folder is None:
        return
    found = first_damaged(path for pattern in MODEL_FILES for path in folder.glob(pattern))
    if found is not None:
        raise DamagedFileError(
            f"{found}; copy or download it again. If a run made the model, move {folder} away and run the same command "
            "again: its stage is then finished anew, from its last checkpoint"
        )


def first_damaged(paths: Iterable[Path]) -> str | None:
    """What is wrong with the first of the files that is damaged, in words that begin with its path."""
    for path in sorted(paths):
        if path.is_file() and (reason := _damage(path)) is not None:
            return f"{path} is damaged ({reason})"
    return None


def _damage(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _torch(path)
    return _json(path) if path.suffix == ".json" else None


def _safetensors(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # its header is compared with the file's length
            return None
    except SafetensorError as error:
        return f"{path.stat().st_size} bytes, {str(error).removeprefix('Error while deserializing header: ')}"


def _torch(path: Path) -> str | None:
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"\x80\x02":
        return None  # torch's format before 1.6, which has no end that could be looked for
    if zipfile.is_zipfile(path):  # by the record at the end
        return None
    return f"{path.stat().st_size} bytes, " + ("its end is missing" if start == b"PK" else "not a file of torch.save")


def _json(path: Path) -> str | None:
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"{path.stat().st_size} bytes, not JSON: {str(error).splitlines()[0]}"
    shards = content.get("weight_map") if isinstance(content, dict) else None
    missing = sorted({str(name) for name in shards.values()} - _names(path.parent)) if isinstance(shards, dict) else []
    return f"it lists {missing[0]}, which is missing" if missing else None


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _cached(name: str) -> Path | None:
    """The folder of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None
