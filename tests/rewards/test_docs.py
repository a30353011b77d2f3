"""What docs/rewards.md says of words and lists is so. (tests/docs runs its Python.)"""

from __future__ import annotations

import re
from pathlib import Path

from wpr.rewards import WordList

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_list_of_words(tmp_path: Path) -> None:
    (entries,) = re.findall(r"```text\n(# words.*?)```", PAGE, re.DOTALL)
    (tmp_path / "avoid.txt").write_text(entries, encoding="utf-8")
    reward = WordList(str(tmp_path / "avoid.txt"))
    assert reward.score("We utilized things in order to get synergy, and LEVERAGED it.") == -1 - 1 - 1 - 2.5
    assert reward.score("The thing's name is her name, the thing.") == -1


def test_inflections_that_the_page_names() -> None:
    for entry, written in {
        "tie": "tying",
        "hop": "hopped",
        "visit": "visited",
        "refer": "referred",
        "her": "herring",
    }.items():
        assert WordList([entry]).score(written) == -1
    assert WordList(["run"]).score("ran runner") == 0
