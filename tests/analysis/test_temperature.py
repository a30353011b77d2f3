"""Win rates by temperature: from scores, and from what judges found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analysis.columns import column
from wpr.analysis.temperature import by_judges, by_scores, temperature_finding
from wpr.evaluation.judging.run_result import COLUMNS, JudgedRate
from wpr.evaluation.win_rate import win_rate
from wpr.findings import Finding


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


def of_run(name: str, rows: list[JudgedRate]) -> Finding:
    """As `wpr judge RUN` writes it."""
    return Finding(
        name, "Policies of x against y, judged by gpt", [], COLUMNS, [list(vars(one).values()) for one in rows]
    )


def test_a_pair_that_several_findings_have_is_one_point() -> None:
    """Tables of the paper share comparisons, and a run can be judged either way round: the one with most prompts."""
    few = of_run("judge-a", [JudgedRate("w", 0.5, "rkl", 0.7, 0.6, 0.8, prompts=20)])
    most = of_run("judge-b", [JudgedRate("rkl", 0.5, "w", 0.4, 0.3, 0.45, prompts=50)])
    found = by_judges([few, most, verdict("w", "rkl", (0.5, 0.5), 0.9)], "rkl")
    assert [(one.model, one.temperature, one.prompts) for one in found] == [("w", 0.5, 50)]
    assert found[0].rate == pytest.approx(0.6)
