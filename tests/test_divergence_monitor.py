"""Divergences in the log of any Trainer: right numbers, and a training that goes on as if nobody had looked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig
from trl import GRPOTrainer as TRLs

from tests.ppo import tiny as models
from tests.trl import tiny
from wpr import DivergenceMonitor, ReverseKL

TEXTS = ["w3 w4 w5 w6", "w7 w8", "w9 w10 w11"]


def plain(folder: Path, **changes: Any) -> Trainer:
    """Transformers' own, on a few sequences."""
    rows = [{"input_ids": [2, 3 + i, 5, 9], "labels": [2, 3 + i, 5, 9]} for i in range(8)]
    args = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to="none",
        logging_steps=2, save_strategy="no", disable_tqdm=True, **changes,
    )  # fmt: skip
    return Trainer(models.policy(), args, train_dataset=Dataset.from_list(rows), processing_class=models.tokenizer())


def grpo(folder: Path, **changes: Any) -> Any:
    """TRL's own, without any KL."""
    args = GRPOConfig(
        str(folder), beta=0.0, per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=3,
        learning_rate=1e-2, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    return TRLs(
        models.policy(),
        tiny.counts_w7,
        args,
        train_dataset=tiny.prompts(),
        processing_class=models.tokenizer(),
        **changes,
    )


def logged(trainer: Any) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in trainer.state.log_history if "monitor/kl" in row}


def test_texts_in_a_plain_trainer(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    before = models.policy()
    monitor = DivergenceMonitor(
        trainer, TEXTS, ["semantic", "js", "reverse-kl + 4*semantic"], every=2, max_new_tokens=0, batch_size=2,
        memory_mb=0.01,
    )  # fmt: skip
    trainer.add_callback(monitor)
    trainer.train()
    rows = logged(trainer)
    assert list(rows) == [0, 2, 4]
    names = ["kl", "semantic", "js", "reverse-kl + 4*semantic", "sequence_kl"]
    assert all(rows[0][f"monitor/{name}"] == pytest.approx(0, abs=1e-6) for name in names)
    kls = []
    for text in TEXTS:
        ids = torch.tensor([models.tokenizer()(text)["input_ids"]])
        log_p, log_q = (one(ids).logits[0, :-1].double().log_softmax(-1) for one in (trainer.model.eval(), before))
        kls.append((log_p.exp() * (log_p - log_q)).sum(-1).detach())
    assert rows[4]["monitor/kl"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    assert rows[4]["monitor/sequence_kl"] == pytest.approx(sum(float(kl.sum()) for kl in kls) / 3, rel=1e-4)
    assert rows[4]["monitor/kl"] > 1e-3
    both = rows[4]["monitor/kl"] + 4 * rows[4]["monitor/semantic"]
    assert rows[4]["monitor/reverse-kl + 4*semantic"] == pytest.approx(both, rel=1e-4)


def test_completions_at_beta_0_and_a_training_that_is_not_disturbed(tmp_path: Path) -> None:
    alone = grpo(tmp_path / "alone")
    alone.train()
    watched = grpo(tmp_path / "watched")
    watched.add_callback(DivergenceMonitor(watched, TEXTS, [ReverseKL()], every=1, max_new_tokens=5, batch_size=2))
    watched.train()
    for one, other in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    ours = [{k: v for k, v in row.items() if "time" not in k} for row in watched.state.log_history if "loss" in row]
    trls = [{k: v for k, v in row.items() if "time" not in k} for row in alone.state.log_history if "loss" in row]
    assert ours == trls
    rows = logged(watched)
    assert list(rows) == [0, 1, 2, 3]
    assert rows[0]["monitor/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["monitor/kl"] > 1e-5
    assert rows[3]["monitor/reverse-kl"] == pytest.approx(rows[3]["monitor/kl"], rel=1e-5)
    assert 1 < rows[3]["monitor/sequence_kl"] / rows[3]["monitor/kl"] <= 5


def test_an_adapter_needs_no_copy_and_trainers_references_are_used(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = grpo(tmp_path, peft_config=lora)
    monitor = DivergenceMonitor(trainer, TEXTS, every=3, max_new_tokens=4)
    assert monitor.reference is None
    trainer.add_callback(monitor)
    trainer.train()
    assert logged(trainer)[3]["monitor/kl"] > 0
    ours = tiny.trainer(tmp_path)
    assert DivergenceMonitor(ours, TEXTS).reference is ours.reference
    ppo = models.trainer(tmp_path)
    watch = DivergenceMonitor(ppo, [[{"role": "user", "content": "w3 w4"}]], every=2, max_new_tokens=4)
    assert watch.reference is ppo.reference
    ppo.add_callback(watch)
    ppo.train()
    assert [row["step"] for row in ppo.state.log_history if "monitor/kl" in row] == [0, 2, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, r"prompts=\[\] must be a list of prompts"),
        ({"prompts": "w3 w4"}, "prompts='w3 w4' must be a list of prompts"),
        ({"prompts": [[2, 3]]}, "give ids as {'input_ids': ...}"),
        ({"max_new_tokens": 128}, "0 tokens to measure on beside max_new_tokens=128"),
        ({"regularizers": ["js", "js"]}, "have one name twice"),
        ({"reference": "gpt2"}, "reference='gpt2' is a name"),
        ({"every": 0}, "every=0 must be an integer of at least 1"),
        ({"every": 2.5}, "every=2.5 must be an integer of at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be an integer of at least 0"),
        ({"memory_mb": 0.0}, "memory_mb=0.0 must be positive"),
        ({"prompts": ["w3"], "max_new_tokens": 0}, "has 1 tokens to measure on"),
        ({"prompts": [3]}, "neither text nor a list of chat messages"),
        ({"regularizers": ["reverse-lk"]}, "did you mean 'reverse-kl'"),
    ],
)
def test_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DivergenceMonitor(plain(tmp_path), **{"prompts": TEXTS, **settings})


def test_references_that_cannot_be(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    with pytest.raises(ValueError, match="the reference is the model that is trained"):
        DivergenceMonitor(trainer, TEXTS, reference=trainer.model)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())
    with pytest.raises(ValueError, match="a vocabulary of 40 tokens and the reference one of 50"):
        DivergenceMonitor(trainer, TEXTS, reference=models.policy(vocab_size=50))


def test_a_second_training_and_a_model_s_own_ways_of_drawing(tmp_path: Path) -> None:
    """Every training logs its own beginning and end; what the model's generation config asks for is not taken."""
    trainer = plain(tmp_path)
    monitor = DivergenceMonitor(trainer, TEXTS, every=3, max_new_tokens=6)
    before = monitor.measure()
    trainer.model.generation_config.update(repetition_penalty=50.0, num_beams=3)
    assert monitor.measure() == before
    trainer.add_callback(monitor)
    trainer.train()
    trainer.train()
    steps = [row["step"] for row in trainer.state.log_history if "monitor/kl" in row]
    assert steps[-3:] == [0, 3, 4]
    assert trainer.model.generation_config.num_beams == 3
