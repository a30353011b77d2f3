"""LoRA policies: the reference is the policy with its adapter off, and nothing is held twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo import PPOTrainer

peft = pytest.importorskip("peft")

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")


def lora_trainer(folder: Path, **changes) -> PPOTrainer:
    settings = {"share_backbone": True, "learning_rate": 1e-2, "max_steps": 4, **changes}
    return tiny.trainer(folder, regularizer="semantic", parts={"peft_config": LORA}, **settings)


def test_the_reference_is_the_policy_without_its_adapter(tmp_path: Path) -> None:
    trainer = lora_trainer(tmp_path)
    assert trainer.reference is None
    trainer.train()
    rows = [row for row in trainer.state.log_history if "kl" in row]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl"] > 1e-5
    # The same KL against the base model itself.
    base = tiny.policy()
    ids = torch.tensor([[2, 5, 6]])
    with torch.no_grad(), trainer.model.policy.disable_adapter():
        assert torch.allclose(trainer.model.policy(ids).logits, base(ids).logits)
    with torch.no_grad():
        assert not torch.allclose(trainer.model.policy(ids).logits, base(ids).logits)


def test_only_adapter_and_value_head_are_trained(tmp_path: Path) -> None:
    trainer = lora_trainer(tmp_path)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or name.startswith("value_head") for name in trained)
    trainer.train()
    assert trained == {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}


def test_the_saved_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    trainer = lora_trainer(tmp_path / "out")
    trainer.train()
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(tiny.policy(), tmp_path / "out")
    ids = torch.tensor([[2, 5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, trainer.model.policy.eval()(ids).logits, atol=1e-6)
    assert not list((tmp_path / "out").glob("model*.safetensors"))  # the base model is not written


def test_resuming_is_exact(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "ppo_epochs": 2, "max_steps": 8}
    whole = lora_trainer(tmp_path / "whole", **settings)
    whole.train()
    (tmp_path / "part").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "part" / "checkpoint-3")
    part = lora_trainer(tmp_path / "part", **settings)
    part.train(resume_from_checkpoint=True)
    for name, tensor in part.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name]), name


def test_an_adapter_of_another_name_resumes(tmp_path: Path) -> None:
    policy = peft.get_peft_model(tiny.policy(), LORA, adapter_name="ppo")
    settings = {"share_backbone": True, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    tiny.trainer(tmp_path, build=lambda: policy, **settings).train()
    again = peft.get_peft_model(tiny.policy(), LORA, adapter_name="ppo")
    trainer = tiny.trainer(tmp_path, build=lambda: again, **{**settings, "max_steps": 3})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    plain = tiny.trainer(tmp_path, **{**settings, "max_steps": 4})
    with pytest.raises(FileNotFoundError, match="holds no LlamaForCausalLM"):
        plain.train(resume_from_checkpoint=True)


def test_an_adapter_folder_goes_on_training(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    base = type(tiny.policy()).from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, LORA).save_pretrained(tmp_path / "adapter")
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    trainer = tiny.trainer(
        tmp_path / "out", build=lambda: str(tmp_path / "adapter"), share_backbone=True, max_steps=3, learning_rate=1e-2
    )
    trainer.train()
    assert trainer.reference is None
    assert [row["kl"] for row in trainer.state.log_history if "kl" in row][-1] > 1e-6


def test_what_was_frozen_stays_frozen(tmp_path: Path) -> None:
    """Switching the adapter off and on must not make anything trainable, also before the optimizer is made."""
    policy = peft.get_peft_model(tiny.policy(), LORA)
    frozen = {name: p.detach().clone() for name, p in policy.named_parameters() if "lora_A" in name}
    for name, parameter in policy.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    trainer = tiny.trainer(
        tmp_path, build=lambda: policy, share_backbone=True, learning_rate=1e-2, parts={"eval_dataset": tiny.prompts(4)}
    )
    trainer.evaluate()
    trainer.train()
    now = dict(trainer.model.policy.named_parameters())
    assert frozen
    assert all(torch.equal(now[name], before) and not now[name].requires_grad for name, before in frozen.items())
    assert [row["kl"] for row in trainer.state.log_history if "kl" in row][-1] > 0


def test_two_adapters_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has an adapter already"):
        tiny.trainer(tmp_path, build=lambda: peft.get_peft_model(tiny.policy(), LORA), parts={"peft_config": LORA})
    native = tiny.policy()
    native.add_adapter(LORA)
    with pytest.raises(ValueError, match="pass the plain model and peft_config="):
        tiny.trainer(tmp_path, build=lambda: native)


def test_an_adapter_that_is_not_trainable_is_refused(tmp_path: Path) -> None:
    peft.get_peft_model(tiny.policy(), LORA).save_pretrained(tmp_path)
    frozen = peft.PeftModel.from_pretrained(tiny.policy(), tmp_path)
    with pytest.raises(ValueError, match="no parameter of model= is trainable"):
        tiny.trainer(tmp_path, build=lambda: frozen, share_backbone=True)


def test_the_geometry_stays_that_of_the_original_embeddings(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    trainer = tiny.trainer(
        tmp_path, regularizer="unbalanced", parts={"peft_config": config}, share_backbone=True, learning_rate=1e-2
    )
    trainer.train()
    assert torch.equal(trainer.regularizer.geometry.embeddings, tiny.policy().get_input_embeddings().weight)


def test_a_lora_critic_too(tmp_path: Path) -> None:
    critic = peft.get_peft_model(
        tiny.critic(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])
    )
    trainer = tiny.trainer(
        tmp_path, parts={"peft_config": LORA, "critic": critic}, max_steps=3, gradient_checkpointing=True
    )
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "critic" / "adapter_model.safetensors").exists()


def test_prompt_tuning_is_refused(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="use an adapter such as LoRA"):
        tiny.trainer(tmp_path, parts={"peft_config": config})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_one_copy_of_the_base_weights_in_memory(tmp_path: Path) -> None:
    """Measured, in processes of their own: a LoRA run needs one copy of the weights, a full run one more for the
    reference (and gradients).
    """
    used = {}
    for kind in ("lora", "full"):
        command = [sys.executable, "-m", "tests.ppo.memory", str(tmp_path / kind), kind]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        used[kind] = json.loads(done.stdout.strip().splitlines()[-1])
    size = used["lora"]["weights"]
    assert size > 100e6
    print({kind: {name: round(value / size, 2) for name, value in found.items()} for kind, found in used.items()})
    assert used["lora"]["built"] < 1.2 * size  # one copy
    assert used["lora"]["trained"] < 1.4 * size  # one copy, activations and buffers
    assert used["full"]["built"] > 1.9 * size  # policy and reference
    assert used["full"]["trained"] > 1.9 * size
