"""Code rewards: generated programs, run on tests in a sandbox."""

from wpr.rewards.code.code_reward import CodeReward, program_of
from wpr.rewards.code.isolation import Isolation, isolation
from wpr.rewards.code.limits import Limits
from wpr.rewards.code.outcome import Outcome, reward_of
from wpr.rewards.code.pass_rate import Score, pass_at_1
from wpr.rewards.code.problems import Case, CodeProblem, ProblemError, parse_problem
from wpr.rewards.code.runner import Runner
from wpr.rewards.code.sandbox import SandboxError

__all__ = [
    "Case",
    "CodeProblem",
    "CodeReward",
    "Isolation",
    "Limits",
    "Outcome",
    "ProblemError",
    "Runner",
    "SandboxError",
    "Score",
    "isolation",
    "parse_problem",
    "pass_at_1",
    "program_of",
    "reward_of",
]
