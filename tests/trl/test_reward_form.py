"""Penalties in the reward: the gradient that TRL then follows in expectation, and where it ends.

A bandit: prompts are the beginning of sequence, completions one token of twelve. `generate` is replaced by a list of
tokens that are weighted by their probability afterwards, so that expectations are exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.special import softmax

from tests.ppo import tiny as models
from tests.ppo.test_optimum import bandit_policy
from tests.problems import clustered_embeddings
from tests.reference import newton
from tests.regularizers.test_f_divergences import GENERATORS
from tests.regularizers.test_optimum import distance, solve
from tests.trl import tiny
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.ppo.advantages import beyond_the_others
from wpr.trl import GRPOTrainer

WORDS, BETA, LAM, RHO = 12, 0.8, 5.0, 2.0
EMBEDDINGS = clustered_embeddings(words=4, per_word=3, size=16, spread=0.4)
GEOMETRY = TokenGeometry.from_embeddings(EMBEDDINGS, neighbours=4)
TRANSPORT = Wasserstein(GEOMETRY, "unbalanced", k2=WORDS, lam=LAM, rho=RHO)
RNG = np.random.default_rng(0)
REWARDS, REFERENCE = RNG.standard_normal(WORDS), softmax(RNG.standard_normal(WORDS))


def bandit(
    folder: Path, tokens: list[int], algorithm: str = "grpo", regularizer: Any = "reverse-kl", **changes: Any
) -> Any:
    """A trainer whose completions are these tokens."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(REWARDS[ids[0]]) for ids in completion_ids]

    scale = {"grpo": {"scale_rewards": "none"}, "rloo": {}}[algorithm]
    trainer = tiny.trainer(
        folder, algorithm, bandit_policy(REFERENCE, EMBEDDINGS),
        parts={
            "reward_funcs": reward, "regularizer": regularizer, "regularizer_beta": BETA,
            "train_dataset": Dataset.from_list([{"prompt": "<s>"}]),
        },
        **{
            "per_device_train_batch_size": len(tokens), "num_generations": len(tokens), "max_completion_length": 1,
            "logging_steps": 1000, **scale, **changes,
        },
    )  # fmt: skip
    drawn = torch.tensor(tokens).unsqueeze(-1)
    trainer.model.generate = lambda input_ids, **options: torch.cat([input_ids, drawn], -1)
    return trainer


def probabilities(model: Any) -> torch.Tensor:
    return model(torch.tensor([[models.BOS]])).logits[0, -1].double().softmax(-1)


def kl(p: torch.Tensor) -> torch.Tensor:
    q = torch.tensor(REFERENCE)
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize(("algorithm", "factor"), [("grpo", 0.5), ("rloo", 1.0)])
def test_the_expected_gradient_is_exact(algorithm: str, factor: float, tmp_path: Path) -> None:
    """All pairs of tokens as groups of two, each as often as it is drawn. TRL's own baseline halves GRPO's gradient of
    the reward; with the penalty's, all of it is halved, and the balance of the two is right.
    """
    pairs = [(a, b) for a in range(WORDS) for b in range(WORDS)]
    trainer = bandit(tmp_path, [token for pair in pairs for token in pair], algorithm, num_generations=2)
    model = trainer.model
    tiny.moved(model.lm_head, by=0.3)
    model.train()
    p = probabilities(model)
    batch = trainer._generate_and_score_completions([{"prompt": "<s>"}] * (2 * len(pairs)))
    weights = torch.stack([p[a] * p[b] for a, b in pairs]).repeat_interleave(2).detach().float() * len(pairs)
    shape = (-1,) if algorithm == "rloo" else (-1, 1)
    batch["advantages"] = batch["advantages"] * weights.view(shape)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(model, batch)
    found = torch.autograd.grad(-loss, model.lm_head.weight)[0]
    p = probabilities(model)
    exact = torch.autograd.grad((p * torch.tensor(REWARDS)).sum() - BETA * kl(p), model.lm_head.weight)[0]
    assert exact.norm() > 0.1
    assert (found - factor * exact).norm() < 1e-5 * exact.norm()


class Weighted(GRPOTrainer):
    """Completions are every token once; each counts as often as the policy draws it."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            p = probabilities(self.model)[batch["completion_ids"]].float()
        batch["advantages"] = batch["advantages"] * p * WORDS
        return batch


def transport_divergence(p: np.ndarray) -> float:
    """Debiased, up to the reference's own transport, which is a constant."""
    value = newton.unbalanced(p, REFERENCE, COST, LAM, RHO)[-1]
    return value - newton.unbalanced(p, p, COST, LAM, RHO)[-1] / 2


COST = GEOMETRY.cost(torch.arange(WORDS).unsqueeze(0))[0].double().numpy()
F = {name: (lambda p, f=f: float(REFERENCE @ f(p / REFERENCE))) for name, f in GENERATORS.items()}
OPTIMA: dict[str, tuple[Any, Any]] = {
    "reverse-kl": (ReverseKL(), F["reverse-kl"]),
    "chi-squared": (make_regularizer("chi-squared"), F["chi-squared"]),
    "unbalanced": (TRANSPORT, transport_divergence),
    "sum": (ReverseKL() + 2 * TRANSPORT, lambda p: F["reverse-kl"](p) + 2 * transport_divergence(p)),
}


@pytest.mark.parametrize("name", OPTIMA)
def test_training_ends_at_the_regularized_optimum(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regularizer, divergence = OPTIMA[name]
    monkeypatch.setitem(tiny.TRAINERS, "grpo", (Weighted, tiny.TRAINERS["grpo"][1]))
    steps = {"max_steps": 100, "learning_rate": 3e-2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.0}
    trainer = bandit(tmp_path, list(range(WORDS)), regularizer=regularizer, shuffle_dataset=False, **steps)
    trainer.train()
    optimum = solve(divergence, REWARDS, BETA, REFERENCE)
    reached = probabilities(trainer.model).detach().numpy()
    print(f"{name}: {distance(optimum, REFERENCE):.3f} to go, {distance(reached, optimum):.5f} from the optimum")
    assert distance(optimum, REFERENCE) > 0.15
    assert distance(reached, optimum) < 0.005


@pytest.mark.parametrize("future", ["divergence", "penalty"])
def test_a_token_pays_for_its_future(future: str, tmp_path: Path) -> None:
    """Advantages of a real batch, against the definition, in loops."""
    parts = {"regularizer": "reverse-kl", "regularizer_beta": 0.7, "regularizer_future": future}
    trainer = tiny.trainer(
        tmp_path, model=models.policy(4), parts=parts,
        scale_rewards="none", max_completion_length=12, num_generations=4,
    )  # fmt: skip
    tiny.moved(trainer.model)
    with torch.no_grad():
        trainer.model.lm_head.weight[models.EOS] += 0.5  # completions of different lengths
    torch.manual_seed(1)
    batch = tiny.batch_of(trainer)
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    sequences = torch.cat([batch["prompt_ids"], ids], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logs = [m(input_ids=sequences, attention_mask=attention).logits[:, -ids.shape[1] - 1 : -1].log_softmax(-1)
                for m in (trainer.model, trainer.reference)]  # fmt: skip
    penalty = (logs[0] - logs[1]).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1) * mask
    later = divergence if future == "divergence" else penalty
    rewards = torch.tensor(tiny.counts_w7(trainer.processing_class.batch_decode(ids, skip_special_tokens=True)))
    assert len(set(mask.sum(-1).tolist())) > 2
    for row in range(len(ids)):
        group = range(row // 4 * 4, row // 4 * 4 + 4)
        for position in range(ids.shape[1]):
            if not mask[row, position]:
                continue
            costs = {one: penalty[one, position] + later[one, position + 1 :].sum() for one in group}
            own, others = costs[row], [costs[one] for one in group if one != row and mask[one, position]]
            baseline = sum(others) / len(others) if others else 0.0
            expected = rewards[row] - rewards[list(group)].mean() - 0.7 * 0.75 * (own - baseline)
            assert batch["advantages"][row, position] == pytest.approx(float(expected), abs=2e-5)


def test_tools_tokens_are_not_the_policys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny.trainer(tmp_path, parts={"regularizer": "reverse-kl", "regularizer_beta": 1.0})
    tiny.moved(trainer.model)
    batch = tiny.batch_of(trainer)
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 2] = 0
    given = batch | {"advantages": torch.zeros(len(batch["completion_ids"]))}
    monkeypatch.setattr(tiny.trls(trainer), "_generate_and_score_completions", lambda *_: dict(given))
    seen = []
    monkeypatch.setattr(trainer, "_log_means", lambda names, values, mode: seen.append(values.shape[-1]))
    advantages = trainer._generate_and_score_completions([])["advantages"]
    assert seen == [int((batch["completion_mask"] * batch["tool_mask"]).sum())]
    assert (advantages[:, 2] == 0).all()
    assert (advantages[:, 1] != 0).any()


def test_the_others_mean() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, 7.0], [6.0, 9.0], [0.0, 1.0], [1.0, 2.0], [2.0, 3.0]])
    present = torch.tensor([[1.0, 1], [1, 0], [1, 1], [1, 1], [1, 0], [1, 0]])
    expected = torch.tensor([[1 - 4, 5 - 9], [2 - 3.5, 0], [6 - 1.5, 9 - 5], [0 - 1.5, 1], [1 - 1, 0], [2 - 0.5, 0]])
    assert torch.equal(beyond_the_others(values, present, 3), expected)
