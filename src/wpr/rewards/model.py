"""A reward model: a sequence-classification checkpoint that scores prompt and response."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wpr.damaged_files import refuse_damaged_model
from wpr.language_models import hidden_states, is_partitioned, position_limit, scalar_head, scores_at, scores_split
from wpr.rewards.base import Completions


class RewardModel:
    """The score at the last real token of prompt and response.

    model: sequence classification with one label, of the policy's tokenizer unless ``tokenizer`` is given.
    tokenizer: the reward model's own, if it differs from the policy's: texts are then tokenized again, through its chat
        template where prompts are chat messages.
    batch_size: sequences a forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any = None, batch_size: int = 32, name: str = "reward_model") -> None:
        scalar_head(model)
        # Encoders, for instance, pool in their own way: they run as they are, on rows padded on the right.
        self.whole = not is_partitioned(model) and not scores_split(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.name = name

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> RewardModel:
        """Load the model from a folder or hub name."""
        from transformers import AutoModelForSequenceClassification

        refuse_damaged_model(folder)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, output_loading_info=True
        )
        heads = [name for name in found["missing_keys"] if name.startswith(("score", "classifier"))]
        if heads:
            raise ValueError(f"{folder} has no trained score head ({heads[0]} is missing): it is not a reward model")
        return cls(model, **options)

    def to(self, device: torch.device) -> RewardModel:
        """The same reward, its model on another device."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`."""
        ids, mask, last = completions.input_ids, completions.attention_mask, completions.last
        if self.tokenizer is not None:
            ids, mask, last = self._tokenize(completions)
        scores = []
        for rows in torch.arange(len(ids), device=ids.device).split(self.batch_size):
            if self.whole:
                scores.append(self._own_scores(ids[rows], mask[rows]))
                continue
            states = hidden_states(self.model, ids[rows], mask[rows])
            scores.append(scores_at(self.model, states[torch.arange(len(rows), device=ids.device), last[rows]]))
        return torch.cat(scores)

    def _own_scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(-1)
        padding = self.model.config.pad_token_id or 0
        packed = torch.full((len(ids), int(lengths.max())), padding, device=ids.device)
        keep = torch.arange(packed.shape[1], device=ids.device) < lengths.unsqueeze(-1)
        packed[keep] = ids[mask.bool()]
        scores: Tensor = self.model(input_ids=packed, attention_mask=keep.long()).logits
        return scores.squeeze(-1).float()

    def _tokenize(self, completions: Completions) -> tuple[Tensor, Tensor, Tensor]:
        texts = [
            prompt + response
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": response}], tokenize=False
            )
            for prompt, response in zip(completions.prompts, completions.responses, strict=True)
        ]
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        chat = not isinstance(completions.prompts[0], str)  # a template brings its own special tokens
        batch = self.tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=not chat,
            truncation=position_limit(self.model) is not None,
            max_length=position_limit(self.model),
        ).to(completions.input_ids.device)
        return batch["input_ids"], batch["attention_mask"], (batch["attention_mask"].sum(-1) - 1).clamp_min(0)
