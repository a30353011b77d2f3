"""From a dataset of prompts to left-padded batches, and the order in which a run goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from wpr.language_models import pad


class PromptCollator:
    """Rows with a ``prompt`` (text, or chat messages) or ready ``input_ids`` to one batch.

    The batch has ``input_ids`` and ``attention_mask`` ``(B, Q)`` padded on the left, ``prompts`` as they were given,
    and ``columns``, the other columns by name.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate, keeping the last ``max_length`` tokens of each prompt."""
        tokens = [self.tokens(row) for row in rows]
        input_ids, attention_mask = pad(tokens, left=True)
        own = ("prompt", "input_ids", "attention_mask")
        names = [name for name in rows[0] if name not in own]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prompts": [self.text(row, ids) for row, ids in zip(rows, tokens, strict=True)],
            "columns": {name: [row[name] for row in rows] for name in names},
        }

    def text(self, row: Mapping[str, Any], ids: list[int]) -> Any:
        """The prompt as rewards see it."""
        if "prompt" in row:
            return row["prompt"]
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(ids)

    def tokens(self, row: Mapping[str, Any]) -> list[int]:
        """Token ids of one row's prompt."""
        if "input_ids" in row:
            found = row["input_ids"]
            found = found.tolist() if hasattr(found, "tolist") else found
            if "attention_mask" in row:
                found = [token for token, real in zip(found, row["attention_mask"], strict=True) if real]
        elif "prompt" not in row:
            raise ValueError(f"a dataset row has the columns {sorted(row)}; it needs 'prompt' or 'input_ids'")
        elif self.tokenizer is None:
            raise ValueError("prompts are text but there is no tokenizer; pass processing_class=, or rows of input_ids")
        elif isinstance(row["prompt"], str):
            found = self.tokenizer(row["prompt"])["input_ids"]
        elif not isinstance(row["prompt"], list | tuple):
            raise ValueError(f"the prompt {row['prompt']!r} is neither text nor a list of chat messages")
        else:
            found = self.tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        ids: list[int] = list(found)[-self.max_length :]
        if not ids and getattr(self.tokenizer, "bos_token_id", None) is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise ValueError(
                f"the prompt {row.get('prompt', row.get('input_ids'))!r} has no tokens, and the tokenizer has no "
                "beginning-of-sequence token to stand for it; drop such rows"
            )
        return ids


class RolloutSampler(Sampler[int]):
    """Indices of prompts in groups of one rollout, each group repeated for all of the rollout's micro-batches.

    The Trainer asks for a batch per micro-batch; a rollout's prompts come with each of them, and only the first is
    used. So step counts, resuming and the sharding of batches over processes are the Trainer's own. Every group is
    whole: prompts that are left over at the end of an epoch wait for the next, whose order is another one.
    """

    def __init__(
        self,
        dataset: Sized,
        group: int,
        repeats: int,
        shuffle: bool,
        seed: int,
        rollouts_done: Callable[[], int] = lambda: 0,
        each: int = 1,
    ) -> None:
        """``rollouts_done`` tells, when an epoch begins or is resumed, which epoch that is. (The epoch that the Trainer
        announces gets lost in the wrappers of a resumed, sharded data loader.) ``each``: how often a prompt comes in a
        row, where the rows of a batch are responses.
        """
        if len(dataset) < group:
            raise ValueError(
                f"the dataset has {len(dataset)} prompts, fewer than the {group} of one rollout; lower "
                "per_device_train_batch_size, gradient_accumulation_steps or num_minibatches, raise "
                "responses_per_prompt, or repeat the dataset"
            )
        self.dataset, self.group, self.repeats, self.shuffle, self.seed = dataset, group, repeats, shuffle, seed
        self.rollouts_done, self.each = rollouts_done, each

    def __len__(self) -> int:
        return len(self.dataset) // self.group * self.group * self.repeats * self.each

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        order = np.arange(count)
        if self.shuffle:
            epoch = self.rollouts_done() // (count // self.group)
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        for start in range(0, count - self.group + 1, self.group):
            for _ in range(self.repeats):
                yield from order[start : start + self.group].repeat(self.each).tolist()
