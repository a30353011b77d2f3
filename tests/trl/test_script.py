"""A script as TRL's documentation has them, and the same under a regularizer: two lines differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ppo import tiny as models
from tests.trl import tiny

SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="prompts.jsonl", split="train")


def reward_len(completions, **kwargs):
    return [-abs(5 - len(completion.split())) for completion in completions]


training_args = GRPOConfig(
    output_dir="out", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
    logging_steps=1, report_to="none", use_cpu=True, bf16=False,
)
trainer = GRPOTrainer(
    model="model", reward_funcs=reward_len, args=training_args, train_dataset=dataset,
)
trainer.train()
trainer.save_model()
"""
CHANGES = {
    "from trl import GRPOConfig, GRPOTrainer": "from trl import GRPOConfig; from wpr.trl import GRPOTrainer",
    'model="model", reward_funcs': 'regularizer="reverse-kl + 4*semantic", model="model", reward_funcs',
}


def run(script: str, folder: Path) -> list[dict[str, float]]:
    """What it logged."""
    folder.mkdir()
    models.policy().save_pretrained(folder / "model")
    tokenizer = models.tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": row["prompt"]} for row in tiny.prompts()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    out = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-4000:]
    assert (folder / "out" / "model.safetensors").exists()
    state = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    return [row for row in state["log_history"] if "loss" in row]


def test_two_lines(tmp_path: Path) -> None:
    changed = SCRIPT
    for old, new in CHANGES.items():
        assert old in changed
        changed = changed.replace(old, new)
    lines = zip(SCRIPT.splitlines(), changed.splitlines(), strict=True)
    assert sum(one != other for one, other in lines) == 2
    before, after = run(SCRIPT, tmp_path / "before"), run(changed, tmp_path / "after")
    assert len(before) == len(after) == 2
    assert before[0].keys() < after[0].keys()
    assert after[1]["regularizer/divergence"] > 0
    assert before[0]["reward"] == after[0]["reward"]  # the same completions, before a step was taken
