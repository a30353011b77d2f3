"""Files of models and checkpoints that are not whole: cut off by a full disk or a broken copy, or overwritten.

Headers, end records and lengths are looked at, not the numbers themselves: a checkpoint of many gigabytes takes
milliseconds, and what is found is found before anything is loaded.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

SETTINGS_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Where transformers and PEFT look for weights: the first of these that exists is read, and no other."""


class DamagedFileError(ValueError):
    """A model that cannot be loaded; the message names the file and what to do."""


def refuse_damaged_model(name: str, revision: str | None = None) -> None:
    """Refuse a model's folder, or a hub model in the local cache, with a file that is not whole. Only what transformers
    and PEFT read is looked at. Shards that the cache does not have yet are no damage: from_pretrained fetches them.
    """
    folder = Path(name)
    if is_cached := not folder.is_dir():
        cached = _cached(name, revision)
        if cached is None:
            return
        folder = cached
    weights = weights_file(folder)
    shards = [] if weights is None else _shards(weights)
    files = [*(folder / file for file in SETTINGS_FILES), *shards]
    if weights is not None and not (is_cached and shards):
        files.append(weights)
    found = first_damaged(files)
    if found is None:
        return
    if is_cached:
        at = f" --revision {revision}" if revision else ""
        raise DamagedFileError(f"{found}; download it again with `hf download {name}{at} --force-download`")
    raise DamagedFileError(
        f"{found}; copy or download it again. If a run made the model, move {folder} away and run the same command "
        "again: its stage is then finished again, from its last checkpoint"
    )


def refuse_unusable_weights(folder: Path) -> None:
    """Refuse a model that was just saved with tensors that are empty, as weights are that were not gathered, or not
    finite. Every number is read.
    """
    from safetensors import safe_open

    weights = weights_file(folder)
    files = [] if weights is None else _shards(weights) or [weights]
    found, total = [], 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor, total = file.get_tensor(name), total + 1
                if not tensor.numel():
                    found.append(f"{name} is empty")
                elif not tensor.isfinite().all():
                    found.append(f"{name} has {int((~tensor.isfinite()).sum())} of {tensor.numel()} numbers not finite")
    if found or not total:
        raise DamagedFileError(
            f"{folder}: {len(found)} of {total} saved tensors cannot be used"
            f"{f' ({found[0]})' if found else ''}; the stage is not done. If numbers are not finite, lower its "
            "learning_rate and start it again; its checkpoints are as they were"
        )


def weights_file(folder: Path) -> Path | None:
    """The file that the weights of a model or adapter are read from, which may be an index of shards."""
    names = ADAPTER_WEIGHTS if (folder / "adapter_config.json").is_file() else WEIGHTS
    return next((folder / name for name in names if (folder / name).is_file()), None)


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
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"\x80\x02":
        return None  # torch's format before 1.6, which has no end that could be looked for
    if not zipfile.is_zipfile(path):  # by the record at the end
        return f"{size} bytes, " + ("its end is missing" if start == b"PK" else "not a file of torch.save")
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:  # its header is compared with the list at the end
                    if name.endswith("/data.pkl"):  # all but the numbers of the tensors
                        member.read()  # its checksum is compared
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError) as error:
        return f"{size} bytes, {error}"
    return None


def _json(path: Path) -> str | None:
    try:
        json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"{path.stat().st_size} bytes, not JSON: {str(error).splitlines()[0]}"
    missing = next((shard for shard in _shards(path) if not shard.is_file()), None)
    return f"it lists {missing.name}, which is missing" if missing is not None else None


def _shards(index: Path) -> list[Path]:
    """The files that an index of weights lists; none for other files, and for an index that is damaged."""
    if not index.name.endswith(".index.json"):
        return []
    try:
        content = json.loads(index.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return []
    shards = content.get("weight_map") if isinstance(content, dict) else None
    return [index.parent / name for name in sorted({*map(str, shards.values())})] if isinstance(shards, dict) else []


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None
