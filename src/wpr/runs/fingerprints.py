"""What tells whether two things were made alike: fingerprints of weights, tokenizers and settings, and differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wpr.data.rows import DataError, shown

KINDS = ("*.safetensors", "*.bin", "*.gguf")
"""Files of weights, the first kind that a folder has; some folders hold the same weights in two kinds."""


def weights_fingerprint(name: str, revision: str | None = None) -> str:
    """SHA-256 of the names and contents of a model's files of weights; of a hub model, those in the local cache; of a
    PEFT adapter, also those of the model that it was made for.
    """
    folder = Path(name) if Path(name).is_dir() else _cached(name, revision)
    for kind in KINDS:
        files = sorted(folder.glob(kind))
        if files:
            break
    else:
        raise DataError(
            f"{folder} has no weights ({', '.join(KINDS)}), so that its responses could not be traced; "
            "name a folder that save_pretrained wrote"
        )
    checksum = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            checksum.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        checksum.update(f"adapter of {weights_fingerprint(str(base))}".encode())
    return checksum.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what turns text into tokens: vocabulary, rules and chat template."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    rules = inner.to_str() if inner is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    content = [rules, getattr(tokenizer, "chat_template", None), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def content_fingerprint(values: Any) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def digest(values: Any) -> str:
    """A short fingerprint of plain values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted settings that differ, as ``key: old -> new``."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif key not in old or key not in new or before != after:
            sides = (shown(side[key], 200) if key in side else "not set" for side in (old, new))
            found.append(f"{prefix}{key}: {' -> '.join(sides)}")
    return found


def _cached(name: str, revision: str | None) -> Path:
    from transformers.utils import cached_file

    return Path(cached_file(name, "config.json", revision=revision)).parent
