"""Injected faults: each ends as documented, and nothing that was there is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo import TrainingFault
from wpr.ppo.generation import TransformersGeneration
from wpr.ppo.rollout import Responses


class BadFrom:
    """A reward that is good until its n-th call, and then does something."""

    def __init__(self, calls: int, action: Any, once: bool = False) -> None:
        self.calls, self.action, self.once = calls, action, once
        self.__name__ = "bad_from"

    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        self.calls -= 1
        if self.calls < 0 and not (self.once and self.calls < -1):
            return self.action(responses)
        return tiny.counts_w7(prompts, responses)


def not_a_number(responses: list[str]) -> list[float]:
    return [0.0, 0.0, float("nan")] + [0.0] * (len(responses) - 3)


def raises(responses: list[str]) -> list[float]:
    raise KeyError("no such column")


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def fault_file(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "faults").iterdir()
    return json.loads(path.read_text())


@pytest.mark.parametrize(("action", "kind"), [(not_a_number, "score"), (raises, "reward")])
def test_a_bad_reward_stops_training_with_the_last_checkpoint_intact(action, kind: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, BadFrom(3, action), max_steps=8, save_strategy="steps", save_steps=2)
    with pytest.raises(TrainingFault, match="No step was taken") as caught:
        trainer.train()
    found = fault_file(tmp_path)
    assert found["step"] == 3
    assert found["kind"] == kind
    assert found["prompt"].startswith("w")
    if kind == "score":
        assert found["row"] == 2
        assert found["values"] == {"score": "nan"}
    else:
        assert "'bad_from' raised KeyError: 'no such column'" in found["message"]
        assert 'raise KeyError("no such column")' in found["values"]["traceback"]
    assert str(caught.value.path) in str(caught.value)
    # The checkpoint is whole, and training goes on from it once the cause is fixed.
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())
    again = tiny.trainer(tmp_path, max_steps=8, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    assert again.state.log_history[0]["step"] == 1


def test_a_bad_rollout_can_be_left_out(tmp_path: Path) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}

    class Keep(tiny.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            kept[state.global_step] = weights(model)

    trainer = tiny.trainer(
        tmp_path, BadFrom(1, not_a_number, once=True), max_steps=8, ppo_epochs=2, max_skipped_rollouts=1,
        weight_decay=0.1, parts={"callbacks": [Keep()]},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 8
    assert same(kept[2], kept[3])  # the second rollout's two steps change nothing,
    assert same(kept[3], kept[4])  # not even through momentum or weight decay
    assert not same(kept[4], kept[5])
    assert sum(row.get("skipped_rollouts", 0) for row in trainer.state.log_history) == 1


def test_the_number_left_out_is_limited(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, BadFrom(1, not_a_number), max_steps=8, max_skipped_rollouts=2)
    with pytest.raises(TrainingFault, match=r"max_skipped_rollouts \(now 2\)"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert len(list((tmp_path / "faults").iterdir())) == 3


class PoisonHead(tiny.TrainerCallback):
    """Puts +inf into one row of the policy's head after some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                model.policy.lm_head.weight[7] = torch.inf


def test_infinite_logits_stop_training(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, max_steps=8, save_strategy="steps", save_steps=2, parts={"callbacks": [PoisonHead(3)]}
    )
    with pytest.raises(TrainingFault):
        trainer.train()
    found = fault_file(tmp_path)
    assert found["kind"] == "policy logits"
    assert found["position"] == 0
    again = tiny.trainer(tmp_path, max_steps=8, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert all(tensor.isfinite().all() for tensor in again.model.state_dict().values())


def test_infinite_reference_logits_are_found_in_the_penalty(tmp_path: Path) -> None:
    reference = tiny.policy()
    with torch.no_grad():
        reference.model.embed_tokens.weight[7] = torch.nan
    trainer = tiny.trainer(tmp_path, max_steps=8, parts={"reference": reference})
    with pytest.raises(TrainingFault, match="reference's logits are not a distribution"):
        trainer.train()
    found = fault_file(tmp_path)
    assert found["kind"] == "reference logits"
    assert "w7" in (found["prompt"] + " " + found["response"]).split()
    assert found["values"]["nan"] == tiny.TOKENS


def test_an_infinite_penalty_is_told_with_its_token(tmp_path: Path) -> None:
    """The reference gives some tokens no probability at all; reverse KL is infinite there."""
    reference = tiny.policy()
    mask = torch.zeros(tiny.TOKENS)
    mask[10:20] = -torch.inf
    reference.lm_head.bias = torch.nn.Parameter(mask)
    trainer = tiny.trainer(tmp_path, target_divergence=0.1, normalize_rewards=True, parts={"reference": reference})
    with pytest.raises(TrainingFault, match="the penalty is inf at token"):
        trainer.train()
    found = fault_file(tmp_path)
    assert found["kind"] == "penalty"
    assert found["response"].split()[found["position"]] in {f"w{i}" for i in range(10, 20)}
    assert trainer.beta.beta(0.0) == trainer.args.beta  # nothing was learned from it
    assert trainer.shaping.moments.count == 0


def test_a_gradient_that_is_not_finite_names_whose_it_is(tmp_path: Path) -> None:
    """As an attention kernel's backward pass can give, while the loss is fine."""
    trainer = tiny.trainer(tmp_path, max_steps=8)
    before = weights(trainer.model)
    trainer.model.policy.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(TrainingFault, match=r"norm is nan \(policy nan, critic [0-9.e-]+\), from a finite loss"):
        trainer.train()
    found = fault_file(tmp_path)
    assert (found["kind"], found["step"]) == ("gradient", 0)
    assert found["values"]["policy"] == "nan"
    assert found["values"]["critic"] > 0
    assert same(before, trainer.model.state_dict())


def test_a_loss_that_is_not_finite_is_refused_before_the_step(tmp_path: Path) -> None:
    class PoisonAfterCollecting(tiny.TrainerCallback):
        """In the middle of a rollout: the next update meets it in the loss."""

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                with torch.no_grad():
                    model.critic.score.weight[0, 0] = torch.nan

    trainer = tiny.trainer(
        tmp_path, max_steps=8, ppo_epochs=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
        parts={"callbacks": [PoisonAfterCollecting()]},
    )  # fmt: skip
    with pytest.raises(TrainingFault, match="the loss is not finite"):
        trainer.train()
    found = fault_file(tmp_path)
    assert (found["kind"], found["step"]) == ("loss", 3)
    assert found["values"]["value"] == "nan"
    assert all(tensor.isfinite().all() for tensor in trainer.model.policy.state_dict().values())


class Scripted:
    """A generation back end whose first responses are prescribed: empty, nothing but padding, ended at once."""

    def generate(self, policy, prompts, sampling, seeds) -> Responses:
        made = TransformersGeneration().generate(policy, prompts, sampling, seeds)
        tokens, mask, finished = made.tokens.clone(), made.mask.clone(), made.finished.clone()
        mask[0] = False  # empty
        tokens[1], mask[1], finished[1] = tiny.PAD, True, False  # all padding tokens, as sampled
        mask[2], finished[2] = False, True
        tokens[2, 0], mask[2, 0] = tiny.EOS, True  # ended at once
        return Responses(tokens, mask, finished)


@pytest.mark.parametrize("regularizer", ["reverse-kl", "semantic"])
def test_empty_and_all_padding_responses(regularizer: str, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def reward(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        seen.append(responses)
        return [1.0] * len(responses)

    trainer = tiny.trainer(
        tmp_path, reward, regularizer, parts={"generation": Scripted()}, missing_eos_penalty=0.5, max_steps=3
    )
    trainer.train()
    assert seen[0][0] == seen[0][2] == ""
    row = trainer.state.log_history[0]
    assert row["empty_responses"] == 1 / 8
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())


def test_all_responses_empty(tmp_path: Path) -> None:
    class Silent(Scripted):
        def generate(self, *args) -> Responses:
            made = super().generate(*args)
            return Responses(made.tokens, made.mask & False, made.finished)

    trainer = tiny.trainer(tmp_path, regularizer="semantic", parts={"generation": Silent()}, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["response_length"] == 0
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())


def test_wrong_numbers_of_scores_are_named(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, lambda prompts, responses, **columns: [1.0])
    with pytest.raises(TrainingFault, match="returned 1 scores for 8 responses"):
        trainer.train()
