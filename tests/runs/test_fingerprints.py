"""Fingerprints change with the weights and the tokenizer, and not with the place; differences are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ppo.tiny import policy, tokenizer
from wpr.data.rows import DataError
from wpr.runs.fingerprints import differences, digest, tokenizer_fingerprint, weights_fingerprint


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


def test_differences_are_dotted() -> None:
    old = {"sft": {"lr": 1e-5, "epochs": 3}, "seed": 0, "gone": 1}
    new = {"sft": {"lr": 2e-5, "epochs": 3}, "seed": 0, "new": "x"}
    assert differences(old, new) == ["gone: 1 -> not set", "new: not set -> 'x'", "sft.lr: 1e-05 -> 2e-05"]


def test_a_section_that_appears_is_one_difference() -> None:
    assert differences({"lora": None}, {"lora": {"r": 8}}) == ["lora: None -> {'r': 8}"]


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        st.integers(-2, 2) | st.none() | st.text(max_size=2), lambda part: st.dictionaries(KEYS, part, max_size=3)
    ),
    max_size=3,
)


@given(TREES)
def test_equal_settings_do_not_differ(tree: dict[str, Any]) -> None:
    assert differences(tree, json.loads(json.dumps(tree))) == []
    assert digest(tree) == digest(dict(reversed(tree.items())))


@given(TREES, TREES)
def test_settings_that_differ_are_told(old: dict[str, Any], new: dict[str, Any]) -> None:
    """A stage that is refused for other settings names at least one of them."""
    found = differences(old, new)
    assert len(found) == len(differences(new, old))
    if old != new:
        assert found
        assert digest(old) != digest(new)
