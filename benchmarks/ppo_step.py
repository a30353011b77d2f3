"""Where a PPO step's time and memory go, by regularizer, on a real model: the paper's wall-clock table.

    python -m benchmarks.ppo_step [--model models/smollm2] [--prompts 64] [--tokens 128] [--steps 6]

One step is one rollout and one optimizer step. The regularizers take turns, so that a machine that slows down or warms
up does so for all; the medians over all their steps are printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from wpr import ReverseKL, TokenGeometry, Wasserstein
from wpr.ppo import PPOConfig, PPOTrainer

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


class StepClock(transformers.TrainerCallback):
    """Wall-clock seconds of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(self._now() - self.start)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def run(folder: str, regularizer: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every step by subject, and peak memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, dtype=dtype, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    clock = StepClock()
    args = PPOConfig(
        folder, per_device_train_batch_size=options.prompts // 2, gradient_accumulation_steps=2,
        scoring_batch_size=options.prompts, max_new_tokens=options.tokens, min_new_tokens=options.tokens,
        max_steps=options.steps + 1, save_strategy="no", report_to="none", use_cpu=device == "cpu", log_completions=0,
        logits_memory_mb=options.budget,
    )  # fmt: skip
    trainer = PPOTrainer(
        policy, args, reward=length_reward, regularizer=regularizer, critic=critic, processing_class=tokenizer,
        train_dataset=prompts(options.prompts), callbacks=[clock],
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.console.on_log = lambda *args, **kwargs: None
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][1:]
    found = {subject: [row.get(f"seconds_{subject}", 0.0) for row in rows] for subject in SUBJECTS}
    found["step"] = clock.times[1:]
    found["memory"] = [row["peak_memory_gb"] for row in rows]
    for name in ("kl", "divergence", "solver_iterations", "solver_marginal_error", "solver_converged"):
        found[name] = [row[name] for row in rows if name in row]
    del trainer, policy, critic
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--budget", type=float, default=2048.0, help="logits_memory_mb")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    ).to(device)
    geometry = TokenGeometry.from_model(model)
    kinds = {
        "reverse-kl": ReverseKL(),
        "wasserstein paper": Wasserstein(geometry, "paper"),
        "wasserstein semantic": Wasserstein(geometry, "semantic"),
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name, regularizer in kinds.items():
                for subject, values in run(folder, regularizer, options).items():
                    found[name].setdefault(subject, []).extend(values)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    count = options.steps * options.turns
    print(f"\n{options.prompts} prompts x {options.tokens} new tokens, {where}; medians of {count} steps")
    heads = [*SUBJECTS, "step", "/ reverse-kl", "peak GB"]
    print(f"{'seconds':22s}" + "".join(f"{head:>17s}" for head in heads))
    base = median(found["reverse-kl"]["step"])
    for name, values in found.items():
        row = [median(values[subject]) for subject in [*SUBJECTS, "step"]]
        row += [row[-1] / base, max(values["memory"])]
        print(f"{name:22s}" + "".join(f"{value:17.3f}" for value in row))
    for name, values in found.items():
        extra = {key: median(values[key]) for key in values if key.startswith(("solver", "kl", "div")) and values[key]}
        print(name, {key: round(value, 5) for key, value in extra.items()})
        print(name, "steps", [round(value, 3) for value in values["step"]])
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
