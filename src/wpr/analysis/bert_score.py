"""BERTScore: how alike two texts are, by the best match of each token among the contextual embeddings of the other.

With unit vectors x_i of the candidate's tokens and y_j of the reference's (Zhang et al., 2020):

    precision = mean_i max_j <x_i, y_j>       recall = mean_j max_i <x_i, y_j>       F1 = 2 P R / (P + R)

Special tokens take no part, all tokens count alike (no IDF weights), and scores are not rescaled by a baseline: they
are cosines, and of two unrelated texts far above 0 for most encoders. Only differences between scores of one encoder
mean something.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
