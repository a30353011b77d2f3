"""Real tokenizers, trained on the spot: byte-level BPE, with and without chat template and beginning of sequence."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "What is the capital of France? The capital of France is Paris.",
    "SUBREDDIT: r/tifu TITLE: a day at the sea POST: I went to the sea, and the sea was cold. TL;DR: cold sea",
    "QUESTION: Read a number and print it. Use Standard Input format ANSWER: print(input())",
    "\n\nHuman: Hello there!\n\nAssistant: Hello, how can I help you today?",
] * 4

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "<bos>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] | trim }}<eos>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def _trained() -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return str(inner.to_str())


def plain(template: str | None = None, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """No token is added around a text."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<eos>",
        pad_token=pad,
        additional_special_tokens=SPECIAL[3:],
    )
    made.chat_template = template
    return made


def opening(also_closing: bool = False) -> PreTrainedTokenizerFast:
    """A beginning-of-sequence token is added before a text, and an end token after it if ``also_closing``."""
    inner = Tokenizer.from_str(_trained())
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if also_closing else "<bos> $A",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def merging(template: str | None = None) -> PreTrainedTokenizerFast:
    """Characters, and one token ``?!`` that merges across the seam of a prompt and a completion."""
    characters = [*SPECIAL, "?", "!", " ", "a", "b", "c", ":"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*characters, "?!"])}, [("?", "!")]))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = template
    return made
