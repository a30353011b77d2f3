"""BERTScore: how alike two texts are, by the best match of each token among the contextual embeddings of the other.

With unit vectors x_i of the candidate's tokens and y_j of the reference's (Zhang et al., 2020):

    precision = mean_i max_j <x_i, y_j>       recall = mean_j max_i <x_i, y_j>       F1 = 2 P R / (P + R)

Special tokens take no part, all tokens count alike (no IDF weights), and scores are not rescaled by a baseline: they
are cosines, and of two unrelated texts far above 0 for most encoders. Only differences between scores of one encoder
mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.damaged_files import refuse_damaged_model


@dataclass(frozen=True)
class ContextualEncoder:
    """A model that gives each token of a text a vector: any transformers encoder, or a causal model's hidden states.

    layer: of the hidden states, 0 the embeddings and -1 the last.
    """

    model: Any
    tokenizer: Any
    name: str
    layer: int = -1

    @classmethod
    def from_pretrained(cls, folder: str, layer: int = -1, device: torch.device | str = "cpu") -> ContextualEncoder:
        """Load a model's folder or hub name, in float32."""
        from transformers import AutoModel, AutoTokenizer

        refuse_damaged_model(folder)
        try:
            model = AutoModel.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            said = str(error).strip().split("\n")[0]
            raise ValueError(
                f"the encoder {folder} cannot be loaded ({said}); name a folder that transformers' AutoModel and "
                "AutoTokenizer read, with config.json, weights and tokenizer"
            ) from None
        return cls(model.to(device).eval(), tokenizer, folder, layer).checked()

    def checked(self) -> ContextualEncoder:
        """The encoder, if it has that layer."""
        layers = int(self.model.config.get_text_config().num_hidden_layers)
        if not -layers - 1 <= self.layer <= layers:
            raise ValueError(
                f"layer {self.layer} is outside {-layers - 1}..{layers} of {self.name}: it has {layers} layers, 0 "
                "being the embeddings and -1 the last"
            )
        return self

    @property
    def longest(self) -> int | None:
        """Tokens that it reads of a text at most; None where it does not say."""
        limits = [
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        ]
        known = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**9]
        # RoBERTa and its kin keep two positions for padding.
        spare = 2 if getattr(self.model.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") else 0
        return min(known) - spare if known else None

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 32) -> tuple[list[Tensor], int]:
        """Unit vectors ``(tokens, H)`` of each text, none for a text without tokens; and how many texts were cut."""
        found: list[Tensor] = []
        cut = 0
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        device = next(self.model.parameters()).device
        for first in range(0, len(texts), batch_size):
            part = list(texts[first : first + batch_size])
            if self.longest is not None:
                whole = self.tokenizer(part, verbose=False)["input_ids"]
                cut += sum(len(ids) > self.longest for ids in whole)
            batch = self.tokenizer(
                part, return_tensors="pt", padding=True, padding_side="right", truncation=self.longest is not None,
                max_length=self.longest, return_special_tokens_mask=True,
            )  # fmt: skip
            special = batch.pop("special_tokens_mask").bool()
            keep = batch["attention_mask"].bool() & ~special
            if batch["input_ids"].shape[1] == 0:  # nothing but empty texts, and no special tokens around them
                found += [torch.zeros(0, 1)] * len(part)
                continue
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            states = self.model(**inputs, output_hidden_states=True).hidden_states[self.layer].float()
            vectors = torch.nn.functional.normalize(states, dim=-1).cpu()
            found += [row[kept] for row, kept in zip(vectors, keep, strict=True)]
        return found, cut


@dataclass(frozen=True)
class BertScore:
    """BERTScore of a candidate against a reference."""

    precision: float
    recall: float
    f1: float


def bert_score(candidate: Tensor, reference: Tensor) -> BertScore | None:
    """The score of unit vectors ``(n, H)`` against ``(m, H)``; None where one of both has no tokens."""
    if not len(candidate) or not len(reference):
        return None
    alike = candidate @ reference.mT
    precision, recall = float(alike.amax(1).mean()), float(alike.amax(0).mean())
    total = precision + recall
    return BertScore(precision, recall, 2 * precision * recall / total if total else 0.0)
