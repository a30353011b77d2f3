"""docs/architecture.md: its files are there, and a real token and a real setting take the way that it says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import wpr
from tests.ppo import tiny
from wpr import TokenGeometry, Wasserstein
from wpr.config.recipe_file import load_recipe
from wpr.data import DataSettings, Encoder, SplitSettings, load_corpus, ppo_rows, split_corpus
from wpr.model_geometry import regularizer_on

SOURCE = Path(wpr.__file__).parent
PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
STAGES = {"pipeline/recipe_data.py", "pipeline/ppo.py"}
"""What only a whole run goes through."""
KERNELS = {f"transport/kernels/{name}.py" for name in ("potentials", "iterations", "log_sums")}
"""What only a GPU goes through."""


def steps(title: str) -> list[tuple[str, str]]:
    """The files of a numbered list, each with the first function that its line names."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^(\d+)\. `([^`]+)`:? ?(?:`(\w+)`)?", section, re.MULTILINE)
    assert [int(number) for number, _, _ in lines] == list(range(1, len(lines) + 1))
    return [(file, function) for _, file, function in lines]


@pytest.mark.parametrize("title", ["The way of one token", "The way of one setting"])
def test_files_are_there_each_once(title: str) -> None:
    files = [file for file, _ in steps(title)]
    assert len(files) > 10
    assert len(set(files)) == len(files)
    assert [file for file in files if not (SOURCE / file).is_file()] == []


def test_every_folder_has_its_line() -> None:
    table = PAGE.split("## ")[0]
    for path in SOURCE.iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        if not name.startswith("__") and name != "py.typed":
            assert f"`{name}`" in table, name


def test_files_and_names_of_where_to_add() -> None:
    """Files are there, and a name in capitals, or of a class, is in the file that its sentence names."""
    where = " ".join(PAGE.split("## Where to add")[1].split())
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+/?(?:\.py)?)`", where):
        assert any((root / name).exists() for root in (SOURCE, SOURCE.parent, SOURCE.parent.parent)), name
    pairs = re.findall(r"`([A-Za-z_.]+)` (?:of|in) `([a-z_/]+\.py)`", where)
    assert len(pairs) > 8
    for name, file in pairs:
        found = next(root / file for root in (SOURCE, SOURCE.parent.parent) if (root / file).exists())
        assert name.rpartition(".")[2] in found.read_text(encoding="utf-8"), (name, file)


class Calls:
    """The functions of this package in the order in which they are first called."""

    def __init__(self) -> None:
        self.order: dict[tuple[str, str], int] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            self.order.setdefault((str(Path(file).relative_to(SOURCE)), frame.f_code.co_name), len(self.order))

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def assert_met(listed: list[tuple[str, str]], calls: Calls, left_out: set[str]) -> None:
    """The steps were met, in their order."""
    listed = [step for step in listed if step[0] not in left_out]
    assert [step for step in listed if step not in calls.order] == []
    assert sorted(listed, key=calls.order.__getitem__) == listed


def test_a_token_takes_that_way(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{3 + i % 30} w{5 + i % 7}", "completion": "w4"} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataSettings(format="demonstrations", source=str(tmp_path / "rows.jsonl"), template="text")
    policy = tiny.policy()
    geometry = TokenGeometry.from_embeddings(policy.get_input_embeddings().weight, neighbours=10, progress=False)
    with Calls() as calls:
        split = split_corpus(load_corpus(data), SplitSettings(sft=0.1, reward=0, ppo=0.8, held_out=0.1))
        made, _ = ppo_rows(split.ppo, Encoder(tiny.tokenizer(), data))
    parts = {"train_dataset": made}
    trainer = tiny.trainer(
        tmp_path, tiny.critic(3), Wasserstein(geometry, "unbalanced", k2=8), parts=parts, max_steps=1
    )
    with calls:
        trainer.train()
    assert_met(steps("The way of one token"), calls, STAGES)


def test_a_setting_takes_that_way(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: tldr-gemma-2b\nname: mine\nregularizer: {lam: 70, neighbours: 10, k2: 8}\n")
    model = tiny.policy()
    with Calls() as calls:
        recipe = load_recipe(str(mine))
        regularizer = regularizer_on(model, recipe.policy("paper").regularizer)
        logits = torch.randn(2, 3, tiny.TOKENS)
        regularizer(*logits, torch.arange(3))
    assert isinstance(regularizer, Wasserstein)
    assert regularizer.settings.lam == 70
    assert_met(steps("The way of one setting"), calls, {"recipes/_paper.yaml", *KERNELS})
