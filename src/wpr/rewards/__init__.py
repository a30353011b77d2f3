"""Where scores come from: a reward model, a Python function, rules for wording, a weighted sum of several."""

from wpr.rewards.base import Completions, Reward, RewardError, TokenReward, as_reward, score_by_token
from wpr.rewards.combined import WeightedSum
from wpr.rewards.function import FunctionReward, TRLFunction
from wpr.rewards.model import RewardModel
from wpr.rewards.normalisation import RunningMoments, ScoreShaping
from wpr.rewards.wording import ReadingLevel, Spelling, WordList
from wpr.rewards.words import WordListError

__all__ = [
    "Completions",
    "FunctionReward",
    "ReadingLevel",
    "Reward",
    "RewardError",
    "RewardModel",
    "RunningMoments",
    "ScoreShaping",
    "Spelling",
    "TRLFunction",
    "TokenReward",
    "WeightedSum",
    "WordList",
    "WordListError",
    "as_reward",
    "score_by_token",
]
