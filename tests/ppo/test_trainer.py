"""The trainer's own features, each through a real run of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.ppo import tiny
from wpr import ReverseKL
from wpr.ppo import PPOTrainer
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.collect import Experience
from wpr.ppo.scoring import PositionScorer
from wpr.rewards import FunctionReward, RewardModel

EVERY_STEP = {
    "score", "reward", "penalty", "kl", "kl_sequence", "divergence", "entropy", "response_length", "eos_fraction",
    "clip_fraction", "approx_kl", "explained_variance", "learning_rate", "critic_learning_rate", "beta", "policy_loss",
    "value_loss", "grad_norm", "loss", "seconds_generation", "seconds_scoring", "seconds_penalty", "seconds_reward",
    "seconds_backpropagation", "peak_memory_gb", "empty_responses", "value", "value_clip_fraction",
}  # fmt: skip
SOLVER = {"solver_marginal_error", "solver_iterations", "solver_isolated_fraction", "solver_converged"}


def history(trainer: PPOTrainer) -> list[dict[str, Any]]:
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("regularizer", ["semantic", "paper", "forward-kl"])
def test_metrics_of_every_step(regularizer: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, regularizer=regularizer, max_steps=2)
    trainer.train()
    for row in history(trainer):
        assert set(row) >= EVERY_STEP
        assert all(isinstance(value, int | float) for value in row.values())
        assert (set(row) >= SOLVER) == (regularizer != "forward-kl")
    first = history(trainer)[0]
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the policy starts at the reference
    assert first["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert history(trainer)[1]["kl"] > 1e-6


def test_a_sum_of_regularizers(tmp_path: Path) -> None:
    """What is logged are the parts, and adaptive beta acts on the sum."""
    trainer = tiny.trainer(
        tmp_path,
        regularizer="reverse-kl + 4*semantic",
        max_steps=3,
        target_divergence=0.01,
        target_measure="divergence",
    )
    trainer.train()
    for row in history(trainer):
        parts = row["solver_reverse-kl.divergence"] + 4 * row["solver_semantic.divergence"]
        assert row["divergence"] == pytest.approx(parts, rel=1e-4, abs=1e-6)
        assert row["solver_reverse-kl.divergence"] == pytest.approx(row["kl"], rel=1e-3, abs=1e-5)
    assert trainer.regularizer.geometry.transform.text == "centre/unit"


def test_accumulation_and_minibatches_add_up(tmp_path: Path) -> None:
    """A rollout's one step is the same however it is cut into micro-batches."""
    ends = []
    for size, accumulation in ((16, 1), (4, 4), (2, 8)):
        trainer = tiny.trainer(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=3
        )
        trainer.train()
        ends.append((history(trainer)[-1], trainer.model.state_dict()))
    for row, state in ends[1:]:
        for name in ("score", "kl", "loss", "grad_norm", "policy_loss", "value_loss", "approx_kl"):
            assert row[name] == pytest.approx(ends[0][0][name], abs=1e-4, rel=1e-4)
        for name, tensor in state.items():
            assert torch.allclose(tensor, ends[0][1][name], atol=1e-5)


def test_the_logits_budget_changes_nothing_but_memory(tmp_path: Path) -> None:
    ends = []
    for budget in (1000.0, 0.001):
        trainer = tiny.trainer(tmp_path, regularizer="semantic", logits_memory_mb=budget, max_steps=3)
        seen = []
        hook = trainer.model.policy.lm_head.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(len(output)) if output.ndim == 2 else None
        )
        trainer.train()
        hook.remove()
        ends.append((history(trainer)[-1], max(seen)))
    assert ends[0][1] > ends[1][1] == 1
    for name in ("score", "kl", "divergence", "penalty", "loss"):
        assert ends[0][0][name] == pytest.approx(ends[1][0][name], abs=1e-4)


def test_separate_learning_rates(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, learning_rate=0.0, critic_learning_rate=1e-2, max_steps=4)
    policy = {name: tensor.clone() for name, tensor in trainer.model.policy.state_dict().items()}
    critic = {name: tensor.clone() for name, tensor in trainer.model.critic.state_dict().items()}
    trainer.train()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in trainer.model.policy.state_dict().items())
    assert any(not torch.equal(tensor, critic[name]) for name, tensor in trainer.model.critic.state_dict().items())
    rates = [row["critic_learning_rate"] for row in history(trainer)]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])  # the schedule is the policy's


def test_the_critic_learns(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, lambda prompts, responses, **columns: [float(len(prompt.split())) for prompt in prompts],
        learning_rate=0.0, critic_learning_rate=1e-2, value_clip_range=None, per_device_train_batch_size=32,
        max_steps=80, max_new_tokens=4,
    )  # fmt: skip
    trainer.train()
    assert history(trainer)[0]["explained_variance"] < 0.3
    assert history(trainer)[-1]["explained_variance"] > 0.8


def test_early_stop_leaves_out_the_rest_of_the_rollout(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, ppo_epochs=4, max_steps=8, learning_rate=3e-2, update_kl_limit=1e-3)
    trainer.train()
    rows = history(trainer)
    # The first step of a rollout is on policy; the second has gone too far; the others do nothing.
    for start in (0, 4):
        assert rows[start]["early_stop"] == 0
        assert rows[start + 1]["approx_kl"] > 1e-3
        assert rows[start + 1]["early_stop"] == 1
        assert all(rows[start + i]["grad_norm"] == 0 for i in (2, 3))
        assert all("approx_kl" not in rows[start + i] for i in (2, 3))


def test_scheduled_and_adaptive_beta(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, beta=0.4, beta_schedule="linear", beta_end=0.0, max_steps=4)
    trainer.train()
    assert [row["beta"] for row in history(trainer)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    trainer = tiny.trainer(tmp_path, beta=0.1, target_divergence=1e-4, learning_rate=3e-2, max_steps=6)
    trainer.train()
    betas = [row["beta"] for row in history(trainer)]
    assert betas[1] < betas[0]  # at the reference there is no divergence yet
    assert betas[-1] > betas[2]  # and then too much


def test_adaptive_beta_holds_the_target(tmp_path: Path) -> None:
    """With a reward that pulls for ever, KL settles near its target."""
    trainer = tiny.trainer(
        tmp_path, beta=0.2, target_divergence=0.2, target_measure="kl", learning_rate=2e-3,
        critic_learning_rate=8e-3, lr_scheduler_type="constant", per_device_train_batch_size=32, max_steps=150,
        min_new_tokens=8,
    )  # fmt: skip
    trainer.train()
    late = [row["kl"] for row in history(trainer)[-50:]]
    assert 0.1 < sum(late) / len(late) < 0.4  # a fixed beta of 0.2 ends at 2


def test_scores_are_shaped(tmp_path: Path) -> None:
    def reward(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        return [10.0 + i for i in range(len(responses))]

    trainer = tiny.trainer(tmp_path, reward, missing_eos_penalty=1.0, max_steps=1, stop_token_ids=[1])
    trainer.train()
    row = history(trainer)[0]
    assert row["score_shaped"] == pytest.approx(row["score"] - (1 - row["eos_fraction"]))
    trainer = tiny.trainer(tmp_path, reward, normalize_rewards=True, reward_clip=1.0, max_steps=2)
    trainer.train()
    row = history(trainer)[0]
    assert row["score"] == pytest.approx(13.5)
    assert abs(row["score_shaped"]) < 0.1
    assert trainer.shaping.moments.mean == pytest.approx(13.5)


def test_reward_functions_see_the_columns_and_each_prompts_responses(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], responses: list[str], number: list[int], **columns: Any) -> list[float]:
        seen.update(prompts=prompts, responses=responses, number=number)
        return [0.0] * len(responses)

    trainer = tiny.trainer(tmp_path, reward, responses_per_prompt=4, max_steps=1)
    trainer.train()
    assert seen["prompts"][0] == seen["prompts"][3] != seen["prompts"][4]
    assert [tiny.prompts()[i]["prompt"] for i in seen["number"]] == seen["prompts"]
    assert len(set(seen["responses"])) > 4  # several responses a prompt are different ones


def test_several_rewards(tmp_path: Path) -> None:
    model = RewardModel(tiny.critic(5))
    length = FunctionReward(lambda prompts, responses, **columns: [len(r.split()) for r in responses], "length")
    trainer = tiny.trainer(tmp_path, [(model, 2.0), (length, -0.1), tiny.counts_w7], max_steps=1)
    trainer.train()
    row = history(trainer)[0]
    model_mean, length_mean, w7_mean = (row[f"rewards/{name}/mean"] for name in ("reward_model", "length", "counts_w7"))
    assert row["score"] == pytest.approx(2 * model_mean - 0.1 * length_mean + w7_mean, abs=1e-5)


def test_the_reward_model_scores_the_last_real_token(tmp_path: Path) -> None:
    """Whatever padding is: rows scored in a batch are rows scored alone by the classifier itself."""
    model = tiny.critic(5)
    trainer = tiny.trainer(tmp_path, model, max_steps=1)
    batch = trainer.data_collator(tiny.prompts(8))
    result = trainer.collector.collect(trainer.model, batch, 0, 0)
    assert isinstance(result, Experience)
    assert result.mask.sum(-1).float().std() > 1
    for row in range(8):
        alone = result.input_ids[row : row + 1, result.attention_mask[row].bool()]
        assert float(result.scores[row]) == pytest.approx(float(model(input_ids=alone).logits), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_ratio_is_one_in_bf16_too(temperature: float) -> None:
    """What a slice of bf16 logits measures is what the update computes from the same logits."""
    policy, reference = tiny.policy(0).bfloat16(), tiny.policy(1).bfloat16()
    with torch.no_grad():
        policy.lm_head.weight.mul_(50)
    model = ActorCritic(policy, None)
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 40, (6, 9), generator=generator), torch.ones(6, 5, dtype=torch.bool)
    scorer = PositionScorer(ReverseKL(), reference)
    with torch.no_grad():
        model(ids, torch.ones_like(ids), mask, temperature, scorer=scorer)
    new, _ = model(ids, torch.ones_like(ids), mask, temperature)
    assert torch.allclose(scorer.result().log_prob, new.flatten(), atol=1e-5)
    assert new.min() < -5


def test_log_probs_at_sampling_temperature(tmp_path: Path) -> None:
    """With top_k=0 and logprob_temperature = temperature the old probabilities are those that were sampled from."""
    trainer = tiny.trainer(tmp_path, temperature=0.5, logprob_temperature=0.5, build=sharp, max_steps=2)
    batch = trainer.data_collator(tiny.prompts(8))
    result = trainer.collector.collect(trainer.model, batch, 0, 0)
    assert isinstance(result, Experience)
    row = result.input_ids[1:2, result.attention_mask[1].bool()]
    count = int(result.mask[1].sum())
    logits = trainer.model.policy(input_ids=row).logits[0, -count - 1 : -1] / 0.5
    expected = logits.log_softmax(-1).gather(-1, row[0, -count:, None])[:, 0]
    assert torch.allclose(result.scatter_to_mask(result.measures.log_prob)[1, :count], expected, atol=1e-5)
    trainer.train()
    assert history(trainer)[0]["approx_kl"] == pytest.approx(0, abs=1e-6)


def sharp() -> Any:
    model = tiny.policy()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


def test_best_checkpoint_is_kept_and_loaded(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, parts={"eval_dataset": tiny.prompts(16)}, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, max_steps=4, load_best_model_at_end=True, metric_for_best_model="kl", greater_is_better=False,
        save_total_limit=2,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 1  # the least KL is that of the first step
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.model.policy.state_dict().items())


def test_saved_folders_are_ordinary_models(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "critic")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == tiny.EOS
    for loaded, model in ((policy, trainer.model.policy), (critic, trainer.model.critic)):
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_everything_by_folder_name(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "sft")
    tiny.tokenizer().save_pretrained(tmp_path / "sft")
    tiny.critic().save_pretrained(tmp_path / "rm")
    trainer = PPOTrainer(
        tmp_path / "sft", tiny.settings(tmp_path / "out"), reward=str(tmp_path / "rm"),
        critic=str(tmp_path / "rm"), reference=str(tmp_path / "sft"), train_dataset=tiny.prompts(),
        regularizer="semantic",
    )  # fmt: skip
    trainer.train()
    assert history(trainer)[-1]["kl"] > 0


def test_a_datasets_dataset_of_chats(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in tiny.prompts(16)]
    trainer = tiny.trainer(tmp_path, parts={"train_dataset": datasets.Dataset.from_list(rows)}, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for on in (False, True):
        trainer = tiny.trainer(tmp_path, gradient_checkpointing=on, max_steps=2)
        trainer.train()
        ends.append(trainer.model.state_dict())
    for name, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][name], atol=1e-6)


def test_trackers_get_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "tb")
    try:
        trainer = tiny.trainer(tmp_path, report_to="tensorboard", max_steps=2)
        trainer.train()
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {"train/kl", "train/score", "train/divergence"} <= set(events.Tags()["scalars"])


def test_completions_are_written(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, log_completions=3, log_completions_steps=2, max_steps=3)
    trainer.train()
    files = sorted((tmp_path / "completions").iterdir())
    assert [path.name for path in files] == ["step-000000.jsonl", "step-000002.jsonl"]
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len(rows) == 3
    assert set(rows[0]) == {"step", "prompt", "response", "score", "penalty", "kl", "advantage", "finished"}


def test_an_iterable_dataset_is_refused(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from tiny.prompts()

    with pytest.raises(ValueError, match="without a length"):
        tiny.trainer(tmp_path, parts={"train_dataset": Stream()}).train()


def test_mixed_precision(tmp_path: Path) -> None:
    """bf16 through autocast, in a process of its own: some CPUs need their instruction set limited for it."""
    settings = {"bf16": True, "max_steps": 4, "ppo_epochs": 2}
    command = [sys.executable, "-m", "tests.ppo.run", str(tmp_path), "--settings", json.dumps(settings)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "final_state.json").read_text())["log_history"]
    assert rows[0]["approx_kl"] == pytest.approx(0, abs=1e-9)  # scored as it is trained
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["kl"] > 1e-4
    weights = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights.dtype == torch.float32
