"""Where training ends: the regularized optimum that a convex solver finds, through the whole trainer.

The policy is a tiny Llama whose distribution after one token is the bandit's reference; a response is one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ppo import tiny
from tests.problems import clustered_embeddings
from tests.reference import newton
from tests.regularizers.test_optimum import bandit, distance, f_divergence_optimum, solve
from wpr import TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import Regularizer
from wpr.rewards import Completions

SIZES = {"hidden_size": 16, "intermediate_size": 32}
BETA = 0.5


def bandit_policy(reference: np.ndarray, embeddings: torch.Tensor) -> Any:
    """A policy that gives the reference distribution after the beginning of sequence, with these input embeddings."""
    model = tiny.policy(vocab_size=len(reference), **SIZES)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        state = model.model(torch.tensor([[tiny.BOS]])).last_hidden_state[0, -1]
        logits = torch.tensor(np.log(reference), dtype=torch.float32)
        model.lm_head.weight.copy_(torch.outer(logits, state) / state.square().sum())
    return model


class TableReward:
    """The reward of the one token of the response."""

    name = "table"

    def __init__(self, rewards: np.ndarray) -> None:
        self.rewards = torch.tensor(rewards, dtype=torch.float32)

    def __call__(self, completions: Completions) -> torch.Tensor:
        return self.rewards[completions.input_ids[:, -1]]


def train_bandit(
    folder: Path, policy: Any, rewards: np.ndarray, regularizer: Regularizer, **changes: Any
) -> np.ndarray:
    """The distribution that PPO ends with."""
    trainer = tiny.trainer(
        folder, TableReward(rewards), regularizer, lambda: policy,
        parts={"train_dataset": [{"input_ids": [tiny.BOS]}], "critic": tiny.critic(**SIZES)},
        **{
            "per_device_train_batch_size": 256, "responses_per_prompt": 256, "max_new_tokens": 1, "max_steps": 100,
            "learning_rate": 1e-2, "critic_learning_rate": 1e-2, "value_clip_range": None, "beta": BETA,
            "stop_token_ids": [], "whiten_advantages": False, "logging_steps": 50, **changes,
        },
    )  # fmt: skip
    trainer.train()
    with torch.no_grad():
        logits = trainer.model.policy(torch.tensor([[tiny.BOS]])).logits[0, -1]
    return logits.double().softmax(-1).numpy()


EMBEDDINGS = clustered_embeddings(words=10, per_word=4, size=16, spread=0.4)


@pytest.mark.parametrize("name", ["reverse-kl", pytest.param("forward-kl", marks=pytest.mark.slow), "chi-squared"])
def test_f_divergences_end_at_their_optimum(name: str, tmp_path: Path) -> None:
    rewards, reference = bandit()
    optimum = f_divergence_optimum(name, rewards, reference, BETA)
    policy = bandit_policy(reference, EMBEDDINGS)
    reached = train_bandit(tmp_path, policy, rewards, make_regularizer(name))
    assert distance(optimum, reference) > 0.3  # there is a way to go
    assert distance(reached, optimum) < 0.05


def test_the_papers_estimator_ends_elsewhere(tmp_path: Path) -> None:
    rewards, reference = bandit()
    optimum = f_divergence_optimum("chi-squared", rewards, reference, BETA)
    regularizer = make_regularizer("chi-squared", estimator="paper")
    reached = train_bandit(tmp_path, bandit_policy(reference, EMBEDDINGS), rewards, regularizer)
    assert distance(reached, optimum) > 0.1


@pytest.mark.slow
def test_semantic_ends_at_its_optimum(tmp_path: Path) -> None:
    """Minutes under load, most of them in the solver that it is compared with. That the penalty leads to this optimum
    is tested without a trainer in tests/regularizers/test_optimum.py; that PPO follows it, below.
    """
    rewards, reference = bandit()
    lam, rho = 5.0, 2.0
    geometry = TokenGeometry.from_embeddings(EMBEDDINGS, neighbours=6)
    cost = geometry.cost(torch.arange(tiny.TOKENS).unsqueeze(0))[0].double().numpy()
    cross = own = newton.unbalanced(reference, reference, cost, lam, rho)[:2]

    def divergence(p: np.ndarray) -> float:
        nonlocal cross, own
        *cross, value = newton.unbalanced(p, reference, cost, lam, rho, cross)
        *own, own_value = newton.unbalanced(p, p, cost, lam, rho, own)
        return value - own_value / 2

    optimum = solve(divergence, rewards, BETA, reference)
    regularizer = Wasserstein(geometry, "unbalanced", k2=tiny.TOKENS, lam=lam, rho=rho)
    reached = train_bandit(tmp_path, bandit_policy(reference, EMBEDDINGS), rewards, regularizer)
    assert distance(optimum, reference) > 0.3
    assert distance(reached, optimum) < 0.05


MODE, NEAR, FAR = 5, 6, 30


@pytest.mark.parametrize("name", ["semantic", "reverse-kl"])
def test_near_and_far_targets(name: str, tmp_path: Path) -> None:
    """Two tokens with reward 1 and equal reference probability; one has an embedding close to the reference's mode."""
    generator = torch.Generator().manual_seed(7)
    embeddings = torch.randn(tiny.TOKENS, SIZES["hidden_size"], generator=generator)
    embeddings[NEAR] = embeddings[MODE] + 0.25 * torch.randn(SIZES["hidden_size"], generator=generator)
    reference = np.full(tiny.TOKENS, 0.6 / (tiny.TOKENS - 1))
    reference[MODE] = 0.4
    rewards = np.zeros(tiny.TOKENS)
    rewards[[NEAR, FAR]] = 1
    geometry = TokenGeometry.from_embeddings(embeddings, neighbours=16)
    regularizer = Wasserstein(geometry, "unbalanced", k2=tiny.TOKENS) if name == "semantic" else make_regularizer(name)
    reached = train_bandit(tmp_path, bandit_policy(reference, embeddings), rewards, regularizer, beta=0.3)
    assert reached[NEAR] + reached[FAR] > 0.4  # both runs do go for the reward
    if name == "semantic":
        assert reached[NEAR] > 2 * reached[FAR]
    else:
        assert reached[NEAR] == pytest.approx(reached[FAR], rel=0.05)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_sequence_task_improves(seed: int, tmp_path: Path) -> None:
    """Responses of 8 words, one point for each w7: from about 0.2 to at least 4 of 8 within 60 rollouts."""
    trainer = tiny.trainer(
        tmp_path, regularizer="reverse-kl", build=lambda: tiny.policy(seed), seed=seed, beta=0.05,
        per_device_train_batch_size=32, max_steps=60, learning_rate=8e-3, critic_learning_rate=8e-3,
        parts={"critic": tiny.critic(seed + 10)}, min_new_tokens=8,
    )  # fmt: skip
    trainer.train()
    scores = [row["score"] for row in trainer.state.log_history if "score" in row]
    assert np.mean(scores[:3]) < 0.6
    assert np.mean(scores[-5:]) > 4
