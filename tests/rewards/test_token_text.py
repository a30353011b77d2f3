"""How far a text is known after each token, for tokenizers that cut it in different ways."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import wpr.pico
from tests.ppo import tiny
from wpr.rewards.token_text import TokenText

TEXT = "The naïve cat walked in; 你好, a 😀 catalog. Don't!"


@cache
def tokenizer(kind: str) -> Any:
    """pico's, GPT-2-like ones of 256 bytes and a few merges, and one of whole words."""
    if kind == "pico":
        return AutoTokenizer.from_pretrained(wpr.pico.__path__[0])
    if kind == "words":
        return tiny.tokenizer()
    if kind == "sentencepiece":
        inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer: Any = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"])
    else:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        size = {"bytes": 258, "gpt2": 290}[kind]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<pad>", "</s>"])
    inner.train_from_iterator([TEXT, "walking cats catalog walked"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def decoded(kind: str, tokens: list[int]) -> str:
    return str(tokenizer(kind).decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["pico", "bytes", "gpt2", "sentencepiece"])
def test_every_start_of_a_text(kind: str) -> None:
    tokens = [*tokenizer(kind).encode(TEXT, add_special_tokens=False), tokenizer(kind).eos_token_id]
    text = decoded(kind, tokens)
    assert text == TEXT
    found = TokenText(tokens, text, tokenizer(kind))
    starts = [found.known(count) for count in range(len(tokens) + 1)]
    assert starts == sorted(starts)
    assert starts[-2:] == [len(text)] * 2  # the end token adds nothing
    for count, known in enumerate(starts):
        start = decoded(kind, tokens[:count])
        assert text[:known] == start.rstrip("\ufffd")
    for begin in range(len(text)):
        for end in range(begin + 1, min(begin + 7, len(text)) + 1):
            expected = [
                (token, min(starts[token + 1], end))
                for token in range(len(tokens))
                if starts[token + 1] > begin and starts[token] < end
            ]
            spelled = found.spelling(begin, end)
            assert [pair for pair in spelled if pair[1] > begin] == expected, (begin, end)
            assert spelled[-1][1] == end


def test_characters_of_several_tokens() -> None:
    tokens = tokenizer("bytes").encode("a😀b", add_special_tokens=False)
    found = TokenText(tokens, "a😀b", tokenizer("bytes"))
    assert [found.known(count) for count in range(7)] == [0, 1, 1, 1, 1, 2, 3]
    assert found.spelling(1, 2)[-1] == (4, 2)


@pytest.mark.parametrize("kind", ["pico", "bytes", "gpt2"])
def test_any_tokens(kind: str) -> None:
    """Also where bytes make no characters."""
    random_tokens = random.Random(0)
    for _ in range(30):
        tokens = [random_tokens.randrange(len(tokenizer(kind))) for _ in range(9)]
        found = TokenText(tokens, text := decoded(kind, tokens), tokenizer(kind))
        starts = [found.known(count) for count in range(10)]
        assert starts == sorted(starts)
        assert all(text.startswith(decoded(kind, tokens[:count])[:known]) for count, known in enumerate(starts))
