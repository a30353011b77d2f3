"""Both trainers in both forms: steps with padding, metrics, evaluation, adapters, old policies, temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.ppo import tiny as models
from tests.trl import tiny
from wpr.language_models import as_reference
from wpr.ppo import TransformersGeneration

NAMES = ["divergence", "reverse-kl", "semantic"]
BOTH = [(algorithm, form) for algorithm in ("grpo", "rloo") for form in ("reward", "loss")]


def short_completions() -> Any:
    """A policy that often ends early."""
    model = models.policy(4)
    with torch.no_grad():
        model.lm_head.weight[models.EOS] = model.lm_head.weight[3:].mean(0) + 0.1
    return model


@pytest.mark.parametrize(("algorithm", "form"), BOTH)
def test_steps_and_metrics(algorithm: str, form: str, tmp_path: Path) -> None:
    """Two optimizer steps of two batches each, with old policies, then an evaluation."""
    model = short_completions()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    prompts = tiny.prompts()
    trainer = tiny.trainer(
        tmp_path, algorithm, model, {"regularizer_in": form, "regularizer_beta": 0.2, "eval_dataset": prompts},
        gradient_accumulation_steps=2, steps_per_generation=2, num_iterations=2, max_steps=4, max_completion_length=10,
        per_device_eval_batch_size=4, num_generations_eval=2, eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert len(steps) == 4
    assert steps[0]["completions/min_length"] < steps[0]["completions/max_length"]
    logged = [row for row in steps if "regularizer/divergence" in row]
    assert len(logged) == (4 if form == "loss" else 2)  # the reward form measures where completions are made
    assert logged[0]["regularizer/divergence"] == pytest.approx(0, abs=1e-6)
    last = logged[-1]
    assert last["regularizer/reverse-kl"] > 1e-6
    assert last["regularizer/divergence"] == pytest.approx(
        last["regularizer/reverse-kl"] + 4 * last["regularizer/semantic"], rel=1e-4
    )
    evaluated = next(row for row in trainer.state.log_history if "eval_loss" in row)
    assert all(evaluated[f"eval_regularizer/{name}"] > 0 for name in NAMES)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.reference.parameters(), strict=True))


class Kept(TransformersGeneration):
    """Keeps what it was asked and what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[Any, Any, Any]] = []

    def generate(self, policy: Any, prompts: Any, sampling: Any, seeds: Any) -> Any:
        assert not policy.training
        found = super().generate(policy, prompts, sampling, seeds)
        self.drawn.append((sampling, seeds, found))
        return found


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_completions_of_another_back_end(algorithm: str, tmp_path: Path) -> None:
    settings = {"temperature": 0.9, "top_k": 12, "generation_kwargs": {"min_new_tokens": 2}}
    runs = []
    for folder in ("one", "two"):
        kept = Kept()
        trainer = tiny.trainer(tmp_path / folder, algorithm, short_completions(), {"generation": kept}, **settings)
        batches: list[Any] = []
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda rows, score=score, to=batches: to.append(score(rows)) or to[-1]
        trainer.train()
        runs.append(kept.drawn)
        for (sampling, seeds, found), batch in zip(kept.drawn, batches, strict=True):
            assert (sampling.temperature, sampling.top_k, sampling.min_new_tokens) == (0.9, 12, 2)
            assert (sampling.max_new_tokens, sampling.eos) == (6, (models.EOS,))
            assert len(set(seeds)) == 8
            assert torch.equal(batch["completion_ids"][batch["completion_mask"].bool()], found.tokens[found.mask])
    assert len(runs[0]) == 2
    assert [seeds for _, seeds, _ in runs[0]] == [seeds for _, seeds, _ in runs[1]]
    assert runs[0][0][1] != runs[0][1][1]


@pytest.mark.parametrize("form", ["reward", "loss"])
def test_a_strong_penalty_holds_the_policy(form: str, tmp_path: Path) -> None:
    """The sign: with a large beta the policy stays nearer to its reference than with none."""
    ends = []
    for beta in (0.0, 2.0):
        parts = {"regularizer": "reverse-kl", "regularizer_in": form, "regularizer_beta": beta}
        trainer = tiny.trainer(tmp_path, "grpo", None, parts, max_steps=12, per_device_train_batch_size=32)
        trainer.train()
        logged = [row["regularizer/divergence"] for row in trainer.state.log_history if "regularizer/divergence" in row]
        ends.append(logged[-1])
    print(f"{form}: divergence {ends[0]:.4f} without, {ends[1]:.4f} with the penalty")
    assert ends[1] < 0.7 * ends[0]


@pytest.mark.parametrize(("algorithm", "form"), BOTH)
def test_lora_holds_one_copy_of_the_base(algorithm: str, form: str, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = tiny.trainer(
        tmp_path, algorithm, None, {"peft_config": lora, "regularizer_in": form, "regularizer_beta": 0.2}
    )
    base = {name: weight.clone() for name, weight in trainer.model.state_dict().items() if "lora" not in name}
    trainer.train()
    assert trainer.reference is None
    held = [module for module in vars(trainer).values() if isinstance(module, torch.nn.Module)]
    assert {id(p) for module in held for p in module.parameters()} == {id(p) for p in trainer.model.parameters()}
    embeddings = trainer.model.get_input_embeddings().weight
    assert trainer.regularizer.geometry is not None
    after = trainer.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in base.items())
    assert embeddings.shape[0] == trainer.regularizer.geometry.vocabulary
    assert trainer.state.log_history[1]["regularizer/divergence"] > 0
    assert all(p.requires_grad == ("lora" in name) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(("algorithm", "form"), BOTH)
def test_an_adapter_that_was_trained_before_is_the_reference(algorithm: str, form: str, tmp_path: Path) -> None:
    """A copy of it is kept, as TRL does: the divergence starts at 0 although the adapter changes the base model."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = tiny.trainer(tmp_path, algorithm, get_peft_model(models.policy(), lora), {"regularizer_in": form})
    kept = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if ".ref." in name}
    ids = torch.tensor([[models.BOS, 5, 6]])
    with torch.no_grad(), trainer.model.disable_adapter():
        plain = trainer.model(ids).logits
    with torch.no_grad(), as_reference(trainer.model, None) as reference:
        assert (reference(ids).logits - plain).abs().max() > 1e-3
    assert trainer.model.active_adapter == "default"
    trainer.train()
    divergences = [row["regularizer/divergence"] for row in trainer.state.log_history if "loss" in row]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[1] > 1e-7
    assert kept
    assert all(torch.equal(weight, trainer.model.get_parameter(name)) for name, weight in kept.items())


def test_penalties_are_of_the_distributions_at_the_temperature(tmp_path: Path) -> None:
    parts = {"regularizer": "reverse-kl", "regularizer_beta": 0.1}
    trainer = tiny.trainer(tmp_path, "grpo", None, parts, temperature=0.5)
    tiny.moved(trainer.model)
    batch = tiny.batch_of(trainer)
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    sequences = torch.cat([batch["prompt_ids"], ids], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    ratios = {}
    for temperature in (0.5, 1.0):
        logs = [
            (model(input_ids=sequences, attention_mask=attention).logits[:, -ids.shape[1] - 1 : -1] / temperature)
            .log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            for model in (trainer.model, trainer.reference)
        ]  # fmt: skip
        ratios[temperature] = (logs[0] - logs[1])[mask].detach()
    penalty = trainer._penalties(batch, mask, "train")[0][mask]
    torch.testing.assert_close(penalty, ratios[0.5], rtol=1e-4, atol=1e-5)
    assert (penalty - ratios[1.0]).abs().max() > 0.01


def test_the_reference_computes_by_its_own_weights(tmp_path: Path) -> None:
    """TRL replaces forward methods by functions that hold on to the policy, of which a copy must be free."""
    trainer = tiny.trainer(tmp_path, "grpo", None, cast_lm_head_to_fp32=True)
    ids = torch.tensor([[models.BOS, 5, 6]])
    with torch.no_grad():
        before = trainer.reference(ids).logits
        tiny.moved(trainer.model)
        assert torch.equal(trainer.reference(ids).logits, before)
        assert not torch.allclose(trainer.model(ids).logits, before)


def test_dropout_is_off_where_the_reward_form_measures(tmp_path: Path) -> None:
    parts = {"regularizer": "reverse-kl", "regularizer_beta": 0.1}
    trainer = tiny.trainer(tmp_path, "grpo", models.policy(attention_dropout=0.5), parts)
    batch = tiny.batch_of(trainer)
    assert trainer.model.training
    assert trainer._penalties(batch, batch["completion_mask"].bool(), "train")[0].abs().max() < 1e-5


def test_one_ratio_per_sequence(tmp_path: Path) -> None:
    """GSPO's tokens share one advantage; the sum of the penalties is in it."""
    parts = {"regularizer": "reverse-kl", "regularizer_beta": 0.5}
    trainer = tiny.trainer(
        tmp_path, "grpo", None, parts, importance_sampling_level="sequence", scale_rewards="none",
        loss_type="grpo",
    )  # fmt: skip
    tiny.moved(trainer.model)
    batch = tiny.batch_of(trainer)
    penalty = trainer._penalties(batch, batch["completion_mask"].bool(), "train")[0].sum(-1).view(-1, 4)
    words = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(tiny.counts_w7(words)).view(-1, 4)
    total = rewards - 0.5 * penalty
    torch.testing.assert_close(batch["advantages"], (total - total.mean(-1, keepdim=True)).flatten(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["reward", "loss"])
def test_bf16(form: str, tmp_path: Path) -> None:
    """Heads run in the precision of TRL's own."""
    trainer = tiny.trainer(
        tmp_path, parts={"regularizer": "reverse-kl", "regularizer_in": form}, bf16=True, max_steps=3
    )
    trainer.train()
    logged = [row["regularizer/divergence"] for row in trainer.state.log_history if "loss" in row]
    assert logged[0] == pytest.approx(0, abs=1e-5)
    assert 1e-5 < logged[2] < 1


@pytest.mark.parametrize(("algorithm", "form"), BOTH)
def test_exact_divergences_beside_trls_own_kl(algorithm: str, form: str, tmp_path: Path) -> None:
    """TRL's KL trains, the regularizer is only logged; both have one reference."""
    parts = {"regularizer": "reverse-kl", "regularizer_in": form, "regularizer_beta": 0.0}
    models.policy().save_pretrained(tmp_path / "model")  # TRL loads its reference by name
    trainer = tiny.trainer(tmp_path, algorithm, str(tmp_path / "model"), parts, beta=0.04, max_steps=3)
    assert trainer.reference is trainer.accelerator.unwrap_model(trainer.ref_model)
    trainer.train()
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert last["kl"] != 0
    assert last["regularizer/divergence"] > 1e-5
