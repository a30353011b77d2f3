"""A run of TRL's trainers under a regularizer as a program, for tests that need real processes."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.ppo import run
from tests.ppo import tiny as models
from tests.trl import tiny
from tests.trl.test_distillation import trainer as distilling
from wpr import DivergenceMonitor
from wpr.rewards import WordList

TEXTS = ["w3 w4 w5 w6", "w7 w8", "w9 w10 w11"]


class Numbered(models.LlamaForCausalLM):
    """Draws the tokens of a completion by its number in the batch of all processes, whichever of them draws it."""

    draws = 0

    @torch.no_grad()
    def generate(self, input_ids: Any, attention_mask: Any, generation_config: Any, **others: Any) -> Any:
        first = int(os.environ.get("RANK", 0)) * len(input_ids)
        generators = [torch.Generator().manual_seed(1000 * self.draws + first + row) for row in range(len(input_ids))]
        self.draws += 1
        for _ in range(generation_config.max_new_tokens):
            logits = self(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, -1]
            noise = torch.stack([torch.empty(logits.shape[-1]).exponential_(generator=each) for each in generators])
            drawn = (logits - noise.log()).argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, drawn], -1)
            attention_mask = torch.cat([attention_mask, torch.ones_like(drawn)], -1)
        return input_ids


def policy(numbered: bool) -> Any:
    """Sharper than a fresh model."""
    torch.manual_seed(0)
    made = (Numbered if numbered else models.LlamaForCausalLM)(models.config())
    with torch.no_grad():
        made.lm_head.weight.mul_(8)
    return made


def train(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("algorithm")
    parser.add_argument("form")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--numbered", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args(arguments)
    if "deepspeed" in options.settings:
        run.communicate_without_compiling()
    parts: dict[str, Any] = {"callbacks": [run.Pause(options.pause)]}
    model = policy(options.numbered)
    if options.algorithm == "distillation":
        trainer = distilling(options.folder, parts=parts, model=model, **options.settings)
    else:
        parts |= {"regularizer_in": options.form, "regularizer_beta": 0.2}
        if options.algorithm == "grpo":  # rewards of tokens are compared over processes, too
            parts["reward_funcs"] = WordList(["w8 = 0.5", "w9"], preferred=["w7"])
        trainer = tiny.trainer(options.folder, options.algorithm, model, parts, **options.settings)
    trainer.add_callback(DivergenceMonitor(trainer, TEXTS, every=2, max_new_tokens=0))
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(options.folder / "final_state.json"))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    run.main(train)
