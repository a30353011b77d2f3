"""PPO with a critic, under any policy regularizer."""

from wpr.ppo.config import PPOConfig
from wpr.ppo.faults import TrainingFault
from wpr.ppo.generation import Generation, Sampling, TransformersGeneration
from wpr.ppo.rollout import Prompts, Responses, responses_from_tokens
from wpr.ppo.trainer import PPOTrainer

__all__ = [
    "Generation",
    "PPOConfig",
    "PPOTrainer",
    "Prompts",
    "Responses",
    "Sampling",
    "TrainingFault",
    "TransformersGeneration",
    "responses_from_tokens",
]
