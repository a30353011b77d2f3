"""The reward stage: TRL's `RewardTrainer` from the SFT model, and how good the model is on held-out pairs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import pad
from wpr.model_loading import load_scorer, load_tokenizer, lora_config
from wpr.pipeline.stage import Stage
from wpr.pipeline.training import (
    ResumableRewardTrainer,
    last_training_log,
    release,
    train_with_logs,
)

BINS = 10


def train_reward(stage: Stage) -> dict[str, Any]:
    """Train and save the reward model; results with accuracy, margin and calibration on held-out pairs."""
    from datasets import Dataset
    from transformers import set_seed

    recipe = stage.recipe
    tokenizer = load_tokenizer(stage.sft_model)
    rows = stage.rows(tokenizer)
    # A classifier scores the last token that is not padding, and PPO asks for the score at the end token.
    tokenizer.pad_token_id = rows.encoder.padding_id
    args = stage.config()
    set_seed(args.seed)  # the new head's weights are drawn from here
    trainer = ResumableRewardTrainer(
        model=load_scorer(recipe.model, stage.sft_model, tokenizer.pad_token_id),
        args=args,
        train_dataset=Dataset.from_list(rows.train),
        eval_dataset=Dataset.from_list(rows.held_out) if rows.held_out else None,
        processing_class=tokenizer,
        peft_config=lora_config(recipe.model.lora, "SEQ_CLS"),
    )
    train_with_logs(trainer, stage)
    results: dict[str, Any] = {
        "rows": len(rows.train),
        "held_out_rows": len(rows.held_out),
        "steps": trainer.state.global_step,
        "train": last_training_log(trainer.state.log_history),
    }
    if rows.held_out:
        results["held_out"] = pair_report(
            *score_pairs(trainer, rows.held_out, tokenizer.pad_token_id, args.per_device_eval_batch_size)
        )
    stage.save(stage.unwrap(trainer), tokenizer, results)
    release(trainer)
    return results


@torch.no_grad()
def score_pairs(trainer: Any, rows: list[dict[str, Any]], padding: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Scores ``(N,)`` of the chosen and of the rejected completions."""
    model = trainer.model.eval()
    found: dict[str, list[Tensor]] = {"chosen_ids": [], "rejected_ids": []}
    for start in range(0, len(rows), batch_size):
        for name, scores in found.items():
            part = [row[name] for row in rows[start : start + batch_size]]
            ids, mask = pad(part, value=padding, device=trainer.args.device)
            with trainer.compute_loss_context_manager():
                logits = model(ids, attention_mask=mask).logits
            scores.append(logits.squeeze(-1).float().cpu())
    return torch.cat(found["chosen_ids"]), torch.cat(found["rejected_ids"])


def pair_report(chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    """How well scores ``(N,)`` of pairs tell the chosen one, p = sigmoid(chosen - rejected) being the stated chance.

    accuracy: share of pairs with chosen > rejected, ties counting half, and its standard error. margin: mean of
    chosen - rejected. loss: mean of -log p. calibration: pairs are taken in a random order, so that p says how sure the
    model is of either side: confidence max(p, 1 - p) in bins against the accuracy within the bin; their mean distance,
    weighted by pairs, is the expected calibration error.
    """
    margin = (chosen - rejected).double()
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    accuracy = right.mean().item()
    confidence = margin.abs().sigmoid()
    edges = torch.linspace(0.5, 1.0, BINS + 1, dtype=torch.float64)
    index = torch.bucketize(confidence, edges[1:-1])
    bins = []
    for number in range(BINS):
        inside = index == number
        if inside.any():
            bins.append(
                {
                    "confidence": confidence[inside].mean().item(),
                    "accuracy": right[inside].mean().item(),
                    "pairs": int(inside.sum()),
                }
            )
    error = sum(part["pairs"] * abs(part["confidence"] - part["accuracy"]) for part in bins) / len(margin)
    return {
        "pairs": len(margin),
        "accuracy": accuracy,
        "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(margin)),
        "margin": margin.mean().item(),
        "margin_deviation": margin.std(correction=0).item(),
        "loss": -torch.nn.functional.logsigmoid(margin).mean().item(),
        "calibration_error": error,
        "calibration": bins,
        "mean_score_chosen": chosen.mean().item(),
        "mean_score_rejected": rejected.mean().item(),
    }
