"""PPO with a critic, under any policy regularizer."""

from wpr.ppo.config import PPOConfig
from wpr.ppo.faults import TrainingFault
from wpr.ppo.generation import Generation, Sampling, TransformersGeneration
from wpr.ppo.trainer import PPOTrainer

__all__ = ["Generation", "PPOConfig", "PPOTrainer", "Sampling", "TrainingFault", "TransformersGeneration"]
