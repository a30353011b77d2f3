"""Positions where a word is expected, on wpr-pico, and which tokens are forms of a word."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.analysis.substitution_texts import STORIES
from wpr import pico
from wpr.analysis.word_positions import (
    FUNCTION_WORDS,
    PER_TEXT,
    SURE,
    WordPositions,
    find_positions,
    is_form,
    read_texts,
)
from wpr.errors import OptionError
from wpr.transport.support import NO_TOKEN


@pytest.fixture(scope="module")
def words(model: Any) -> WordPositions:
    return find_positions(model, AutoTokenizer.from_pretrained(pico.path()), STORIES, 8, likeliest=40)


def test_the_word_is_what_the_model_expects(model: Any, words: WordPositions) -> None:
    assert len(words) >= 5
    tokenizer = words.tokenizer
    for p, position in enumerate(words.positions):
        assert position.with_word(position.word) in STORIES[position.text] + " "
        assert position.word.strip() not in FUNCTION_WORDS
        start = STORIES[position.text].index(position.before + position.word) + len(position.before)
        ids = tokenizer(STORIES[position.text][:start], return_tensors="pt")["input_ids"]
        logs = model(ids).logits[0, -1].detach().double().log_softmax(-1)
        assert int(logs.argmax()) == int(words.original[p])
        assert SURE[0] < float(logs.max().exp()) < SURE[1]
        tokens = words.ids[p] != NO_TOKEN
        torch.testing.assert_close(words.log_reference[p, tokens], logs[words.ids[p, tokens]], atol=1e-4, rtol=0)
    counts = [sum(one.text == text for one in words.positions) for text in range(len(STORIES))]
    assert max(counts) <= PER_TEXT


def test_supports(words: WordPositions) -> None:
    assert words.ids.shape == (len(words), 41)
    torch.testing.assert_close(words.log_reference.exp().sum(-1), torch.ones(len(words), dtype=torch.float64))
    assert torch.equal(words.ids[:, :-1], words.ids[:, :-1].sort(-1).values)
    assert (words.ids[:, -1] == NO_TOKEN).all()
    chosen = words.support.ids.gather(-1, words.support.sampled.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(chosen, words.original)
    assert words.forbidden[words.ids == words.original.unsqueeze(-1)].all()
    assert not words.forbidden[:, -1].any()


def test_replacements_are_the_policys_choice_among_what_is_allowed(words: WordPositions) -> None:
    choice = words.replacements(words.log_reference)
    torch.testing.assert_close(choice.sum(-1), torch.ones(len(words), dtype=torch.float64))
    assert (choice[~words.allowed] == 0).all()
    q = words.log_reference.exp()
    odds = q[0] * words.allowed[0]
    torch.testing.assert_close(choice[0], odds / odds.sum())


@pytest.mark.parametrize(
    ("text", "word", "form"),
    [
        ("happy", "happy", True),
        ("happily", "happy", True),
        ("happiness", "happy", True),
        ("walked", "walking", True),
        ("walk", "walking", True),
        ("walking", "walk", True),
        ("wal", "walking", False),  # three letters may begin anything
        ("talking", "walking", False),
        ("big", "huge", False),
        ("", "walking", False),
    ],
)
def test_forms(text: str, word: str, form: bool) -> None:
    assert is_form(text, word) == form


def test_texts_without_an_expected_word(model: Any) -> None:
    with pytest.raises(OptionError, match=r"expects no word of four letters .* in 2 texts .*; give more texts"):
        find_positions(model, AutoTokenizer.from_pretrained(pico.path()), ["1 2 3", "?" * 60], 8)


def test_texts(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("one text\n\nanother\n")
    assert read_texts(plain) == ["one text", "another"]
    records = tmp_path / "b.jsonl.gz"
    rows = [{"chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Well?\n\nAssistant: Fine."}, {"text": "A text."}]
    with gzip.open(records, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert read_texts(records) == ["Fine.", "A text."]
    (tmp_path / "c.jsonl").write_text('{"word": 1}\n')
    with pytest.raises(OptionError, match=r"c.jsonl:1 has no text \(columns \['word'\]\); name it text"):
        read_texts(tmp_path / "c.jsonl")
    (tmp_path / "d.txt").write_bytes("schön".encode("latin-1"))
    for name in ("d.txt", "missing.txt", "missing.jsonl"):
        with pytest.raises(OptionError, match=f"--texts .*{name} cannot be read"):
            read_texts(tmp_path / name)
