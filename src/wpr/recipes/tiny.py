"""The tiny recipe's world: a model of 80,000 parameters and dialogues in Anthropic's HH format.

People ask for a thing of some colour. A good answer names the thing and the colour and is friendly; a bad one is curt
or names another colour. One pair in ten is labelled the wrong way round, as people do.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

THINGS = ["apple", "boat", "coat", "door", "egg", "flag", "glove", "hat", "kite", "lamp", "mug", "pen"]
COLOURS = ["red", "blue", "green", "white", "black", "brown"]
ASKS = ["Do you have a {} {}?", "I want the {} {}.", "Please give me a {} {}.", "Where is my {} {}?"]
FRIENDLY = ["Of course, here is the {} {} for you.", "Sure, I am happy to bring the {} {}.", "Yes, the {} {} is here."]
CURT = ["No.", "Find the {} {} alone.", "I do not care for a {} {}.", "What?"]
GREETINGS = [("Hello.", "Hello, how can I help?"), ("Good day.", "Good day, what do you need?")]


def prepare(folder: Path, seed: int = 0, pairs: int = 1500, hidden: int = 48, layers: int = 2) -> dict[str, Any]:
    """Write ``model/`` and ``dialogues.jsonl.gz`` to ``folder``."""
    rng = random.Random(seed)
    rows = [_pair(rng) for _ in range(pairs)]
    with gzip.GzipFile(folder / "dialogues.jsonl.gz", "wb", mtime=0) as file:  # no time: the same seed, the same bytes
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    parameters = _model([row[side] for row in rows for side in ("chosen", "rejected")], folder, seed, hidden, layers)
    return {"pairs": pairs, "parameters": parameters}


def _pair(rng: random.Random) -> dict[str, str]:
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    text = ""
    if rng.random() < 0.3:
        asked, answered = rng.choice(GREETINGS)
        text = f"\n\nHuman: {asked}\n\nAssistant: {answered}"
    text += f"\n\nHuman: {rng.choice(ASKS).format(colour, thing)}\n\nAssistant: "
    good = rng.choice(FRIENDLY).format(colour, thing)
    if rng.random() < 0.5:
        bad = rng.choice(CURT).format(colour, thing)
    else:
        bad = rng.choice(FRIENDLY).format(rng.choice([other for other in COLOURS if other != colour]), thing)
    if rng.random() < 0.1:
        good, bad = bad, good
    return {"chosen": text + good, "rejected": text + bad}


def _model(texts: list[str], folder: Path, seed: int, hidden: int, layers: int) -> int:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return sum(parameter.numel() for parameter in model.parameters())
