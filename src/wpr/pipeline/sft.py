"""The SFT stage: TRL's `SFTTrainer` on prompts and their demonstrated completions, with the loss on the completion."""

from __future__ import annotations

import math
from typing import Any

from wpr.model_loading import load_causal, load_tokenizer, lora_config
from wpr.pipeline.stage import Stage
from wpr.pipeline.training import (
    ResumableSFTTrainer,
    last_training_log,
    model_metrics,
    release,
    train_with_logs,
    usable_checkpoint,
)


def train_sft(stage: Stage) -> dict[str, Any]:
    """Train and save the model; results with the held-out loss before and after."""
    from datasets import Dataset

    recipe = stage.recipe
    tokenizer = load_tokenizer(recipe.model.name, recipe.model.revision)
    rows = stage.rows(tokenizer)
    args = stage.config()
    # Measured within training: `evaluate` before it would leave the model without the wrapper that averages gradients
    # over processes.
    args.eval_on_start = bool(rows.held_out) and usable_checkpoint(stage.checkpoints) is None
    trainer = ResumableSFTTrainer(
        model=load_causal(recipe.model),
        args=args,
        train_dataset=Dataset.from_list(rows.train),
        eval_dataset=Dataset.from_list(rows.held_out) if rows.held_out else None,
        processing_class=tokenizer,
        peft_config=lora_config(recipe.model.lora, "CAUSAL_LM"),
    )
    results: dict[str, Any] = {"rows": len(rows.train), "held_out_rows": len(rows.held_out)}
    train_with_logs(trainer, stage)
    if rows.held_out:
        first = next(row for row in trainer.state.log_history if "eval_loss" in row)  # checkpoints keep it
        results["before"] = _held_out(first)
    results["steps"] = trainer.state.global_step
    results["train"] = last_training_log(trainer.state.log_history)
    if rows.held_out:
        results["after"] = _held_out(trainer.evaluate())
    model = stage.unwrap(trainer)
    end_with(model, [rows.encoder.end_id, tokenizer.eos_token_id])
    stage.save(model, tokenizer, results)
    release(trainer)
    return results


def end_with(model: Any, tokens: list[int]) -> None:
    """Make ``generate`` stop at the token that completions were taught to end with."""
    found = model.generation_config.eos_token_id
    own = found if isinstance(found, list) else [] if found is None else [found]
    stops = list(dict.fromkeys([*tokens, *own]))
    model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]


def _held_out(evaluated: dict[str, Any]) -> dict[str, float]:
    """Loss per token of held-out completions, and its exponential."""
    metrics = model_metrics(evaluated)
    found = {name.removeprefix("eval_"): value for name, value in metrics.items() if name != "eval_num_tokens"}
    found["perplexity"] = math.exp(min(found["loss"], 700.0))
    return found
