"""A run that rewrites sentences under a list of forbidden words, as `wpr run rewrite` leaves it, without training."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.report.run_folder import means, record, token, training, write_json, write_lines
from wpr.rewards import WordList

WORDS = "big\nhappy\nnice = 2\nin order to\nunused\n"
SENTENCES = (
    "The big dog ran home.",
    "She sang all day.",
    "A happy girl saw the big house.",
    "He was nice to the cat.",
    "They left in order to sleep.",
    "Tom has a big, big hat.",
    "Mia was happy.",
    "The nice man smiled.",
    "A bird sat down.",
    "We had a big lunch.",
    "It was a happy day.",
    "Ben lost his big boat.",
)
INSTEAD = {"rkl": {"big": "odd", "happy": "tall"}, "sum": {"big": "large", "happy": "glad", "nice": "kind"}}
"""What each policy puts in the place of words; others it leaves."""


def rewritten(sentence: str, instead: Mapping[str, str]) -> str:
    return re.sub(r"\w+", lambda word: instead.get(word[0], word[0]), sentence)


def write_rewriting(
    folder: Path,
    instead: Mapping[str, Mapping[str, str]] = INSTEAD,
    *,
    words: str = WORDS,
    sentences: Sequence[str] = SENTENCES,
    studies: int = 3,
    watched: bool = True,
    sources: bool = True,
) -> Path:
    """Write a finished run whose policies replace words as told. studies: responses with a token view."""
    rng = random.Random(0)
    stages: dict[str, Any] = {"sft": record(1.0, 0.1, {})}
    before = [row(n, text, text, words, sources, watched) for n, text in enumerate(sentences)]
    for name, own in instead.items():
        stage = folder / "ppo" / name
        stage.mkdir(parents=True)
        after = [row(n, text, rewritten(text, own), words, sources, watched) for n, text in enumerate(sentences)]
        write_lines(stage / "metrics.jsonl", training(rng, 3, 0, False, False))
        write_lines(stage / "responses-before.jsonl", before)
        write_lines(stage / "responses.jsonl", after)
        (stage / "words.txt").write_text(words, encoding="utf-8")
        kept = [
            {"number": one["number"], "prompt": one["prompt"], "response": one["response"], "score": one["score"],
             "tokens": [token(rng, piece) for piece in pieces(one["response"])]}
            for one in after[:studies]
        ]  # fmt: skip
        write_json(stage / "tokens.json", {"policy": name, "penalties": {}, "studies": kept})
        results = [{key: value for key, value in means(rows).items() if key != "gold"} for rows in (before, after)]
        stages[f"ppo/{name}"] = record(9.0, 1.0, {"before": results[0], "after": results[1]})
    monitors = {"words_kept": {"kind": "words-kept"}, "copies": {"kind": "copies"}, "fluency": {"kind": "fluency"}}
    evaluation = {"gold": {"kind": "meaning", "encoder": "wordllama"}, "monitors": monitors}
    recipe = {
        "name": "rewrite",
        "scorer": {"kind": "words", "words": "{prepare}/words.txt"},
        "evaluation": evaluation if watched else {},
    }
    write_json(folder / "manifest.json", {"format": 1, "stages": stages, "recipe": recipe})
    (folder / "recipe.yaml").write_text("name: rewrite\n")
    return folder


def row(number: int, sentence: str, response: str, words: str, sources: bool, watched: bool) -> dict[str, Any]:
    length = len(response.split())
    found: dict[str, Any] = {
        "number": number, "prompt": f"{sentence}\n", "response": response, "length": length, "finished": True,
        "score": WordList(words.splitlines()).score(response), "kl": 0.1 * length, "divergence": 0.0, "penalty": 0.0,
        "columns": {"source": sentence} if sources else {},
    }  # fmt: skip
    if watched:
        changed = sum(one != other for one, other in zip(sentence.split(), response.split(), strict=True))
        found |= {"gold": 1 - changed / 10, "words_kept": 1 - changed / length, "copies": float(not changed),
                  "fluency": -3.0, "divergences": {"semantic": 0.1}}  # fmt: skip
    return found


def pieces(text: str) -> list[str]:
    """Tokens that spell a text: words with the space before them, the longer ones in two parts, and an end."""
    parts = re.findall(r" ?\w+|[^\w ]", text)
    return [piece for part in parts for piece in (part[:3], part[3:]) if piece] + ["</s>"]


def change(path: Path, number: int | None = None, **values: Any) -> None:
    """Give every line of a file of responses, or that of a number, these values."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [row | values if number in (None, row["number"]) else row for row in rows])
