"""A run's folder as the pipeline writes it, without training anything: a few policies on story openings.

Shapes and names are those of a real run of the `tiny` recipe; numbers are drawn from a seed and go where such numbers
go: scores rise, KL grows, one policy is over-optimised (its gold score falls).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Tim")
THINGS = ("a red ball", "an old key", "a small boat", "a lost kitten", "a shiny stone", "a big kite")
PLACES = ("in the park", "by the river", "under her bed", "in the garden", "at the beach")
ENDINGS = (
    " They were so happy and played together all day.",
    " It was broken, and nobody could fix it.",
    " Her mom smiled and gave her a big hug.",
    " He was sad and went home alone.",
    " They laughed, shared a cake and became good friends.",
)
TWINS = {
    " happy": (" glad", " joyful", " cheerful", " pleased"),
    " big": (" large", " huge", " great", " giant"),
    " sad": (" unhappy", " upset", " sorry", " gloomy"),
    " friends": (" friend", " pals", " buddies", " mates"),
    " laughed": (" giggled", " smiled", " chuckled", " cheered"),
    " mom": (" mother", " mum", " mama", " dad"),
}
COMMON = (" the", " a", " and", " was", " to", " it", " very", " so", " she", " they", " little", " then")


def write_run(
    folder: Path,
    policies: Sequence[str] = ("rkl", "semantic", "hellinger"),
    *,
    steps: int = 60,
    prompts: int = 24,
    gold: bool = True,
    tokens: bool = True,
    seed: int = 0,
) -> Path:
    """Write a finished run with these policies."""
    rng = random.Random(seed)
    openings = [opening(rng) for _ in range(prompts)]
    stages: dict[str, Any] = {
        "prepare": record(2.4, 0.61, {"pairs": 4000}),
        "sft": record(38.2, 1.12, {"rows": 3000, "after": {"perplexity": 6.4}}),
        "reward": record(41.7, 1.31, {"rows": 4000, "held_out": {"accuracy": 0.71}}),
    }
    before = responses(rng, openings, 0.0, 0.0, gold)
    for index, name in enumerate(policies):
        stage = folder / "ppo" / name
        stage.mkdir(parents=True)
        over = name == "rkl"
        write_lines(stage / "metrics.jsonl", training(rng, steps, index, over, gold))
        write_lines(stage / "responses-before.jsonl", before)
        after = responses(rng, openings, 0.5 + 0.1 * index, -0.3 if over else 0.25, gold)
        write_lines(stage / "responses.jsonl", after)
        results = {"before": means(before), "after": means(after), "steps": steps}
        stages[f"ppo/{name}"] = record(95.3 + 30 * index, 1.42 + 0.2 * index, results)
        if tokens:
            write_json(stage / "tokens.json", token_file(rng, name, after[:3]))
    recipe = {
        "name": "stories",
        "description": "story openings, a gold scorer that no policy sees",
        "seed": seed,
        "model": {"name": "{prepare}/model"},
        "data": {"source": "{prepare}/pairs.jsonl.gz", "format": "hh"},
        "prepare": {"function": "wpr.recipes.stories:prepare"},
        "scorer": {"kind": "model"},
        "policies": {name: {"regularizer": {"name": name}} for name in policies},
        "train": None,
    }
    manifest = {
        "format": 1,
        "stages": stages,
        "name": "stories",
        "recipe": recipe,
        "seed": seed,
        "versions": {"python": "3.11.7", "wpr": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "trl": "1.16.0"},
        "hardware": {"system": "Linux x86_64", "cores": 2, "memory": 8_000_000_000, "gpus": []},
        "commands": [{"at": "2026-11-15T12:47:00+0000", "command": f"wpr run stories output={folder.name}"}],
        "data": {"rows": 4000, "split": {"prompts": {"sft": 900, "reward": 1200, "ppo": 900, "held_out": prompts}}},
    }
    write_json(folder / "manifest.json", manifest)
    (folder / "recipe.yaml").write_text("name: stories\nseed: 0\nppo:\n  beta: 0.05\n  max_steps: 60\n")
    return folder


def opening(rng: random.Random) -> str:
    return f"Once upon a time, {rng.choice(NAMES)} found {rng.choice(THINGS)} {rng.choice(PLACES)}."


def record(seconds: float, memory: float, results: Mapping[str, Any]) -> dict[str, Any]:
    times = {"started": "2026-11-15T12:47:00+0000", "finished": "2026-11-15T12:52:41+0000"}
    return {"inputs": {}, "status": "done", **times, "seconds": seconds, "peak_memory_gb": memory,
            "results": dict(results), "error": None}  # fmt: skip


def training(rng: random.Random, steps: int, index: int, over: bool, gold: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        grown = 1 - math.exp(-3 * step / steps)
        row = {
            "loss": 0.05,
            "step": step,
            "score": 0.4 + (1.1 + 0.15 * index) * grown + rng.gauss(0, 0.09),
            "kl": (0.12 + 0.05 * over) * grown + rng.gauss(0, 0.008),
            "divergence": 0.05 * grown + rng.gauss(0, 0.004),
            "penalty": 0.06 * grown + rng.gauss(0, 0.006),
            "entropy": 1.9 - 0.6 * grown - 0.3 * over * grown + rng.gauss(0, 0.03),
            "response_length": 44 + 8 * grown + rng.gauss(0, 1.5),
            "peak_memory_gb": 1.4,
        }
        parts = {"generation": 0.62, "scoring": 0.11, "penalty": 0.3 + 0.2 * index, "reward": 0.02}
        row |= {f"seconds_{part}": value for part, value in {**parts, "backpropagation": 0.41}.items()}
        if gold:
            row["gold"] = 0.1 + (0.5 * grown if not over else 0.6 * grown - 0.75 * grown**2) + rng.gauss(0, 0.06)
        rows.append({name: round(value, 5) for name, value in row.items()})
    return [*rows, {"eval_score": 1.3, "step": steps}]


def responses(
    rng: random.Random, openings: Sequence[str], score: float, better: float, gold: bool
) -> list[dict[str, Any]]:
    rows = []
    for number, prompt in enumerate(openings):
        text = "".join(rng.choice(ENDINGS) for _ in range(rng.randint(2, 4)))
        length = len(text.split())
        kl = abs(rng.gauss(0.1, 0.03)) * length * bool(score)
        row: dict[str, Any] = {
            "number": number,
            "prompt": prompt,
            "response": text,
            "score": round(rng.gauss(0.4 + score, 0.6), 4),
            "length": length,
            "finished": True,
            "penalty": round(kl * 0.5, 4),
            "kl": round(kl, 4),
            "divergence": round(kl * 0.4, 4),
            "columns": {},
        }
        if gold:
            row |= {"gold": round(rng.gauss(0.1 + better, 0.5), 4), "divergences": {"semantic": round(kl * 0.3, 4)}}
        rows.append(row)
    return rows


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    tokens = sum(row["length"] for row in rows)
    found = {"score": sum(row["score"] for row in rows) / len(rows), "entropy": 1.4, "eos_fraction": 1.0}
    found |= {"distinct_1": 0.19, "distinct_2": 0.41, "distinct_3": 0.57, "self_bleu": 0.63, "embedding_spread": 0.08}
    found |= {name: sum(row[name] for row in rows) / tokens for name in ("kl", "divergence", "penalty")}
    found["response_length"] = tokens / len(rows)
    if "gold" in rows[0]:
        found["gold"] = sum(row["gold"] for row in rows) / len(rows)
        found["divergence_semantic"] = sum(row["divergences"]["semantic"] for row in rows) / tokens
    return found


def token_file(rng: random.Random, policy: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    studies = []
    for row in rows:
        pieces = [f" {part}" for part in row["response"].replace(".", " .").replace(",", " ,").split()]
        made = [token(rng, piece if piece not in (" .", " ,") else piece.strip()) for piece in pieces]
        kept = {name: row.get(name) for name in ("number", "prompt", "response", "score", "gold")}
        studies.append({**kept, "tokens": made})
    penalties = {"kl": "reverse KL", "wpr": "Wasserstein, semantic"}
    return {"policy": policy, "penalties": penalties, "beta": 0.02, "lam": 10.0, "scale": 1.93, "studies": studies}


def token(rng: random.Random, text: str) -> dict[str, Any]:
    """A token with distributions over it, its twins and common words, and a plan that moves surplus to deficit."""
    twins = TWINS.get(text, ())
    words = list(dict.fromkeys([text, *twins, *rng.sample(COMMON, 6)]))
    ours = shares([rng.gauss(3.2 if word == text else 0.3 if word in twins else -0.8, 0.6) for word in words])
    theirs = shares([rng.gauss(2.3 if word == text else 1.3 if word in twins else -0.5, 0.6) for word in words])
    both = list(zip(words, ours, theirs, strict=True))
    plan = [{"from": word, "to": word, "mass": min(a, b), "cost": 0.0} for word, a, b in both]
    surplus = {word: a - b for word, a, b in both}
    for source in (word for word in words if surplus[word] > 0):
        for target in words:
            mass = min(surplus[source], -surplus[target])
            if mass > 0:
                near = source in (text, *twins) and target in (text, *twins)
                cost = 0.8 if near else 1.9
                plan.append({"from": source, "to": target, "mass": mass, "cost": cost})
                surplus[source] -= mass
                surplus[target] += mass
    plan.sort(key=lambda move: -move["mass"])
    kl = math.log(ours[0] / theirs[0])
    rows = sorted(both, key=lambda row: -max(row[1:]))
    found = {
        "text": text, "id": rng.randrange(4096), "kl": kl, "wpr": kl * (0.25 if twins else 0.8), "policy": ours[0],
        "reference": theirs[0],
        "candidates": [{"text": word, "policy": a, "reference": b} for word, a, b in rows][:12],
        "plan": plan[:16],
        "moved": sum(move["mass"] for move in plan if move["from"] != move["to"]),
        "unmatched_policy": 0.021, "unmatched_reference": 0.034,
        "nearest": [
            {"text": word, "distance": 0.8 + 0.1 * rank, "policy": ours[rank + 1], "reference": theirs[rank + 1]}
            for rank, word in enumerate(words[1:7])
        ],
    }  # fmt: skip
    return json.loads(json.dumps(found), parse_float=lambda number: round(float(number), 4))


def shares(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
