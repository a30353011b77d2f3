"""Where scores come from: a reward model, a Python function, a weighted sum of several."""

from wpr.rewards.base import Completions, Reward, RewardError, as_reward
from wpr.rewards.combined import WeightedSum
from wpr.rewards.function import FunctionReward
from wpr.rewards.model import RewardModel
from wpr.rewards.normalisation import RunningMoments, ScoreShaping

__all__ = [
    "Completions",
    "FunctionReward",
    "Reward",
    "RewardError",
    "RewardModel",
    "RunningMoments",
    "ScoreShaping",
    "WeightedSum",
    "as_reward",
]
