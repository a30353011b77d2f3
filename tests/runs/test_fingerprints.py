"""Fingerprints change with the weights and the tokenizer, and not with the place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.ppo.tiny import policy, tokenizer
from wpr.data.rows import DataError
from wpr.runs.fingerprints import tokenizer_fingerprint, weights_fingerprint


def test_weights(tmp_path: Path) -> None:
    model = policy()
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = weights_fingerprint(str(tmp_path / "a"))
    assert weights_fingerprint(str(tmp_path / "b")) == first
    model.model.norm.weight.data[3] += 1e-6
    model.save_pretrained(tmp_path / "c")
    assert weights_fingerprint(str(tmp_path / "c")) != first
    with pytest.raises(DataError, match="has no weights"):
        weights_fingerprint(str(tmp_path))


def test_an_adapter_hangs_on_its_model(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        base = tmp_path / "base"
        policy(seed).save_pretrained(base)
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"the same")
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        found.append(weights_fingerprint(str(tmp_path / "adapter")))
    assert found[0] != found[1]


def test_tokenizer() -> None:
    one, other = tokenizer(), tokenizer()
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)
