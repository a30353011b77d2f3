"""Make wpr-pico: sample stories from the teacher, train a tokenizer and a small model on them, save them.

On one GPU, about seven minutes:  python scripts/pico/make_pico.py --teacher llama2.data --output pico
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import sampling
import teacher
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
LENGTH = 256
"""Tokens of a row of training. Positions past it are new to the model."""

SPECIAL = ["<pad>", "<s>", "</s>"]
PAD, BOS, EOS = 0, 1, 2
STORY_MARK = "\n<|story|>\n"


def train_tokenizer(stories: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; BOS is put before every text, EOS is not put after it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        stories,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, stories: list[str]) -> Tensor:
    """All stories' tokens, each with its beginning and end, cut into rows ``(N, LENGTH + 1)``."""
    ids: list[int] = []
    for start in range(0, len(stories), 10_000):
        for row in tokenizer(stories[start : start + 10_000])["input_ids"]:
            ids += row
            ids.append(EOS)
    rows = len(ids) // (LENGTH + 1)
    return torch.tensor(ids[: rows * (LENGTH + 1)], dtype=torch.int16).view(rows, LENGTH + 1)


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 4.6 million parameters, its weights drawn with ``seed``."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=224,
            intermediate_size=608,
            num_hidden_layers=6,
            num_attention_heads=7,
            num_key_value_heads=7,
            max_position_embeddings=LENGTH,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean loss a token of rows ``(B, L + 1)``."""
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Any, rows: Tensor, device: str, batch: int) -> float:
    """Mean loss a token of held-out rows."""
    model.eval()
    total = 0.0
    for part in rows.split(batch):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            total += loss_of(model, part.to(device).long()).item() * len(part)
    model.train()
    return total / len(rows)


def make_optimizer(
    model: LlamaForCausalLM, steps: int, rate: float, device: str
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with weight decay on matrices only; a warm-up of a fiftieth of the steps, then a cosine to a twentieth."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    warmup = max(1, steps // 50)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, n / steps))))
    )
    return optimizer, schedule


def row_order(rows: int, wanted: int, seed: int) -> Tensor:
    """At least ``wanted`` row numbers: the rows shuffled again for every pass over them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(math.ceil(wanted / rows))])


def train(
    model: LlamaForCausalLM, rows: Tensor, held_out: Tensor, steps: int, batch: int, rate: float, device: str, seed: int
) -> list[dict[str, float]]:
    """Train in place, on ``batch`` rows a step; the losses every hundred steps."""
    model.to(device).train()
    optimizer, schedule = make_optimizer(model, steps, rate, device)
    order = row_order(len(rows), steps * batch, seed)
    rows = rows.to(device)
    log: list[dict[str, float]] = []
    begun = time.time()
    run = torch.compile(model) if device == "cuda" else model
    for step in range(steps):
        part = rows[order[step * batch : (step + 1) * batch].to(device)].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(run, part)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 100 == 99 or step == steps - 1:
            checked = evaluate(model, held_out, device, batch)
            seconds = time.time() - begun
            log.append({"step": step + 1, "loss": loss.item(), "held_out": checked, "seconds": seconds})
            print(json.dumps(log[-1]), flush=True)
    return log


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary transformers folder: bf16 in the file, float32 once loaded.

    bf16 halves the file. It is no type to run on every CPU (slow on many, and not to be had on some), and no type to
    train in, so the configuration asks for float32, in which the same numbers are exact.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        do_sample=True,
        temperature=0.8,
        top_k=0,
        max_new_tokens=LENGTH - 16,
    )
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="llama2.data, from scripts/pico/teacher.py")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--stories", type=int, default=400_000, help="stories to sample; one in fifty is held out")
    parser.add_argument("--sampling-seconds", type=float, default=900, help="stop sampling after this time")
    parser.add_argument("--batch", type=int, default=8192, help="stories sampled together")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=512, help="rows of 256 tokens an optimizer step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--top-p", type=float, default=0.95, help="the teacher draws from this much probability")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Sample, train, save; `training.json` says what was done and how the losses went."""
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.time()
    model, pieces = teacher.load(options.teacher)
    stories = sampling.sample_stories(
        model, pieces, options.stories, options.sampling_seconds, options.batch, device, options.seed, options.top_p
    )
    sampled = time.time() - begun
    del model
    held_out, stories = stories[: len(stories) // 50], stories[len(stories) // 50 :]
    tokenizer = train_tokenizer(stories)
    rows, checked = pack(tokenizer, stories), pack(tokenizer, held_out)
    if not len(checked):
        raise ValueError(
            f"{len(held_out)} held-out stories do not fill a row of {LENGTH + 1} tokens; raise --stories (it is "
            f"{options.stories}) or --sampling-seconds (it is {options.sampling_seconds:g})"
        )
    print(f"{len(stories)} stories, {rows.numel()} tokens; sampling took {sampled:.0f} s", flush=True)
    pico = make_model(options.seed)
    log = train(pico, rows, checked, options.steps, options.rows, options.rate, device, options.seed)
    save(pico, tokenizer, options.output)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    facts = {
        "hardware": f"{hardware}; torch {torch.__version__}, transformers {transformers.__version__}",
        "parameters": sum(p.numel() for p in pico.parameters()),
        "stories": len(stories),
        "tokens": rows.numel(),
        "held_out_stories": len(held_out),
        "held_out_loss": log[-1]["held_out"],
        "held_out_perplexity": math.exp(log[-1]["held_out"]),
        "options": {name: str(value) for name, value in vars(options).items()},
        "sampling_seconds": sampled,
        "seconds": time.time() - begun,
        "log": log,
    }
    (options.output / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (options.output / "held_out.txt").write_text(STORY_MARK.join(held_out[:500]))
    (options.output / "openings.txt").write_text(STORY_MARK.join(stories[:3000]))


if __name__ == "__main__":
    main()
