"""Judges of a word in its context: sentence vectors, and the likelihood under another model, against plain loops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.analysis.substitution_texts import STORIES
from tests.ppo import tiny
from wpr import pico
from wpr.analysis.in_context import similarities, word_nll
from wpr.analysis.word_positions import WordPositions, find_positions
from wpr.errors import OptionError
from wpr.evaluation.encoders import SentenceEncoder


@pytest.fixture(scope="module")
def words(model: Any) -> WordPositions:
    return find_positions(model, AutoTokenizer.from_pretrained(pico.path()), STORIES[:3], 3, likeliest=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico.path(), tmp_path / "encoder"))


def test_a_sentence_is_the_mean_of_its_tokens(folder: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(folder))
    found = encoder(["A small boat.", *STORIES[:2]], batch_size=2)
    for text, vector in zip(["A small boat.", *STORIES[:2]], found, strict=True):
        ids = encoder.encoder.tokenizer(text, return_tensors="pt")["input_ids"]
        mean = encoder.encoder.model(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, mean / mean.norm(), atol=1e-5, rtol=0)


def test_pooling_as_the_folder_asks_for(folder: Path) -> None:
    config = folder / "1_Pooling" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    encoder = SentenceEncoder.from_pretrained(str(folder))
    ids = encoder.encoder.tokenizer(STORIES[0], return_tensors="pt")["input_ids"]
    first = encoder.encoder.model(ids).last_hidden_state[0, 0]
    torch.testing.assert_close(encoder(STORIES[:1])[0], first / first.norm(), atol=1e-5, rtol=0)
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(OptionError, match="asks for neither the mean of the tokens nor the first"):
        SentenceEncoder.from_pretrained(str(folder))


def test_an_encoder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the encoder .* cannot be loaded .* name a folder"):
        SentenceEncoder.from_pretrained(str(tmp_path))


def test_the_word_itself_is_most_like_the_original(words: WordPositions, folder: Path) -> None:
    wanted = words.ids >= 0
    found = similarities(words, wanted, SentenceEncoder.from_pretrained(str(folder)))
    assert torch.equal(found.isnan(), ~wanted)
    original = words.ids == words.original.unsqueeze(-1)
    torch.testing.assert_close(found[original], torch.ones(len(words), dtype=torch.float64), atol=1e-5, rtol=0)
    assert (found[wanted] <= 1 + 1e-5).all()
    assert found[wanted].min() < 0.999


@pytest.mark.parametrize("judge", ["itself", "another tokenizer"])
def test_nll_against_a_loop(judge: str, model: Any, words: WordPositions) -> None:
    if judge == "itself":
        other, tokenizer = model, words.tokenizer
    else:
        other, tokenizer = tiny.policy(), tiny.tokenizer()
    wanted = (words.ids >= 0) & (torch.arange(words.ids.shape[1]) % 7 == 0)
    found = word_nll(words, wanted, other, tokenizer)
    assert torch.equal(found.isnan(), ~wanted)
    for p in range(len(words)):
        before, entries = words.positions[p].context, wanted[p].nonzero().squeeze(-1).tolist()
        start = tokenizer(before)["input_ids"]
        rows = [tokenizer(before + words.word(p, entry))["input_ids"] for entry in entries]
        # What all of them begin with, and the text before, is not judged; of each at least its last token is.
        shared = min(next((i for i, (a, b) in enumerate(zip(start, row[:-1], strict=False)) if a != b),
                          min(len(start), len(row) - 1)) for row in rows)  # fmt: skip
        for entry, row in zip(entries, rows, strict=True):
            logs = other(torch.tensor([row])).logits[0, :-1].detach().double().log_softmax(-1)
            beyond = -sum(float(logs[t - 1, row[t]]) for t in range(max(1, shared), len(row)))
            assert float(found[p, entry]) == pytest.approx(beyond, abs=1e-3)
