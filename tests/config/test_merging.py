"""Settings over settings: the top wins, arguments stay as they are, another thing takes nothing of the old one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.config.merging import merge, merge_dotted
from wpr.errors import RecipeError

SECTIONS = st.sampled_from(["ppo", "sft", "beta", "seed", "lam"])  # none that `RESETS` speaks of
TREES = st.recursive(
    st.integers() | st.none() | st.lists(st.integers(), max_size=2),
    lambda part: st.dictionaries(SECTIONS, part, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(TREES)
def test_merging_nothing_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge(tree, {}) == tree
    assert merge({}, tree) == tree
    assert merge(tree, tree) == tree


@given(TREES, TREES)
def test_the_top_wins(base: dict[str, Any], top: dict[str, Any]) -> None:
    merged = merge(base, top)

    def check(merged: dict[str, Any], base: dict[str, Any], top: dict[str, Any]) -> None:
        assert set(merged) == {*base, *top}
        for key, value in merged.items():
            if key not in top:
                assert value == base[key]
            elif isinstance(top[key], dict) and isinstance(base.get(key), dict):
                check(value, base[key], top[key])
            else:
                assert value == top[key]

    check(merged, base, top)
    assert merge(merged, top) == merged


@given(TREES, TREES)
def test_merging_leaves_its_arguments_alone(base: dict[str, Any], top: dict[str, Any]) -> None:
    before = copy.deepcopy((base, top))
    merge(base, top)
    assert (base, top) == before


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@given(TREES, TREES)
def test_dotted_changes_are_a_tree_written_flat(base: dict[str, Any], top: dict[str, Any]) -> None:
    assert merge_dotted(base, flat(top)) == merge(base, top)


@given(TREES)
def test_dotted_changes_come_in_any_order(tree: dict[str, Any]) -> None:
    changes = flat(tree)
    backwards = dict(reversed(changes.items()))
    assert merge_dotted({}, changes) == merge_dotted({}, backwards)


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo": 2, "ppo.beta": 1},
        {"ppo.beta": 1, "ppo": 2},
    ],
)
def test_a_section_and_a_part_of_it(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="keep one of them"):
        merge_dotted({}, changes)


def test_another_regularizer_takes_nothing_along() -> None:
    base = {"regularizer": {"name": "wasserstein", "preset": "paper", "lam": 100.0, "k2": 128}}
    assert merge(base, {"regularizer": {"name": "reverse-kl"}}) == {"regularizer": {"name": "reverse-kl"}}
    assert merge(base, {"regularizer": {"preset": "semantic"}}) == {"regularizer": {"preset": "semantic"}}
    assert merge(base, {"regularizer": {"name": "wasserstein", "lam": 5.0}})["regularizer"]["k2"] == 128


def test_another_dataset_takes_its_files_along() -> None:
    base = {"data": {"format": "hh", "source": "a", "revision": "r", "columns": {"chosen": "good"}, "limit": 9}}
    assert merge(base, {"data": {"format": "tldr"}}) == {"data": {"format": "tldr", "limit": 9}}
    found = merge(base, {"data": {"source": "b"}})["data"]
    assert found == {"format": "hh", "source": "b", "columns": {"chosen": "good"}, "limit": 9}
    assert merge(base, {"data": {"format": "hh", "limit": 3}})["data"]["revision"] == "r"


def test_another_model_takes_its_revision_along() -> None:
    base = {"model": {"name": "a", "revision": "r", "precision": "bf16"}}
    assert merge(base, {"model": {"name": "b"}}) == {"model": {"name": "b", "precision": "bf16"}}
