"""Sharing out rows: exact shares, no prompt in two parts, and no influence of the rows' order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wpr.data import Corpus, DataError, Row, SplitSettings, split_corpus
from wpr.data.corpus import fingerprint


def corpus(rows: list[Row], validation: list[Row] | None = None) -> Corpus:
    return Corpus(rows, validation or [], [], fingerprint(rows, validation or []), [])


def comparisons(prompts: list[int]) -> list[Row]:
    """Several comparisons a prompt, some of them twice."""
    return [Row(f"prompt {p}", f"good {i % 3}", "bad", origin=f"f:{i}") for i, p in enumerate(prompts)]


def content(rows: list[Row]) -> list[tuple[object, ...]]:
    return [(row.prompt, row.chosen, row.rejected) for row in rows]


PARTS = ("sft", "reward", "ppo", "held_out")
many = st.lists(st.integers(0, 60), min_size=150, max_size=300).map(lambda some: some + list(range(61)))


@settings(max_examples=25)
@given(many, st.integers(0, 5), st.randoms(use_true_random=False))
def test_no_prompt_in_two_parts_whatever_the_order(prompts: list[int], seed: int, shuffle: random.Random) -> None:
    rows = comparisons(prompts)
    split = split_corpus(corpus(rows), SplitSettings(), seed)
    parts = [{row.prompt for row in getattr(split, name)} for name in PARTS]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 61
    assert [len(part) for part in parts] == [12, 23, 23, 3]  # cuts at 3 + round(58 * (0.2, 0.6, 1.0))
    assert sorted(content([row for name in PARTS for row in getattr(split, name)])) == sorted(content(rows))
    shuffle.shuffle(rows)
    again = split_corpus(corpus(rows), SplitSettings(), seed)
    assert all(content(getattr(split, name)) == content(getattr(again, name)) for name in PARTS)
    assert split.report()["shared_prompts"] == 0


@settings(max_examples=25)
@given(many, st.randoms(use_true_random=False))
def test_by_comparison_the_shares_are_of_rows(prompts: list[int], shuffle: random.Random) -> None:
    rows = comparisons(prompts)
    split = split_corpus(corpus(rows), SplitSettings(by="comparison", held_out=0))
    ends = [round(len(rows) * share) for share in (0.2, 0.6, 1)]
    assert [len(split.sft), len(split.reward), len(split.ppo)] == [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
    assert split.report()["shared_prompts"] > 0
    shuffle.shuffle(rows)
    again = split_corpus(corpus(rows), SplitSettings(by="comparison", held_out=0))
    assert all(content(getattr(split, name)) == content(getattr(again, name)) for name in PARTS)


def test_another_seed_is_another_split() -> None:
    rows = comparisons(list(range(100)))
    one, other = (split_corpus(corpus(rows), SplitSettings(), seed) for seed in (0, 1))
    assert content(one.sft) != content(other.sft)


def test_more_rows_do_not_move_a_prompt_across_the_order() -> None:
    """Prompts are ordered by their digest: with one share, a larger corpus keeps the order of a smaller one."""
    whole = SplitSettings(sft=1, reward=0, ppo=0, held_out=0)
    few = [row.prompt for row in split_corpus(corpus(comparisons(list(range(30)))), whole).sft]
    more = [row.prompt for row in split_corpus(corpus(comparisons(list(range(60)))), whole).sft]
    assert [prompt for prompt in more if prompt in few] == few


def test_validation_prompts_are_kept_from_training() -> None:
    rows, validation = comparisons(list(range(100))), comparisons(list(range(90, 120)))
    split = split_corpus(corpus(rows, validation), SplitSettings())
    assert content(split.held_out) == content(validation)
    assert split.left_out == 10
    assert split.report()["shared_prompts"] == 0
    assert sum(split.report()["rows"][name] for name in PARTS[:3]) == 90
    paper = split_corpus(corpus(rows, validation), SplitSettings(by="comparison"))
    assert paper.left_out == 0
    assert paper.report()["shared_prompts"] == 10


def test_unused_share() -> None:
    split = split_corpus(corpus(comparisons(list(range(100)))), SplitSettings(sft=0, reward=0, ppo=0.5, held_out=0))
    assert split.report()["rows"] == {"sft": 0, "reward": 0, "ppo": 50, "held_out": 0}


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(DataError, match=r"split.held_out is 0.05, but of 3 prompts none falls to it; .* set it to 0"):
        split_corpus(corpus(comparisons([0, 1, 2])), SplitSettings())
    rows = comparisons([0, 1, 2])
    with pytest.raises(DataError, match=r"split.sft is 0.2, but of 0 prompts \(3 rows were left out"):
        split_corpus(corpus(rows, rows), SplitSettings())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"by": "promt"}, "did you mean 'prompt'"),
        ({"sft": 0.5}, "add up to 1.3"),
        ({"sft": -0.1}, "split.sft is -0.1; it must be a share between 0 and 1"),
        ({"held_out": 1}, "leaves nothing"),
        ({"sft": 0, "reward": 0, "ppo": 0}, "all 0"),
        ({"ppo": float("nan")}, "split.ppo is nan"),
    ],
)
def test_bad_settings(given: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SplitSettings(**given)  # type: ignore[arg-type]


def test_a_text_is_the_same_prompt_as_its_chat() -> None:
    assert Row("Hi").prompt_digest() == Row(({"role": "user", "content": "Hi"},)).prompt_digest()
    assert Row("Hi").prompt_digest("salt") != Row("Hi").prompt_digest()
