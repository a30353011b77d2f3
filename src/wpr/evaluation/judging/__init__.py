"""Judges: asking models, reward models and functions which of two responses is better, or how good one is."""

from wpr.evaluation.judging.asking import JudgeResults, ask_all, pending
from wpr.evaluation.judging.local import FunctionJudge, RewardModelJudge
from wpr.evaluation.judging.questions import Answer, JudgingError, Question, RequestLimits, UnreadableError
from wpr.evaluation.judging.server import ServerJudge

__all__ = [
    "Answer",
    "FunctionJudge",
    "JudgeResults",
    "JudgingError",
    "Question",
    "RequestLimits",
    "RewardModelJudge",
    "ServerJudge",
    "UnreadableError",
    "ask_all",
    "pending",
]
