"""Measure wpr-pico: losses of its training, held-out perplexity, samples, neighbours, semantic contrast; as Markdown.

To print the figures:                    python scripts/pico/measure.py
To put them into the model card too:     python scripts/pico/measure.py --write
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import make_pico
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from wpr import Regularizer, ReverseKL, SquaredHellinger, TokenGeometry, Wasserstein, pico
from wpr.analysis.semantic_contrast import continuations, contrast, gaps, make_trial, plain_prompts

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WORDS = [
    *("dog", "girl", "happy", "big", "red", "ran", "said", "mom", "park", "ball"),
    *("sad", "tree", "two", "was", "Lily", "water", "yes", "cold", "eat", "friend"),
]
SHOWN_STEPS = (100, 200, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000)
OPENING_WORDS = 12


def losses(training: dict[str, Any]) -> Iterator[str]:
    """The losses of the training run, at some of its steps."""
    yield f"{training['hardware']}; the whole log is in `scripts/pico/training.json`."
    yield ""
    yield "| step | loss of the batch | held-out loss | held-out perplexity | seconds |"
    yield "|---|---|---|---|---|"
    for entry in training["log"]:
        if entry["step"] in SHOWN_STEPS:
            loss, held_out = entry["loss"], entry["held_out"]
            yield (
                f"| {entry['step']} | {loss:.4f} | {held_out:.4f} | {math.exp(held_out):.3f} | {entry['seconds']:.0f} |"
            )


@torch.no_grad()
def token_losses(model: Any, rows: Tensor) -> Tensor:
    """Loss of every token ``(N, L)`` of rows ``(N, L + 1)``."""
    parts = []
    for part in rows.long().split(32):
        logits = model(part[:, :-1]).logits
        parts.append(torch.nn.functional.cross_entropy(logits.mT, part[:, 1:], reduction="none"))
    return torch.cat(parts)


@torch.no_grad()
def story_losses(model: Any, tokenizer: Any, stories: list[str]) -> Tensor:
    """Loss of every token ``(tokens,)`` of stories that stand alone: the end is one of them, the beginning is given."""
    parts = []
    for story in stories:
        row = torch.tensor([*tokenizer(story)["input_ids"], tokenizer.eos_token_id])
        parts.append(token_losses(model, row.unsqueeze(0))[0])
    return torch.cat(parts)


def perplexity(model: Any, tokenizer: Any, stories: list[str], training: dict[str, Any]) -> Iterator[str]:
    """Held-out perplexity: the run's own, and that of the shipped weights."""
    alone = story_losses(model, tokenizer, stories)
    rows = make_pico.pack(tokenizer, stories)
    packed = token_losses(model, rows)
    long = rows[: len(rows) // 2 * 2].view(-1, 2 * rows.shape[1])
    late = token_losses(model, long)[:, make_pico.LENGTH :]
    yield "The shipped weights, but for the first row."
    yield ""
    yield "| held-out text | tokens | loss | perplexity |"
    yield "|---|---|---|---|"
    loss = training["held_out_loss"]
    yield (
        f"| the run's own figure: {training['held_out_stories']:,} stories in rows of 256 tokens, bf16 autocast | - | "
        f"{loss:.4f} | {math.exp(loss):.3f} |"
    )
    for name, values in (
        (f"{len(stories)} of them, each by itself", alone),
        (f"the same {len(stories)} in rows of 256 tokens", packed),
        ("the same in rows of 512, second half only (never trained on)", late),
    ):
        mean = float(values.double().mean())
        yield f"| {name} | {values.numel():,} | {mean:.4f} | {math.exp(mean):.3f} |"


@torch.no_grad()
def samples(model: Any, tokenizer: Any, count: int = 10, seed: int = 0) -> Iterator[str]:
    """The first ``count`` stories of a seed, from nothing but the beginning-of-sequence token, at temperature 0.8."""
    yield f"The first {count} at temperature 0.8 with seed {seed}: neither chosen nor edited."
    yield ""
    torch.manual_seed(seed)
    start = torch.full((count, 1), tokenizer.bos_token_id)
    tokens = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        temperature=0.8,
        top_k=0,
        max_new_tokens=make_pico.LENGTH - 1,
    )
    for number, row in enumerate(tokens, 1):
        ended = tokenizer.eos_token_id in row
        yield f"**{number}.**" + ("" if ended else " (cut off)")
        yield ""
        # A quotation keeps the line breaks of the story apart.
        yield from (f"> {line}  " for line in tokenizer.decode(row, skip_special_tokens=True).split("\n"))
        yield ""


def neighbours(geometry: TokenGeometry, tokenizer: Any, count: int = 6) -> Iterator[str]:
    """Nearest tokens of some common words and their costs, as `TokenGeometry` has them."""
    yield "Euclidean distances of embeddings, in units of the geometry's scale:"
    yield ""
    yield f"```\n{geometry.describe()}\n```"
    yield ""
    yield "| word | nearest tokens (cost) |"
    yield "|---|---|"
    for word in WORDS:
        ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"{word!r} is {len(ids)} tokens of this vocabulary; choose a word that is one")
        near, costs = geometry.nearest_tokens(ids[0], count)
        shown = (
            f"`{tokenizer.decode([token])}` ({cost:.2f})"
            for token, cost in zip(near.tolist(), costs.tolist(), strict=True)
        )
        yield f"| `{word}` | {', '.join(shown)} |"


def semantic_contrast(
    model: Any, tokenizer: Any, geometry: TokenGeometry, stories: list[str], positions: int
) -> Iterator[str]:
    """Semantic contrast of four regularizers, where the model continues the first words of held-out stories."""
    openings = [" ".join(story.split()[:OPENING_WORDS]) for story in stories]
    trial = make_trial(continuations(model, plain_prompts(tokenizer, openings)), geometry, positions)
    regularizers: dict[str, Regularizer] = {
        "reverse KL": ReverseKL(),
        "squared Hellinger (control)": SquaredHellinger(),
        "Wasserstein, preset paper": Wasserstein(geometry, preset="paper"),
        "Wasserstein, preset unbalanced": Wasserstein(geometry, preset="unbalanced"),
    }
    yield (
        f"{len(trial.origin)} positions of the continuations of {len(openings)} held-out openings. 1 is blind to "
        f"meaning, 0 means that moving to a neighbour is free; `wpr.analysis.semantic_contrast` says how."
    )
    yield ""
    yield "| regularizer | gap to neighbour | gap to random | contrast | 95% interval |"
    yield "|---|---|---|---|---|"
    for name, regularizer in regularizers.items():
        near, far = gaps(regularizer, trial)
        value, low, high = contrast(near, far)
        yield f"| {name} | {near.mean():.4g} | {far.mean():.4g} | {value:.3f} | {low:.3f} to {high:.3f} |"


def measure(positions: int) -> str:
    """Every figure, as the Markdown that the model card holds."""
    folder = pico.path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    geometry = TokenGeometry.from_model(model)
    stories = (HERE / "held_out.txt").read_text().split(make_pico.STORY_MARK)
    training = json.loads((HERE / "training.json").read_text())
    sections = {
        "Losses of the training run": losses(training),
        "Held-out perplexity": perplexity(model, tokenizer, stories, training),
        "Ten samples": samples(model, tokenizer),
        "Neighbours": neighbours(geometry, tokenizer),
        "Semantic contrast": semantic_contrast(model, tokenizer, geometry, stories[:64], positions),
    }
    made = f"Measured with torch {torch.__version__}, transformers {transformers.__version__}, float32 on a CPU."
    parts = [made, *(f"### {title}\n\n" + "\n".join(lines).strip() for title, lines in sections.items())]
    return "\n\n".join(parts)


def write(card: Path, figures: str) -> None:
    """Replace what stands between the card's two marks."""
    text = card.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{card} must hold the lines {BEGIN!r} and {END!r} once each; put them back")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    card.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}")


def main() -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=512, help="positions of the semantic contrast, at most")
    parser.add_argument("--write", action="store_true", help="put the figures into src/wpr/pico/README.md")
    options = parser.parse_args()
    figures = measure(options.positions)
    print(figures)
    if options.write:
        write(pico.path() / "README.md", figures)


if __name__ == "__main__":
    main()
