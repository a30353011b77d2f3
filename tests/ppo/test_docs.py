"""The example of the docs runs as it is printed, on a tiny model in the place of SmolLM2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ppo import tiny

DOCS = Path(__file__).parents[2] / "docs" / "ppo.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code.count("\n") < 40
    tiny.policy(vocab_size=200).save_pretrained(tmp_path / "models" / "smollm2")
    tiny.tokenizer().save_pretrained(tmp_path / "models" / "smollm2")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(DOCS), "exec"), {"__name__": "example"})
    loaded = peft.PeftModel.from_pretrained(tiny.policy(vocab_size=200), tmp_path / "runs" / "example")
    assert any("lora" in name for name, _ in loaded.named_parameters())


def test_every_metric_is_explained(tmp_path: Path) -> None:
    text = DOCS.read_text()
    table = text[text.index("## 6. Metrics") : text.index("## 7.")]
    trainer = tiny.trainer(
        tmp_path, regularizer="semantic", update_kl_limit=1.0, normalize_rewards=True, reward_clip=5.0, max_steps=1
    )
    trainer.train()
    for name in trainer.state.log_history[0]:
        if name in ("epoch", "step"):
            continue
        shortened = re.sub("^seconds", "", re.sub("leftover_.*", "leftover_*", name))
        assert f"`{name}`" in table or f"`{shortened}`" in table, name
