"""Where a PPO step's time and memory go, by regularizer and generation back end, on a real model.

    python -m benchmarks.ppo_step [--model models/smollm2] [--prompts 64] [--tokens 128] [--steps 8]

One step is one rollout and one optimizer step. Responses are drawn by what the machine uses by default, and under
reverse KL by transformers' `generate`, too. All take turns within one run, in another order every turn: whatever slows
the machine down for a while does so for all. Medians over the steps are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from wpr import ReverseKL, Wasserstein
from wpr.ppo import PPOConfig, PPOTrainer, TransformersGeneration

SUBJECTS = ["generation", "scoring", "penalty", "reward", "backpropagation"]
TOPICS = ["the sea", "a lost key", "bread", "winter", "an old train", "music", "a garden", "the moon"]
TASKS = [
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a poem about {}.",
    "Why do people like {}?",
    "Describe {} in one paragraph.",
    "Give me advice about {}.",
    "Compare {} with the wind.",
]


def prompts(count: int) -> list[dict[str, Any]]:
    """Chat prompts, all different up to 64."""
    texts = [task.format(topic) for task in TASKS for topic in TOPICS]
    return [{"prompt": [{"role": "user", "content": texts[i % len(texts)]}]} for i in range(count)]


def length_reward(prompts: list[Any], responses: list[str], **columns: Any) -> list[float]:
    return [len(response) / 100 for response in responses]


PLAIN = "reverse-kl, generate"


class TakeTurns(transformers.TrainerCallback):
    """Another regularizer or back end every step, and the wall-clock seconds and peak memory of each."""

    def __init__(self, kinds: dict[str, Any]) -> None:
        self.kinds = kinds
        self.trainer: Any = None
        self.steps: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % len(self.kinds) == 0:
            self.order = random.Random(state.global_step).sample(sorted(self.kinds), len(self.kinds))
        self.name = self.order[state.global_step % len(self.kinds)]
        collector = self.trainer.collector
        collector.regularizer = self.kinds[self.name]
        collector.generation = TransformersGeneration() if self.name == PLAIN else self.trainer.generation
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append({"name": self.name, "step": self._now() - self.start})

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def run(folder: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """By regularizer: the seconds of every step by subject, peak memory, and how the solver fared."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, dtype=dtype, num_labels=1)
    policy = policy.to(device)
    semantic = Wasserstein.from_model(policy)
    kinds = {
        PLAIN: ReverseKL(),
        "reverse-kl": ReverseKL(),
        "wasserstein paper": Wasserstein.from_model(policy, "paper"),
        "wasserstein semantic": semantic,
        "reverse-kl + 4*semantic": ReverseKL() + 4 * semantic,
    }
    turns = TakeTurns(kinds)
    args = PPOConfig(
        folder, per_device_train_batch_size=options.prompts // 2, gradient_accumulation_steps=2,
        scoring_batch_size=options.prompts, max_new_tokens=options.tokens, min_new_tokens=options.tokens,
        max_steps=(options.steps + 1) * len(kinds), save_strategy="no", report_to="none", use_cpu=device == "cpu",
        log_completions=0, logits_memory_mb=options.budget,
    )  # fmt: skip
    trainer = PPOTrainer(
        policy, args, reward=length_reward, regularizer=kinds["reverse-kl"], critic=critic,
        processing_class=transformers.AutoTokenizer.from_pretrained(options.model),
        train_dataset=prompts(options.prompts), callbacks=[turns],
    )  # fmt: skip
    turns.trainer, trainer.generation = trainer, trainer.collector.generation
    trainer.console.on_log = lambda *args, **kwargs: None
    trainer.train()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    logs = [row for row in trainer.state.log_history if "loss" in row]
    for step, row in list(zip(turns.steps, logs, strict=True))[len(kinds) :]:  # the first turn warms up
        values = {**row, **step, "memory": row["peak_memory_gb"]}
        for name in [*SUBJECTS, "step", "memory", "kl", "solver_iterations", "solver_converged"]:
            value = values.get(f"seconds_{name}", values.get(name))
            if value is not None:
                found[step["name"]].setdefault(name, []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="of each regularizer, after one that warms up")
    parser.add_argument("--budget", type=float, default=2048.0, help="logits_memory_mb")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        found = run(folder, options)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{options.prompts} prompts x {options.tokens} new tokens, {where}; medians of {options.steps} steps")
    heads = [*SUBJECTS, "step", "/ reverse-kl", "peak GB"]
    print(f"{'seconds':26s}" + "".join(f"{head:>17s}" for head in heads))
    base = median(found["reverse-kl"]["step"])
    for name, values in found.items():
        row = [median(values[subject]) for subject in [*SUBJECTS, "step"]]
        row += [row[-1] / base, max(values["memory"])]
        print(f"{name:26s}" + "".join(f"{value:17.3f}" for value in row))
    for name, values in found.items():
        print(f"{name}: steps took {min(values['step']):.3f} to {max(values['step']):.3f} s", end="")
        if "solver_iterations" in values:
            print(f"; {median(values['solver_iterations']):.1f} iterations", end="")
        print()
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
