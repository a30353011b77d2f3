"""Sensitivity: policies that differ in one setting make a line, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.analysis.columns import column
from wpr.analysis.sensitivity import Member, analyze, regularizer_settings, sensitivity_finding, sweep_lines
from wpr.evaluation.judging.run_result import COLUMNS, JudgedRate
from wpr.findings import Finding, save


def member(policy: str, rate: float, **settings: Any) -> Member:
    named = {"ppo.beta": 0.1, "regularizer.name": "wasserstein", "regularizer.k2": 128, "seed": 0}
    given = {name.replace("__", "."): value for name, value in settings.items()}
    ends = {"win_rate": (rate - 0.1, rate + 0.1)}
    return Member(policy, named | given, {"score": rate, "win_rate": rate, "kl": 0.2}, ends)


def test_lines_are_policies_that_differ_in_one_setting_alone() -> None:
    members = [
        member("w+beta=0.1", 0.6),
        member("w+beta=0.01", 0.8, ppo__beta=0.01),
        member("w+k2=64", 0.55, regularizer__k2=64),
        member("other", 0.5, ppo__beta=0.5, seed=3),
    ]
    lines = {(line.setting, line.name): [m.policy for m in line.members] for line in sweep_lines(members)}
    assert lines == {
        ("ppo.beta", "w"): ["w+beta=0.01", "w+beta=0.1"],
        ("regularizer.k2", "w"): ["w+k2=64", "w+beta=0.1"],
    }


def test_a_sweep_s_finding() -> None:
    members = [member(f"w+beta={beta}", rate, ppo__beta=beta) for beta, rate in ((0.001, 0.9), (0.1, 0.6), (0.01, 0.7))]
    finding = sensitivity_finding(members)
    assert column(finding, "value") == [0.001, 0.01, 0.1]
    assert column(finding, "win rate over SFT") == [0.9, 0.7, 0.6]
    drawn = {figure.name: figure for figure in finding.figures}
    assert {"score-by-beta", "win_rate-by-beta", "kl-by-beta"} == set(drawn)
    assert drawn["win_rate-by-beta"].log_x
    assert drawn["win_rate-by-beta"].series[0].low == pytest.approx([0.8, 0.6, 0.5])
    assert "from 0.600 (beta = 0.1) to 0.900 (beta = 0.001)" in finding.text[1]
    assert "overlap" not in finding.text[1]


def test_overlapping_intervals_are_said_to_overlap() -> None:
    finding = sensitivity_finding([member("w", 0.60), member("w+beta=1", 0.65, ppo__beta=1.0)])
    # Which says nothing of one against the other: on the same prompts one may still win.
    assert "all their intervals overlap, which leaves open which value is better" in finding.text[1]


def test_neighbours_that_are_all_have_a_name_on_the_axis() -> None:
    finding = sensitivity_finding(
        [member("w", 0.6, regularizer__neighbours=64), member("w+all", 0.7, regularizer__neighbours="all")]
    )
    assert finding.figures[0].categories == ["64", "all"]


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(ValueError, match="none of the 2 finished policies"):
        sensitivity_finding([member("a", 0.5), member("b", 0.5, ppo__beta=1.0, seed=1)])


def test_settings_of_a_sum_are_those_of_the_part_that_has_them() -> None:
    def of_sum(k2: int) -> Member:
        parts = [
            {"name": "reverse-kl", "gauge": "value"},
            {"name": "semantic", "gauge": "value", "weight": 4, "k2": k2},
        ]
        return Member(f"sum+k2={k2}", regularizer_settings(parts), {"score": k2 / 100}, {})

    assert of_sum(64).settings == {
        "regularizer.0.name": "reverse-kl", "regularizer.0.gauge": "value", "regularizer.1.name": "semantic",
        "regularizer.1.gauge": "value", "regularizer.weight": 4, "regularizer.k2": 64,
    }  # fmt: skip
    (line,) = sweep_lines([of_sum(128), of_sum(64)])
    assert line.setting == "regularizer.k2"
    assert regularizer_settings({"name": "semantic", "k2": 64}) == {
        "regularizer.name": "semantic",
        "regularizer.k2": 64,
    }


def test_win_rates_by_judges_are_lines(tmp_path: Path) -> None:
    """Of a run's findings: policies against a baseline, seen from either side."""
    stages = {}
    for name, beta in (("rkl", 0.1), ("w", 0.1), ("w+beta=1", 1.0)):
        inputs = {"ppo": {"beta": beta}, "regularizer": {"name": "rkl" if name == "rkl" else "w"}}
        stages[f"ppo/{name}"] = {"inputs": inputs, "results": {}, "status": "done"}
    rates = [
        JudgedRate("w", 0.5, "rkl", 0.6, 0.55, 0.65), JudgedRate("w+beta=1", 0.5, "rkl", 0.4, 0.35, 0.45),
        JudgedRate("w", 0.5, "sft", 0.9, 0.8, 0.95), JudgedRate("w+beta=1", 0.5, "sft"),
    ]  # fmt: skip
    rows = [list(vars(rate).values()) for rate in rates]
    save(Finding("judge-j-vs-rkl-sft", "x, judged by j", [], COLUMNS, rows), tmp_path / "evaluations" / "judge-j")
    run = SimpleNamespace(path=tmp_path, manifest={"stages": stages}, finished=["rkl", "w", "w+beta=1"])
    finding, members = analyze(SimpleNamespace(run=run))  # type: ignore[arg-type]
    over = "judged win rate over {} (j, temperature 0.5)".format
    assert column(finding, "value") == [0.1, 1.0]
    assert column(finding, over("rkl")) == [0.6, 0.4]
    assert column(finding, over("rkl") + ", high") == [0.65, 0.45]
    assert column(finding, over("sft")) == [0.9, None]
    figure = next(one for one in finding.figures if one.title.startswith(over("rkl")))
    assert (figure.series[0].low, figure.marks[0].value) == ([0.55, 0.35], 0.5)
    assert any("rkl (j, temperature 0.5) goes from 0.400 (beta = 1.0) to 0.600" in text for text in finding.text)
    baseline = next(one for one in members if one["policy"] == "rkl")
    assert baseline["results"][over("w")] == pytest.approx(0.4)
