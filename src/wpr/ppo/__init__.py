"""PPO with a critic, under any policy regularizer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wpr.ppo.config import PPOConfig
    from wpr.ppo.faults import TrainingFault
    from wpr.ppo.generation import Generation, Sampling, TransformersGeneration
    from wpr.ppo.graph_generation import GraphGeneration
    from wpr.ppo.rollout import Prompts, Responses, responses_from_tokens
    from wpr.ppo.trainer import PPOTrainer
    from wpr.ppo.vllm_generation import VLLMGeneration

__all__ = [
    "Generation",
    "GraphGeneration",
    "PPOConfig",
    "PPOTrainer",
    "Prompts",
    "Responses",
    "Sampling",
    "TrainingFault",
    "TransformersGeneration",
    "VLLMGeneration",
    "responses_from_tokens",
]

_FILES = {
    "Generation": "generation",
    "GraphGeneration": "graph_generation",
    "PPOConfig": "config",
    "PPOTrainer": "trainer",
    "Prompts": "rollout",
    "Responses": "rollout",
    "Sampling": "generation",
    "TrainingFault": "faults",
    "TransformersGeneration": "generation",
    "VLLMGeneration": "vllm_generation",
    "responses_from_tokens": "rollout",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: scoring, which analyses use, needs no trainer, and no seconds of importing one."""
    if name not in _FILES:
        raise AttributeError(f"module 'wpr.ppo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"wpr.ppo.{_FILES[name]}"), name)
    globals()[name] = value
    return value
