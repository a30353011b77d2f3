"""Real models and a real tokenizer, small enough for a test: a Llama of 40 words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from wpr.ppo import PPOConfig, PPOTrainer

__all__ = ["TrainerCallback"]

TOKENS = 40
PAD, EOS, BOS = 0, 1, 2


def tokenizer(pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """Words w3 to w39, and padding, end and beginning of sequence as tokens 0, 1, 2."""
    words = {"<pad>": PAD, "</s>": EOS, "<s>": BOS} | {f"w{i}": i for i in range(3, TOKENS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>", pad_token=pad)
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def config(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def policy(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes)).eval()


def critic(seed: int = 1, **changes: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config(num_labels=1, **changes)).eval()


def encoder() -> BertForSequenceClassification:
    """A classifier that looks both ways and pools its first token."""
    torch.manual_seed(0)
    small = BertConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, num_labels=1, pad_token_id=PAD,
    )  # fmt: skip
    return BertForSequenceClassification(small).eval()


def prompts(count: int = 64) -> list[dict[str, Any]]:
    """Prompts of one to four words."""
    return [
        {"prompt": " ".join(f"w{3 + (7 * i + j) % 37}" for j in range(1 + i % 4)), "number": i} for i in range(count)
    ]


def counts_w7(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    """A reward: how often the word w7 occurs."""
    return [float(response.split().count("w7")) for response in responses]


def settings(folder: Path | str, **changes: Any) -> PPOConfig:
    """Small and fast; plain sampling."""
    basics = {
        "per_device_train_batch_size": 8, "max_new_tokens": 8, "max_steps": 4, "learning_rate": 1e-3,
        "temperature": 1.0, "top_k": 0, "report_to": "none", "use_cpu": True, "save_strategy": "no",
        "log_completions": 0,
    }  # fmt: skip
    return PPOConfig(str(folder), **{**basics, **changes})


def trainer(
    folder: Path | str,
    reward: Any = counts_w7,
    regularizer: Any = "reverse-kl",
    build: Callable[..., Any] = policy,
    parts: dict[str, Any] | None = None,
    **changes: Any,
) -> PPOTrainer:
    """A run of the tiny policy; ``parts`` replaces what the trainer is given, ``changes`` its settings."""
    model, own_critic = build(), None if changes.get("share_backbone") else critic()  # before ZeRO-3 is switched on
    args = settings(folder, **changes)
    given = {
        "critic": own_critic,
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        **(parts or {}),
    }
    return PPOTrainer(model, args, reward=reward, regularizer=regularizer, **given)
