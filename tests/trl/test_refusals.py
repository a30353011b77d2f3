"""What is refused before training, with the value and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig
from trl import GRPOConfig

from tests.problems import clustered_embeddings
from tests.trl import tiny
from wpr import TokenGeometry, Wasserstein
from wpr.ppo import TransformersGeneration

ELSEWHERE = Wasserstein(TokenGeometry.from_embeddings(clustered_embeddings(), neighbours=4), "unbalanced", k2=8)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "trl's beta": ({}, {"beta": 0.04}, r"beta=0.04 of .*Config .* set beta=0.0 there"),
    "liger": ({}, {"use_liger_kernel": True}, "use_liger_kernel=True .* set it to False"),
    "the form": ({"regularizer_in": "rewards"}, {}, "regularizer_in='rewards' must be 'reward' or 'loss'"),
    "negative": ({"regularizer_beta": -0.1}, {}, "regularizer_beta=-0.1 must be 0 or more"),
    "nan": ({"regularizer_beta": float("nan")}, {}, "regularizer_beta=nan must be 0 or more"),
    "a name": ({"regularizer": "reverse-lk"}, {}, "no regularizer 'reverse-lk'; did you mean 'reverse-kl'"),
    "a vocabulary": ({"regularizer": ELSEWHERE}, {}, "geometry has 60 tokens but the reference 40"),
    "another model": ({"regularizer": "semantic:embeddings=some/model"}, {}, "names another model's embeddings"),
    "drawing": ({"generation": TransformersGeneration()}, {"min_p": 0.1}, "min_p=0.1 is not known to generation"),
    "a penalty": (
        {"generation": TransformersGeneration()}, {"repetition_penalty": 1.1}, "repetition_penalty=1.1 is not known",
    ),
    "more drawing": (
        {"generation": TransformersGeneration()}, {"generation_kwargs": {"typical_p": 0.5}}, "'typical_p': 0.5} are",
    ),
    "a prompt": (
        {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}, {}, "trains prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_refused(algorithm: str, what: str, tmp_path: Path) -> None:
    parts, settings, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        tiny.trainer(tmp_path, algorithm, None, parts, **settings)


def test_tokens_without_advantages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top_entropy_quantile=0.2 .* regularizer_in='loss'"):
        tiny.trainer(tmp_path, top_entropy_quantile=0.2)
    tiny.trainer(tmp_path, parts={"regularizer_in": "loss"}, top_entropy_quantile=0.2)


def test_an_average_that_is_not_known(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    args.loss_type = "sum"
    with pytest.raises(ValueError, match="loss_type='sum' .* regularizer_in='reward'"):
        tiny.GRPOTrainer("never loaded", tiny.counts_w7, args, regularizer_in="loss")


def test_no_regularizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is no regularizer"):
        tiny.trainer(tmp_path, parts={"regularizer": torch.nn.Linear})


def test_settings_and_lists_are_regularizers_too(tmp_path: Path) -> None:
    listed = [{"name": "reverse-kl"}, {"name": "semantic", "weight": 4, "lam": 10}]
    trainer = tiny.trainer(tmp_path, parts={"regularizer": listed})
    assert trainer.regularizer.labels == ["reverse-kl", "semantic"]
    assert tiny.trainer(tmp_path, parts={"regularizer": {"name": "js"}}).regularizer.labels == ["jensen-shannon"]


def test_without_trl_the_extra_is_named() -> None:
    code = "import sys; sys.modules['trl'] = None; import wpr; import wpr.trl"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: wpr.trl needs TRL; install it with `pip install 'wpr[train]'`" in out.stderr
