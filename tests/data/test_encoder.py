"""Text to tokens, with tokenizers of several habits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.tokenizers_made_here import ALTERNATING, CHATML, SPECIAL, merging, opening, plain
from wpr.data import DataError, DataSettings, Encoder, Row

PAD, EOS, BOS, IM_START, IM_END = range(5)
TURNS = (
    {"role": "user", "content": "Hello there!"},
    {"role": "assistant", "content": "Hello, how can I help you?"},
    {"role": "user", "content": "What is the capital of France?"},
)
DIALOGUE = Row(TURNS, "Paris.", "The sea.")
TLDR = Row("POST: the sea\n\nTL;DR:", "cold sea")
APPS = Row("\nQUESTION:\nprint a number\n\nANSWER:\n", "print(input())")


def encoder(tokenizer: Any, **settings: Any) -> Encoder:
    return Encoder(tokenizer, DataSettings("hh", **settings))


def joined(made: Encoder, row: Row) -> str:
    assert row.chosen is not None
    return str(made.tokenizer.decode(made.prompt(row) + made.completion(row, row.chosen)))


def test_text() -> None:
    made = encoder(plain())
    assert not made.chat
    assert joined(made, DIALOGUE) == (
        "\n\nHuman: Hello there!\n\nAssistant: Hello, how can I help you?\n\nHuman: What is the capital of France?"
        "\n\nAssistant: Paris.<eos>"
    )
    assert joined(made, TLDR) == "POST: the sea\n\nTL;DR: cold sea<eos>"
    assert joined(made, APPS) == "\nQUESTION:\nprint a number\n\nANSWER:\nprint(input())<eos>"
    assert made.prompt_value(DIALOGUE) == str(made.tokenizer.decode(made.prompt(DIALOGUE)))
    assert made.prompt_value(TLDR) == TLDR.prompt


@pytest.mark.parametrize("row", [DIALOGUE, TLDR, APPS])
def test_completions_are_the_ids_of_the_whole_text(row: Row) -> None:
    """Where no token merges across the seam, what a model reads is what the tokenizer gives for the whole."""
    made = encoder(plain())
    assert row.chosen is not None
    text = str(made.prompt_value(row)) + ("" if row is APPS else " ") + row.chosen
    assert made.prompt(row) + made.completion(row, row.chosen) == [*made.tokenizer(text)["input_ids"], EOS]


def test_a_completion_with_white_space_of_its_own() -> None:
    made = encoder(plain())
    assert made.completion(TLDR, " cold sea") == made.completion(TLDR, "cold sea")
    assert made.completion(TLDR, "\ncold") != made.completion(TLDR, "cold")


@pytest.mark.parametrize("also_closing", [False, True])
def test_beginning_of_sequence(also_closing: bool) -> None:
    """It stands before the prompt, once; an end token that the tokenizer adds does not end the prompt."""
    made = encoder(opening(also_closing))
    assert made.prompt(TLDR) == [BOS, *encoder(plain()).prompt(TLDR)]
    assert made.completion(TLDR, "cold sea") == encoder(plain()).completion(TLDR, "cold sea")


def test_a_token_that_merges_across_the_seam() -> None:
    """The prompt keeps its ids, as PPO has them, and so both completions are tokenized by themselves."""
    made = encoder(merging("{% for m in messages %}{{ m['content'] }}{% endfor %}"))
    row = Row("a?", "!b", "c")
    ids = made.tokenizer.get_vocab()
    assert made.tokenizer("a?!b")["input_ids"] == [ids["a"], ids["?!"], ids["b"]]
    assert made.prompt(row) == [ids["a"], ids["?"]]
    assert made.encode(row, ["!b", "c"])[1] == [[ids["!"], ids["b"], EOS], [ids["c"], EOS]]
    # In text a space stands between, which keeps them apart.
    assert encoder(merging()).completion(row, "!b") == [ids[" "], ids["!"], ids["b"], EOS]


def test_chat() -> None:
    made = encoder(plain(CHATML))
    assert made.chat
    assert made.end_id == IM_END
    assert joined(made, DIALOGUE) == (
        "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\nHello, how can I help you?<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>"
    )
    assert made.prompt_value(DIALOGUE) == list(TURNS)
    assert made.prompt_value(TLDR) == [{"role": "user", "content": TLDR.prompt}]
    assert made.prompt(DIALOGUE) == list(
        made.tokenizer.apply_chat_template(list(TURNS), add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    # PPO's collator tokenizes the same value to the same ids.
    from wpr.ppo.prompts import PromptCollator

    collator = PromptCollator(made.tokenizer, 512)
    assert collator.tokens({"prompt": made.prompt_value(TLDR)}) == made.prompt(TLDR)


def test_other_templates() -> None:
    made = encoder(plain(ALTERNATING))
    assert made.end_id == EOS
    assert made.prompt(TLDR)[0] == BOS
    assert joined(made, Row("Hello", " Hi there ")) == "<bos>[user] Hello<eos>[assistant] Hi there<eos>"
    no_end = encoder(plain("{% for m in messages %}{{ m['content'] }} {% endfor %}"))
    assert no_end.end_id == EOS
    with pytest.raises(DataError, match="f:3: the chat template of .* refuses a dialogue of the turns system, user"):
        made.prompt(Row(({"role": "system", "content": "x"}, TURNS[0]), origin="f:3"))


def test_template_choice() -> None:
    assert not encoder(plain(CHATML), template="text").chat
    assert encoder(plain(CHATML), template="text").end_id == EOS
    assert encoder(plain(CHATML), template="chat").chat
    with pytest.raises(DataError, match="has no chat template; use template: text"):
        encoder(plain(), template="chat")


def test_a_tokenizer_without_an_end() -> None:
    tokenizer = plain()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encoder(tokenizer)


def test_padding_is_not_the_end() -> None:
    assert encoder(plain()).padding_id == PAD
    shared = encoder(plain(CHATML, pad="<|im_end|>"))
    assert shared.padding_id != shared.end_id
    assert SPECIAL[shared.padding_id] in shared.tokenizer.all_special_tokens
    assert encoder(plain(pad=None)).padding_id != EOS
    alone = merging()
    alone.pad_token = "<eos>"
    with pytest.raises(DataError, match="no special token but its end token"):
        _ = encoder(alone).padding_id
