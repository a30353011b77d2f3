"""The comparison at matched score, on results whose answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import seeds
from wpr.config.recipe_file import load_recipe
from wpr.pipeline.run import plan
from wpr.pipeline.sweep import members

MATCHED = seeds.matched_names(seeds.COLUMNS)


def found_on_lines(scores: dict[str, list[float]]) -> dict[tuple[str, float], dict[int, dict[str, float]]]:
    """Two seeds; every measure is twice the score under rkl, and 3, or on seed 1 5, more under semantic."""
    found: dict[tuple[str, float], dict[int, dict[str, float]]] = {}
    for policy, reached in scores.items():
        for number, score in enumerate(reached):
            for seed in (0, 1):
                more = (3.0, 5.0)[seed] if policy == "semantic" else 0.0
                values = dict.fromkeys(MATCHED, 2 * score + more) | {"after.score": score, "before.score": -1.0}
                before = (name.replace("after.", "before.") for name in MATCHED if name.startswith("after."))
                values |= dict.fromkeys(before, -2.0)  # on the line of rkl
                found.setdefault((policy, float(number)), {})[seed] = values
    return found


def test_differences_at_the_same_score() -> None:
    found = found_on_lines({"rkl": [0.0, 2.0, 1.0], "semantic": [0.5, 0.5, 3.0]})
    compared, at, count, *cells = seeds._matched_row(found, "semantic", "rkl", "middle", 0.5, MATCHED)
    assert (compared, at, count) == ("semantic - rkl", "middle (1.25)", "2")
    half = 12.706 * math.sqrt(2) / math.sqrt(2)  # t of one degree of freedom, deviation of 3 and 5, two seeds
    assert cells == [f"+4 ± {half:.2g}"] * len(MATCHED)


def test_differences_by_seed() -> None:
    found = found_on_lines({"rkl": [0.0, 2.0], "semantic": [0.0, 2.0]})
    by_seed = seeds.differences(found, "semantic", "rkl", 0.5, ["after.gold"])
    assert by_seed == {0: (1.0, {"after.gold": 3.0}), 1: (1.0, {"after.gold": 5.0})}


def test_one_beta_is_compared_at_its_own_score(capsys: pytest.CaptureFixture[str]) -> None:
    found = found_on_lines({"rkl": [0.0, 2.0], "semantic": [0.5], "other": [0.5], "far": [3.0]})
    by_seed = seeds.differences(found, "semantic", "rkl", 0.75, ["after.gold"])
    assert by_seed == {0: (0.5, {"after.gold": 3.0}), 1: (0.5, {"after.gold": 5.0})}
    by_seed = seeds.differences(found, "rkl", "semantic", 0.25, ["after.gold"])
    assert by_seed == {0: (0.5, {"after.gold": -3.0}), 1: (0.5, {"after.gold": -5.0})}
    # Between the SFT model and the two points, too; of what the SFT model has no value for, nothing is said.
    early = found_on_lines({"rkl": [0.0, 2.0], "semantic": [-0.5]})
    values = seeds.differences(early, "semantic", "rkl", 0.5, ["after.gold", "steps"])[0][1]
    assert values["after.gold"] == pytest.approx(3)
    assert math.isnan(values["steps"])
    assert not seeds.differences(found, "far", "rkl", 0.5, ["after.gold"])  # beyond the other's curve
    assert not seeds.differences(found, "semantic", "other", 0.5, ["after.gold"])  # two points are no curve
    # A beta of two that is named is compared like one.
    assert seeds.differences(found, "rkl", "rkl+beta=0", 0.5, ["after.gold"])[0] == (0.0, {"after.gold": 0.0})
    seeds.table(found, [("semantic", "rkl"), ("semantic", "other"), ("semantic", "unknown")])
    printed = capsys.readouterr().out
    assert printed.count("semantic - rkl") == 1
    assert "its score" in printed
    assert "semantic - other: not compared, each has one beta" in printed
    assert "semantic - unknown: not compared, one of them has no results" in printed


def test_a_bent_curve_is_followed_and_stays_between_its_points() -> None:
    def at(*points: tuple[float, float], score: float) -> float:
        return seeds._interpolated(sorted(points), score, bent=True)

    fall = [(x, 1 - x**2) for x in (0.0, 0.5, 1.0)]
    line = seeds._interpolated(fall, 0.75)
    assert abs(at(*fall, score=0.75) - (1 - 0.75**2)) < 0.4 * abs(line - (1 - 0.75**2))
    # A parabola would give 1.08, 0.86 and 0.91.
    assert 0.90 <= at((-0.02, 0.97), (0, 0.98), (1, 0.90), score=0.5) <= 0.98
    assert 0.90 <= at((0, 0.98), (0.05, 0.96), (1, 0.90), score=0.5) <= 0.96
    assert 0.90 <= at((0, 0.98), (0.05, 0.97), (1, 0.90), score=0.5) <= 0.97


def test_a_beta_at_the_sft_models_score_counts() -> None:
    found = found_on_lines({"rkl": [-1.0, 1.0], "semantic": [-1.0]})
    for rows in found.values():
        for row in rows.values():
            row["before.gold"] = 100.0
    assert seeds.differences(found, "semantic", "rkl", 0.5, ["after.gold"])[0] == (-1.0, {"after.gold": 3.0})


def test_a_seed_that_lacks_a_beta_is_left_out() -> None:
    found = found_on_lines({"rkl": [0.0, 2.0], "semantic": [0.5, 1.5]})
    del found["semantic", 1.0][1]
    assert set(seeds.differences(found, "semantic", "rkl", 0.75, ["after.gold"])) == {0}


def test_what_was_not_measured_is_left_out() -> None:
    found = found_on_lines({"rkl": [0.0, 2.0], "semantic": [0.0, 2.0]})
    for by_seed in found.values():
        del by_seed[0]["after.self_bleu"]
    cells = dict(zip(MATCHED, seeds._matched_row(found, "semantic", "rkl", "low", 0.25, MATCHED)[3:], strict=True))
    assert cells["after.self_bleu"] == "-"
    assert cells["after.gold"].startswith("+4 ")


def test_a_cell_of_fewer_seeds_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = found_on_lines({"rkl": [0.0, 2.0], "semantic": [0.0, 2.0]})
    del found["semantic", 0.0][1]["after.kl"]
    seeds.table(found, [])
    assert capsys.readouterr().out.count("(1)") == 1


def test_a_policy_without_a_sweep_is_refused_before_a_world_is_made(tmp_path: Path) -> None:
    recipe = str(Path(seeds.__file__).with_name("rewriting_cpu.yaml"))
    with pytest.raises(SystemExit, match=r"no sweep of .* has rk1; there are: .*rkl"):
        seeds.run(tmp_path, recipe, 1, ["rk1"], 1, [], 60.0)
    assert not list(tmp_path.iterdir())


def test_scores_that_do_not_meet_are_not_compared() -> None:
    found = found_on_lines({"rkl": [0.0, 1.0], "semantic": [2.0, 3.0]})
    assert seeds._matched_row(found, "semantic", "rkl", "low", 0.25, MATCHED)[2:] == ["0", *["-"] * len(MATCHED)]
    with pytest.raises(ValueError, match="5 lies outside of 0 to 1"):
        seeds._interpolated([(0, 0), (1, 1)], 5)


def test_results_are_read_from_finished_policies(tmp_path: Path) -> None:
    stages = {
        "sft": {"status": "done", "results": {}},
        "ppo/rkl+beta=0.1": {"status": "done", "results": {"before": {"score": -0.5}, "after": {"score": 1}}},
        "ppo/rkl+beta=0.2": {"status": "running", "results": {}},
    }
    folder = tmp_path / "seed-3-rkl"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"stages": stages}))
    assert list(seeds.results(tmp_path)) == [(3, "rkl", 0.1, {"before.score": -0.5, "after.score": 1.0, "gain": 1.5})]


@pytest.mark.parametrize("path", sorted(Path(seeds.__file__).parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_a_benchmark_has_sweeps_that_can_be_planned(path: Path) -> None:
    recipe = load_recipe(str(path))
    changes = {name: settings for sweep in recipe.sweeps for name, settings in members(recipe, sweep, [], []).items()}
    assert [stage.name for stage in plan(recipe, list(changes), changes)][-1].startswith("ppo/")
