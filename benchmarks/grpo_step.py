"""What a step of TRL's GRPO takes in time and memory: TRL's own KL against exact regularizers, on a real model.

    python -m benchmarks.grpo_step [--model models/smollm2] [--prompts 8] [--completions 8] [--tokens 128]

Every trainer is made anew in every round, in another order each time, so that whatever slows the machine down for a
while does so for all; its first step warms up. Completions have a fixed length. Generation is the same code for all
and most of a step, so that its noise would drown the rest: in the first round every trainer draws once, in its first
step, and all later steps of all trainers use the first completions again. Printed are medians: of generation over all
trainers but the first, of the rest of a step by trainer; a whole step is their sum. Both are given over TRL's at
beta > 0, with the largest peak of memory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

import wpr.trl
from benchmarks.ppo_step import TASKS, TOPICS
from wpr.regularizers.spec import RECOMMENDED

OWN, BETA = "TRL, beta > 0", 0.05
KINDS: dict[str, dict[str, Any]] = {
    "TRL, beta = 0": {"beta": 0.0},
    OWN: {"beta": BETA},
    **{
        f"{name} in the {form}": {"regularizer": name, "regularizer_in": form}
        for form in ("reward", "loss")
        for name in ("reverse-kl", "semantic", RECOMMENDED)
    },
}


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    return [len(completion) / 100 for completion in completions]


class Clock(transformers.TrainerCallback):
    """Seconds of generation, and of what else a step takes.

    drawn: the completions that all steps use; None: those of the first step.
    """

    def __init__(self, drawn: Any) -> None:
        self.drawn, self.taken = drawn, 0.0
        self.generation: list[float] = []
        self.rest: list[float] = []

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start, self.taken = self.now(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rest.append(self.now() - self.start - self.taken)

    def watch(self, trainer: Any, generate: bool) -> None:
        """Time what the trainer generates in its first step, if it is to generate at all."""
        own, left = trainer._generate, generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            start = self.now()
            if left or self.drawn is None:
                found, left = own(*args, **kwargs), False
                self.generation.append(self.now() - start)
                self.drawn = found if self.drawn is None else self.drawn
            self.taken += self.now() - start
            return copy.deepcopy(self.drawn)

        trainer._generate = timed


def train(
    kind: dict[str, Any], options: argparse.Namespace, folder: str, generate: bool, drawn: Any
) -> tuple[dict[str, list[float]], Any]:
    """Seconds of generation, and of the rest of steps after the first, peak memory in GB; and the completions."""
    cuda = torch.cuda.is_available()
    texts = [task.format(topic) for task in TASKS for topic in TOPICS]
    args = trl.GRPOConfig(
        folder, per_device_train_batch_size=options.prompts * options.completions, num_generations=options.completions,
        max_completion_length=options.tokens, generation_kwargs={"min_new_tokens": options.tokens},
        max_steps=options.steps + 1, beta=kind.get("beta", 0.0), bf16=cuda, use_cpu=not cuda, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=options.steps + 1,
    )  # fmt: skip
    clock, named = Clock(drawn), "regularizer" in kind
    trainer = (wpr.trl.GRPOTrainer if named else trl.GRPOTrainer)(
        options.model, length_reward, args, train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        callbacks=[clock], **({"regularizer_beta": BETA, **kind} if named else {}),
    )  # fmt: skip
    clock.watch(trainer, generate)
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    trainer.accelerator.free_memory()
    return {"generation": clock.generation, "rest": clock.rest[1:], "memory": [peak]}, clock.drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="of a trainer in a round, after one that warms up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*KINDS], default=[*KINDS], help="beside TRL's own, at beta > 0")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = [name for name in KINDS if name in (OWN, *options.only)]
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    drawn: Any = None
    draws: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for name in random.Random(turn).sample(names, len(names)):
                taken, drawn = train(KINDS[name], options, folder, turn == 0, drawn)
                draws += taken["generation"]
                for key, values in taken.items():
                    found[name][key] += values
                gc.collect()
                torch.cuda.empty_cache()
                if options.json:
                    options.json.write_text(json.dumps(found))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    draws = draws[1:] or draws
    print(
        f"\n{options.model}, {options.prompts} prompts x {options.completions} completions of {options.tokens} tokens, "
        f"{where}, TRL {trl.__version__}; generation {median(draws):.2f} s, the median of {len(draws)} "
        f"({min(draws):.2f} to {max(draws):.2f}); the rest of {options.rounds * options.steps} steps each:"
    )
    heads = ("rest, s", "lowest", "highest", "/ TRL", "whole step / TRL", "peak GB", "/ TRL")
    print(f"{'':36s}" + "".join(f"{head:>18s}" for head in heads))
    base, memory = median(found[OWN]["rest"]), max(found[OWN]["memory"])
    for name, values in found.items():
        rest, peak = median(values["rest"]), max(values["memory"])
        whole = (median(draws) + rest) / (median(draws) + base)
        row = [rest, min(values["rest"]), max(values["rest"]), rest / base, whole, peak, peak / memory]
        print(f"{name:36s}" + "".join(f"{value:18.3f}" for value in row))


if __name__ == "__main__":
    main()
