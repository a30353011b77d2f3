"""Models small enough to be trained within a test, that say what the test wants them to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def bytes_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token a byte, and a beginning and an end."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
    inner = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = chat_template
    return made


def small_model(positions: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=positions, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip


def learn(model: Any, examples: Sequence[tuple[Sequence[int], Sequence[int]]], most: int = 400) -> None:
    """Until every next token of the answers is the most likely by far. examples: ids of prompts and of answers."""
    rows = [list(prompt) + list(answer) for prompt, answer in examples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    labels = torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(examples):
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(list(answer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(most):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < 0.005:
            model.eval()
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model did not learn what it should say: loss {loss.item():.3f} after {most} steps")


def model_that_completes(folder: Path, answers: Mapping[str, str]) -> Path:
    """A model that continues each of these prompts in the given way, and then ends."""
    tokenizer = bytes_tokenizer()
    examples = [
        (tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], 1]) for prompt, answer in answers.items()
    ]
    model = small_model(512)
    learn(model, examples)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def judge_of_one_rating(folder: Path, rating: str) -> Path:
    """A chat model whose next token is always ``[[rating]]``, which its tokenizer has as one word."""
    tokenizer = bytes_tokenizer(CHAT)
    tokenizer.add_tokens([f"[[{rating}]]"])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=8192, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()  # the last state is the bias, at every position
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[len(tokenizer) - 1] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
