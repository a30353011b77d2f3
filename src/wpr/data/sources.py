"""Which files a source stands for: local paths, folders, glob patterns, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from wpr.data.formats import HUB
from wpr.data.readers import SUFFIXES, is_readable
from wpr.data.rows import DataError
from wpr.data.settings import DataSettings

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Files:
    """Training and validation files, each with the name that errors call it by."""

    train: list[tuple[Path, str]]
    validation: list[tuple[Path, str]] = field(default_factory=list)


def find_files(settings: DataSettings, offline: bool | None = None) -> Files:
    """The files of a source; those of the hub are downloaded, or taken from the cache.

    offline: never ask the hub; None leaves it to the environment (``HF_HUB_OFFLINE=1``).
    """
    own = HUB.get(settings.format)
    source = settings.source
    if source is None:
        if own is None:
            raise DataError(f"data.format {settings.format} has no dataset of its own; set data.source to your file")
        source = own.name
    if isinstance(source, str) and Path(source).expanduser().is_dir():
        found = _in_folder(Path(source).expanduser(), source, settings)
    elif isinstance(source, str) and _is_hub_name(source):
        found = _in_folder(_download(source, settings, offline), source, settings)
    else:
        if settings.files is not None or settings.validation_files is not None:
            raise DataError(
                f"data.files and data.validation_files are patterns within a folder or hub dataset, and data.source "
                f"({source}) names files; leave them out, and name validation files in data.validation"
            )
        found = Files(_local(source, "data.source"))
    if settings.validation is not None:
        found = Files(found.train, _local(settings.validation, "data.validation"))
    trained = {path.resolve() for path, _ in found.train}
    for path, name in found.validation:
        if path.resolve() in trained:
            raise DataError(f"{name} is both a training and a validation file; take it out of one of them")
    return found


def _is_hub_name(source: str) -> bool:
    return bool(_HUB_NAME.fullmatch(source)) and not is_readable(source) and not Path(source).exists()


def _local(source: str | list[str], setting: str) -> list[tuple[Path, str]]:
    """Files by path or glob pattern, or the only data file of a folder, in the order given, each once."""
    found: dict[Path, str] = {}
    for entry in [source] if isinstance(source, str) else source:
        path = Path(entry).expanduser()
        if path.is_dir():
            names = _data_files(path)
            if len(names) != 1:
                raise DataError(
                    f"{setting}: the folder {entry} has {len(names)} data files ({_some(names)}), and it is not said "
                    "which to read; name the files or a pattern"
                )
            matches = [str(path / names[0])]
        elif path.exists():
            matches = [str(path)]
        elif glob.has_magic(entry):
            matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            if not matches:
                raise DataError(
                    f"{setting}: no file matches {entry!r}; check the pattern (it is relative to {Path.cwd()})"
                )
        else:
            raise DataError(
                f"{setting}: there is no file {entry!r} (relative paths start at {Path.cwd()}), and it is not the name "
                "of a hub dataset (OWNER/NAME); check the spelling"
            )
        for match in matches:
            found.setdefault(Path(match), match)
    return list(found.items())


def _in_folder(folder: Path, name: str, settings: DataSettings) -> Files:
    own = HUB.get(settings.format)
    names = _data_files(folder)
    if not names:
        raise DataError(f"data.source: {name} has no data files; files that can be read end in {', '.join(SUFFIXES)}")
    wanted = settings.files or (own.train if own else ())
    train = _matching(names, wanted)
    if not train and settings.files is None and len(names) == 1:
        train = names
    if not train:
        raise DataError(
            f"data.source: {name} has no file that matches {_patterns(wanted)}; it has {_some(names)}: set data.files "
            "to patterns of the training files"
        )
    patterns = settings.validation_files
    if patterns is None and settings.files is None and settings.validation is None and own:
        patterns = list(own.validation)
    validation = _matching(names, patterns or ())
    if settings.validation_files and not validation:
        raise DataError(
            f"data.validation_files: {name} has no file that matches {_patterns(settings.validation_files)}; it has "
            f"{_some(names)}"
        )
    return Files(*([(folder / file, f"{name}/{file}") for file in part] for part in (train, validation)))


def _data_files(folder: Path) -> list[str]:
    """Readable files under a folder, by their path within it; hidden folders are left out."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if is_readable(path.name) and path.is_file())
    return sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _patterns(patterns: Sequence[str]) -> str:
    return " or ".join(map(repr, patterns)) or "a pattern (data.files is not set)"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _download(name: str, settings: DataSettings, offline: bool | None) -> Path:
    own = HUB.get(settings.format)
    train = settings.files or (own.train if own else None)
    if train is None:
        raise DataError(
            f"data.source {name} is no local path, so it is a hub dataset, and data.format {settings.format} does not "
            "know its files; set data.files, for instance ['data/train-*.parquet']"
        )
    held_out = settings.validation_files
    if held_out is None:
        held_out = list(own.validation) if own and settings.files is None and settings.validation is None else []
    patterns = [*train, *held_out]
    revision = settings.revision or (own.revision if own and own.name == name else None)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(
            f"the hub dataset {name} needs huggingface_hub; `pip install huggingface_hub`, or set data.source to a "
            "local path"
        ) from None
    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=bool(offline)
        )
    except Exception as error:  # its errors come from several libraries, and all mean: the files are not here
        raise _not_here(
            name, revision, patterns, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None
    if not _matching(_data_files(Path(folder)), train):
        raise _not_here(name, revision, patterns, f"no file matches {_patterns(train)}")
    return Path(folder)


def _not_here(name: str, revision: str | None, patterns: Sequence[str], reason: str) -> DataError:
    include = " ".join(f'--include "{pattern}"' for pattern in patterns)
    at = f" --revision {revision}" if revision else ""
    return DataError(
        f"the dataset {name} is neither a local path nor in the cache, and could not be had from the hub ({reason}). "
        f"Either run `hf download {name} --repo-type dataset{at} {include}` on a connected machine with the same "
        "HF_HOME, or set data.source to a local file or folder; if the dataset has other files, name them in data.files"
    )
