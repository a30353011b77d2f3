"""Monitors against plain computations, on real models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from wpr import pico
from wpr.config.monitors import MonitorSettings
from wpr.evaluation.encoders import SentenceEncoder
from wpr.evaluation.monitors import Meaning, is_copy, make_monitor, words_kept
from wpr.rewards import Completions, RewardError

SOURCES = ["The dog ran home.", "She was very happy.", "The dog ran home."]
RESPONSES = ["The dog ran home.", "She was very glad.", " "]


def completions(responses: Sequence[str] = RESPONSES, prompts: Sequence[Any] = (), **columns: Any) -> Completions:
    ids = torch.zeros(len(responses), 1, dtype=torch.long)
    return Completions(prompts or ["p"] * len(responses), responses, ids, ids, ids[:, 0], columns)


def score(responses: Sequence[str] = RESPONSES, prompts: Sequence[Any] = (), **settings: Any) -> list[float]:
    monitor = make_monitor(MonitorSettings(**settings), "evaluation.gold")
    return monitor(completions(responses, prompts, source=SOURCES)).tolist()


def test_meaning_is_the_cosine_of_both_vectors() -> None:
    encoder = SentenceEncoder.from_pretrained(str(pico.path()))
    found = score(kind="meaning", encoder=str(pico.path()))
    own, other = encoder(RESPONSES), encoder(SOURCES)
    assert found == pytest.approx([1.0, float(own[1] @ other[1]), 0.0], abs=1e-5)
    assert found[1] < 0.999


def test_sources_are_encoded_once() -> None:
    asked: list[str] = []

    def encoder(texts: Sequence[str]) -> Tensor:
        asked.extend(texts)
        return torch.ones(len(texts), 2) / math.sqrt(2)

    monitor = Meaning(encoder, "source")
    for _ in range(2):
        assert monitor(completions(source=SOURCES)).tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert [asked.count(text) for text in SOURCES[:2]] == [1 + 2, 1]  # the first is also a response, twice


def test_words_kept_and_copies() -> None:
    assert score(kind="words-kept") == [1.0, 0.75, 0.0]
    assert score(kind="copies") == [1.0, 0.0, 0.0]
    assert words_kept("a dog and a cat", "A cat, a cat!") == 3 / 5
    assert math.isnan(words_kept("...", "a"))
    assert is_copy("a  b\n", "a b") == 1


def test_fluency_is_the_mean_log_probability() -> None:
    found = score(kind="fluency", model="pico")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(pico.path()), AutoTokenizer.from_pretrained(pico.path())
    ids = torch.tensor([tokenizer(RESPONSES[1])["input_ids"]])
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        logs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    assert found[1] == pytest.approx(float(logs.mean()), abs=1e-4)
    assert math.isnan(found[2])
    assert score(["dog home the ran ran."] * 3, kind="fluency", model="pico")[0] < found[0]


def test_the_source_may_be_the_prompt() -> None:
    chat = [[{"role": "user", "content": text}] for text in SOURCES]
    assert score(prompts=chat, kind="copies", of="prompt") == [1.0, 0.0, 0.0]
    assert score(prompts=SOURCES, kind="copies", of="prompt") == [1.0, 0.0, 0.0]


def test_a_column_that_is_not_there() -> None:
    monitor = make_monitor(MonitorSettings("copies", of="original"), "evaluation.gold")
    with pytest.raises(RewardError, match=r"no column 'original' \(kept are source\); .*\{original: THEIR_NAME\}"):
        monitor(completions(source=SOURCES))


@pytest.mark.parametrize("in_training", [True, False])
def test_a_monitor_knows_whether_it_is_for_training(in_training: bool) -> None:
    settings = MonitorSettings("copies", in_training=in_training)
    assert make_monitor(settings, "evaluation.gold").in_training is in_training


def test_functions_are_monitors_too() -> None:
    found = score(kind="function", function="tests.evaluation.test_monitors:lengths")
    assert found == [float(len(text)) for text in RESPONSES]


def lengths(prompts: Sequence[str], responses: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in responses]
