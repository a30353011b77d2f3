"""KL in GRPO's gradient, in four forms: TRL's estimate k3 in its loss, the log-ratio k1 of drawn tokens in the reward,
the exact penalty in the reward, the exact divergence in the loss; the semantic regularizer and the sum beside them.

    python -m benchmarks.grpo_forms sequence OUT     train a task of 8 words, over seeds and betas; print its tables
    python -m benchmarks.grpo_forms noise RUN ...    the noise of each form's gradient, at policies of grpo_forms.yaml

The sequence task: a tiny Llama without any training, responses of 8 words out of 40, one point for each w7. The other
task is that of the stories, with benchmarks/grpo_forms.yaml (see benchmarks/seeds.py), whose folders `noise`
takes: RUN is OUT/seed-N-POLICY.

Noise: at a policy away from its reference and without any reward, the gradient g of the regularizer alone is computed
on many batches of completions, the same for all forms. Printed are sqrt(tr Cov g) / |E g|, the noise of one batch over
its signal, and the cosine of each form's mean gradient with that of the exact penalty in the reward, the gradient of
E[D_1 + D_2 + ...]. The others follow another one: a divergence in the loss leaves out that tokens decide which contexts
come later, and k3 in the loss is in expectation the gradient of forward KL.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.seeds import by_policy, mean_and_interval, table
from tests.ppo import tiny as models
from tests.trl import tiny
from wpr.regularizers.spec import RECOMMENDED

BETAS, SEEDS = (1.0, 0.5, 0.25, 0.1), 5
"""Betas of the sequence task, whose rewards are up to 8."""

SEQUENCE = {
    "per_device_train_batch_size": 32, "num_generations": 4, "max_steps": 60, "learning_rate": 8e-3,
    "max_completion_length": 8, "generation_kwargs": {"min_new_tokens": 8}, "scale_rewards": "none",
}  # fmt: skip
COLUMNS = {
    "after.score": "reward",
    "after.kl": "KL",
    "after.entropy": "entropy",
    "after.distinct_2": "distinct-2",
    "steps": "steps to 4",
}
PAIRS = [(ours, "k1-reward") for ours in ("exact-reward", "exact-loss", "k3-loss")]
PAIRS += [("exact-reward", "k3-loss"), ("exact-reward", "exact-loss")]
PAIRS += [("sum", "exact-reward"), ("semantic", "exact-reward")]


def forms(beta: float) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What a trainer is given beside the task in each form: arguments of its own, and settings of TRL."""
    ours: dict[str, dict[str, Any]] = {
        "k1-reward": {"regularizer": "reverse-kl", "regularizer_future": "penalty"},
        "exact-reward": {"regularizer": "reverse-kl"},
        "exact-loss": {"regularizer": "reverse-kl", "regularizer_in": "loss"},
        "semantic": {"regularizer": "semantic:k2=32"},
        "sum": {"regularizer": RECOMMENDED.replace("semantic", "semantic:k2=32")},
    }
    own = {"k3-loss": ({"regularizer": "reverse-kl", "regularizer_beta": 0.0}, {"beta": beta})}
    return own | {name: ({**parts, "regularizer_beta": beta}, {}) for name, parts in ours.items()}


def untrained(seed: int, folder: str) -> Any:
    """The reference of the sequence task, in a folder: TRL reads its own reference from there."""
    models.policy(seed).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_sequence(job: tuple[str, float, int]) -> tuple[int, str, float, dict[str, float]]:
    """One policy of the sequence task: seed, form, beta and results on 512 responses."""
    form, beta, seed = job
    torch.set_num_threads(1)
    parts, settings = forms(beta)[form]
    with tempfile.TemporaryDirectory() as folder:
        reference = untrained(seed, folder)
        trainer = tiny.trainer(folder, "grpo", copy.deepcopy(reference), parts, seed=seed, **SEQUENCE, **settings)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    scores = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    reached = (5 + n for n in range(len(scores) - 4) if statistics.fmean(scores[n : n + 5]) >= 4)
    return seed, form, beta, measure(trainer, reference) | {"steps": float(next(reached, len(scores) + 1))}


@torch.no_grad()
def measure(trainer: Any, reference: Any) -> dict[str, float]:
    """Reward, exact KL a token, entropy and distinct pairs of words of responses to the training prompts."""
    policy, rows = trainer.model.eval(), [row["prompt"] for row in trainer.train_dataset] * 32
    tokenizer = trainer.processing_class
    given = tokenizer(rows, return_tensors="pt", padding=True, padding_side="left").to(policy.device)
    given.pop("token_type_ids", None)
    torch.manual_seed(10_000)
    drawn = policy.generate(**given, do_sample=True, top_k=0, min_new_tokens=8, max_new_tokens=8)
    responses = drawn[:, -8:]
    mask = torch.cat([given["attention_mask"], torch.ones_like(responses)], 1)
    logs = [m(input_ids=drawn, attention_mask=mask).logits[:, -9:-1].log_softmax(-1) for m in (policy, reference)]
    pairs = {(a, b) for row in responses.tolist() for a, b in itertools.pairwise(row)}
    return {
        "after.score": statistics.fmean(tiny.counts_w7(tokenizer.batch_decode(responses))),
        "after.kl": float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()),
        "after.entropy": float(-(logs[0].exp() * logs[0]).sum(-1).mean()),
        "after.distinct_2": len(pairs) / (7 * len(responses)),
    }


def sequence(out: Path, workers: int) -> None:
    """Train what is not in the file yet, and print the tables."""
    done = [tuple(json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    jobs = [(form, beta, seed) for form in forms(1.0) for beta in BETAS for seed in range(SEEDS)]
    left = [(form, beta, seed) for form, beta, seed in jobs if (seed, form, beta) not in {row[:3] for row in done}]
    with ProcessPoolExecutor(workers) as pool, out.open("a") as file:
        for row in pool.map(train_sequence, left):
            print(json.dumps(row), file=file, flush=True)
            done.append(row)
    table(by_policy(done), PAIRS, COLUMNS)  # type: ignore[arg-type]


def gradients(trainer: Any, batches: list[list[dict[str, Any]]], drawn: dict[int, Any]) -> Iterator[Tensor]:
    """The gradient of the trainer's loss on each batch of prompts, all parameters in a row. ``drawn`` keeps the
    completions of a batch, for the trainers of other forms.
    """
    generate, number = trainer._generate, 0

    def once(*given: Any) -> Any:
        if number not in drawn:
            torch.manual_seed(number)
            drawn[number] = generate(*given)
        return copy.deepcopy(drawn[number])

    trainer._generate, trainer.current_gradient_accumulation_steps = once, 1
    trainer.model.train()
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    for number, rows in enumerate(batches):  # noqa: B007  # `once` reads it
        batch = trainer._generate_and_score_completions(rows)
        found = torch.autograd.grad(trainer.compute_loss(trainer.model, batch), trained, allow_unused=True)
        yield torch.cat(
            [torch.zeros_like(w).flatten() if g is None else g.flatten() for w, g in zip(trained, found, strict=True)]
        )


def noise_of(
    make: Callable[[str], Any], weights: Any, batches: list[list[dict[str, Any]]]
) -> dict[str, dict[str, float]]:
    """Noise over signal and cosine of every form. make: a trainer of a form, its model the reference; weights: of the
    policy at which the gradient is taken.
    """
    drawn: dict[int, Any] = {}
    means, found = {}, {}
    for form in forms(1.0):
        trainer = make(form)
        trainer.model.load_state_dict(weights)
        count, mean, squares = 0, torch.zeros(()), 0.0
        for gradient in gradients(trainer, batches, drawn):
            count, mean, squares = (
                count + 1,
                mean + gradient.double(),
                squares + float(gradient.double().square().sum()),
            )
        means[form] = mean / count
        signal = float(means[form].square().sum())
        variance = (squares - count * signal) / (count - 1)
        found[form] = {"noise": (variance / max(signal - variance / count, 1e-30)) ** 0.5}
    for form, mean in means.items():
        found[form]["cosine"] = float(torch.nn.functional.cosine_similarity(mean, means["exact-reward"], dim=0))
    return found


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def stories_noise(job: tuple[str, int]) -> dict[str, dict[str, float]]:
    """At the policy of a run with beta 0.05, batches of 12 prompts with 4 completions."""
    run, count = Path(job[0]), job[1]
    torch.set_num_threads(1)
    policy = sorted((run / "ppo").glob("*beta=0.05/model"))[0]
    texts = sorted({json.loads(line)["prompt"] for line in (run / "prepare" / "pairs.jsonl").read_text().splitlines()})
    rows = [{"prompt": text} for text in texts[: 12 * count]]
    batches = [[row for row in rows[12 * n : 12 * n + 12] for _ in range(4)] for n in range(count)]
    weights = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).state_dict()
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)

    def make(form: str) -> Any:
        parts, settings = forms(0.1)[form]
        model = transformers.AutoModelForCausalLM.from_pretrained(run / "sft" / "model", dtype=torch.float32)
        given = {"reward_funcs": no_reward, "processing_class": tokenizer, "train_dataset": Dataset.from_list(rows)}
        sizes = {"per_device_train_batch_size": 48, "max_completion_length": 44, "scale_rewards": "none"}
        return tiny.trainer(tempfile.mkdtemp(), "grpo", model, given | parts, **sizes, **settings)

    return noise_of(make, weights, batches)


def sequence_noise(seed: int, count: int) -> dict[str, dict[str, float]]:
    """At a policy of the sequence task after 30 steps under the exact penalty with beta 0.25."""
    rows = list(tiny.prompts())
    batches = [[row for row in rows[:8] for _ in range(4)]] * count
    reference = untrained(seed, tempfile.mkdtemp())

    def make(form: str, reward: Any = no_reward, **changes: Any) -> Any:
        parts, settings = forms(0.25)[form]
        given = {"reward_funcs": reward, **parts}
        return tiny.trainer(
            tempfile.mkdtemp(), "grpo", copy.deepcopy(reference), given, seed=seed, **SEQUENCE | settings | changes
        )

    trained = make("exact-reward", tiny.counts_w7, max_steps=30)
    trained.remove_callback(transformers.PrinterCallback)
    trained.train()
    return noise_of(make, trained.model.state_dict(), batches)


def noise(runs: list[str], batches: int, workers: int) -> None:
    with ProcessPoolExecutor(workers) as pool:
        found = {
            "sequence task": list(pool.map(sequence_noise, range(SEEDS), [batches] * SEEDS)),
            "stories": list(pool.map(stories_noise, [(run, batches) for run in runs])),
        }
    for task, results in found.items():
        shown = Table("form", "noise / signal", "cosine", title=f"{task}, {len(results)} seeds, {batches} batches each")
        for form in forms(1.0) if results else ():
            cells = (mean_and_interval([row[form][name] for row in results]) for name in ("noise", "cosine"))
            shown.add_row(form, *cells)
        Console(width=120).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    trained = actions.add_parser("sequence")
    trained.add_argument("out", type=Path, help="a file of results, one a line; those that are there are kept")
    noisy = actions.add_parser("noise")
    noisy.add_argument("runs", nargs="*", help="folders of benchmarks.seeds")
    noisy.add_argument("--batches", type=int, default=32)
    for action in (trained, noisy):
        action.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.action == "sequence":
        sequence(options.out, options.workers)
    else:
        noise(options.runs, options.batches, options.workers)


if __name__ == "__main__":
    sys.exit(main())
