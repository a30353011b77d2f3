"""docs/ppo.md explains every metric. (tests/docs runs its examples.)"""

from __future__ import annotations

import re
from pathlib import Path

from tests.ppo import tiny

DOCS = Path(__file__).parents[2] / "docs" / "ppo.md"


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
