"""Findings from what runs recorded: sensitivity, temperature, costs, case studies as tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wpr.analysis.case_table import case_finding
from wpr.analysis.costs import cost_finding
from wpr.analysis.sensitivity import Member, sensitivity_finding, sweep_lines
from wpr.analysis.temperature import by_judges, by_scores, temperature_finding
from wpr.evaluation.win_rate import win_rate
from wpr.findings import Finding


def member(policy: str, rate: float, **settings: Any) -> Member:
    named = {"ppo.beta": 0.1, "regularizer.name": "wasserstein", "regularizer.k2": 128, "seed": 0}
    given = {name.replace("__", "."): value for name, value in settings.items()}
    ends = {"win_rate": (rate - 0.1, rate + 0.1)}
    return Member(policy, named | given, {"score": rate, "win_rate": rate, "kl": 0.2}, ends)


def column(finding: Finding, name: str) -> list[Any]:
    return [row[finding.columns.index(name)] for row in finding.rows]


# Sensitivity.


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


# Temperature.


def test_win_rates_are_those_of_the_scores() -> None:
    base = {str(i): float(i) for i in range(20)}
    better = {key: value + (1 if int(key) % 4 else -1) for key, value in base.items()}
    scores = {("sft", 0.5): base, ("sft", 1.0): base, ("rkl", 0.5): better, ("rkl", 1.0): base, ("rkl", 2.0): base}
    finding = temperature_finding(by_scores(scores, "sft", "the run's reward model"), "sft")
    expected = win_rate(list(better.values()), list(base.values()), groups=list(base))
    assert column(finding, "temperature") == [0.5, 1.0], "sft did not answer at 2"
    assert column(finding, "win rate") == pytest.approx([expected.rate, 0.5])
    assert column(finding, "low")[0] == pytest.approx(expected.low)
    assert any("wins at temperature 0.5 (of 0.5, 1)" in sentence for sentence in finding.text)
    assert "not more" in finding.text[-1]


def test_prompts_that_one_side_did_not_answer_are_left_out() -> None:
    (found,) = by_scores({("sft", 0.5): {"a": 1.0, "b": 2.0}, ("x", 0.5): {"b": 3.0, "c": 4.0}}, "sft", "gold")
    assert found.prompts == 1


def test_no_common_temperature_is_said() -> None:
    with pytest.raises(ValueError, match=r"there are sft at 0\.5, rkl at 1"):
        by_scores({("sft", 0.5): {"a": 1.0}, ("rkl", 1.0): {"a": 1.0}}, "sft", "gold")


def verdict(ours: str, theirs: str, heats: tuple[float, float], rate: float, judge: str = "gpt") -> Finding:
    """As `wpr judge` writes it."""
    headers = [
        {"name": name, "sampling": {"temperature": heat}} for name, heat in zip((ours, theirs), heats, strict=True)
    ]
    rows: list[Any] = [["comparisons", 250, None, None, ""], ["win rate", rate, rate - 0.1, rate + 0.05, "ties"]]
    rows.append(["sign test p", 0.03, None, None, ""])
    name, title = f"judge-{judge}-{ours}-vs-{theirs}-{heats[0]}", f"{ours} against {theirs}, judged by {judge}"
    return Finding(name, title, [], ["figure", "value", "low", "high", "note"], rows, [], {"headers": headers})


def test_what_judges_found_is_put_together() -> None:
    found = by_judges(
        [
            verdict("w", "rkl", (0.5, 0.5), 0.7),
            verdict("rkl", "w", (1.0, 1.0), 0.4),
            verdict("w", "rkl", (0.5, 0.5), 0.6, "llama"),
            verdict("w", "rkl", (0.5, 1.0), 0.9),
            verdict("w", "sft", (0.5, 0.5), 0.9),
            Finding("similarity", "no judge", [], [], []),
        ],
        "rkl",
    )
    assert [(one.judge, one.temperature) for one in found] == [("gpt", 0.5), ("gpt", 1.0), ("llama", 0.5)]
    turned = found[1]
    assert (turned.rate, turned.low, turned.high) == pytest.approx((0.6, 0.55, 0.7)), "1 minus what the other had"
    assert turned.p_value == 0.03
    finding = temperature_finding(found, "rkl")
    assert [one.name for one in finding.figures[0].series] == ["w (gpt)", "w (llama)"]
    with pytest.raises(ValueError, match="no finding of a judge"):
        by_judges([verdict("w", "sft", (0.5, 0.5), 0.9)], "rkl")


# Costs.


def test_costs() -> None:
    stages = [("sft", "done", 10.0, 1.5), ("ppo/a", "done", 20.0, None), ("ppo/b", "failed", None, None)]
    finding = cost_finding(stages, {"a": {"generation": 3.0, "penalty": 1.0}})
    assert column(finding, "stage") == ["sft", "ppo/a", "ppo/b"]
    assert column(finding, "sum, s a step") == [None, 4.0, None]
    assert [figure.name for figure in finding.figures] == ["step", "seconds", "memory"]
    assert any("25.0% of them" in sentence for sentence in finding.text)
    with pytest.raises(ValueError, match="recorded neither"):
        cost_finding([], {})


# Case studies.


def token(text: str, kl: float | None, wpr: float, plan: list[dict[str, Any]]) -> dict[str, Any]:
    return {"text": text, "policy": 0.5, "reference": 0.25, "kl": kl, "wpr": wpr, "moved": 0.1, "plan": plan}


def test_a_case_study_as_a_table() -> None:
    stays = {"from": " dog", "to": " dog", "mass": 0.9, "cost": 0.0}
    moves = {"from": " dog", "to": " cat", "mass": 0.1, "cost": 1.5}
    tokens = [token(" dog", 0.7, 0.2, [stays, moves]), token(" ran", 0.1, 0.4, [stays]), token("!", None, 0.3, [])]
    finding = case_finding({"rkl": {"response": " dog ran!", "tokens": tokens}}, "A", "semantic")
    assert column(finding, "largest move") == [" dog ->  cat", None, None]
    assert column(finding, "KL penalty") == [0.7, 0.1, None]
    kl, other = finding.figures[0].series
    assert kl.y[:2] == [1.0, 0.0]
    assert math.isnan(kl.y[2])
    assert other.y == pytest.approx([0.0, 1.0, 0.5])
    assert any("reverse KL is largest at ' dog' (0.7)" in sentence for sentence in finding.text)
