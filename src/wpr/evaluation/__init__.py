"""Evaluation of responses: who wins, and how unlike one another they are."""

from wpr.evaluation.diversity import distinct, diversity, embedding_spread, self_bleu
from wpr.evaluation.win_rate import WinRate, win_rate

__all__ = ["WinRate", "distinct", "diversity", "embedding_spread", "self_bleu", "win_rate"]
