"""`wpr judge RUN`: all policies and temperatures of a run, against a judge behind a real server."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.judging.asked import KEY, better_response, lines_of
from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, error
from tests.pipeline.command import Here
from wpr.analysis.temperature import by_judges
from wpr.evaluation.judging.run_result import COLUMNS, JudgedRate, judged_rates
from wpr.findings import found_in, load

PROMPTS = 24
DRAWS = ["--prompts", "10", "--draws", "3", "--rubric", "summary"]
PAIRS = [("semantic", 1.0, "rkl"), ("js", 0.5, "sft")]
ALL = {"sft": (0.5, 1.0), "rkl": (0.5, 1.0), "js": (0.5,), "semantic": (0.5, 1.0)}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def make_run(
    folder: Path, drawn: Mapping[str, Sequence[float]], stages: Mapping[str, str] | None = None, prompts: int = PROMPTS
) -> Path:
    """A run's folder with files of responses, each of a quality that the judge can see."""
    (folder / "generations").mkdir(parents=True)
    done = stages or {name: "done" for name in drawn if name != "sft"}
    records = {f"ppo/{name}": {"inputs": {}, "status": status} for name, status in done.items()}
    manifest = {"format": 1, "stages": {"sft": {"inputs": {}, "status": "done"}} | records}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name, heats in drawn.items():
        for heat in heats:
            generator = random.Random(f"{name} {heat}")
            header = {"name": name, "sampling": {"temperature": heat}, "prompts": prompts}
            lines: list[dict[str, Any]] = [{"header": header}]
            for i in range(prompts):
                response = f"{name} at {heat} says {i} quality {generator.randint(1, 4)}"
                lines.append({"prompt_id": f"p{i}", "prompt": f"prompt {i}?", "response": response})
            path = folder / "generations" / f"{name}-t{heat:g}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def command(run: Path, server: ChatServer | str, *more: str) -> list[str]:
    address = server if isinstance(server, str) else server.address
    return ["judge", str(run), "--judge", "test", "--base-url", address, *DRAWS, *more]


def rates_of(folder: Path) -> dict[tuple[str, float, str], JudgedRate]:
    return {(one.policy, one.temperature, one.against): one for one in judged_rates(load(folder))}


def test_all_policies_at_all_temperatures_against_two_baselines(here: Here, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ALL)
    baselines = ["--against", "rkl", "--against", "sft"]
    with ChatServer(better_response) as server:
        dry = here.succeeds(*command(run, server, *baselines, "--dry-run", "--price-in", "1", "--price-out", "1"))
        assert not server.requests
        assert not (run / "evaluations").exists()
        finished = here.succeeds(*command(run, server, *baselines, "-y"))
        asked = len(server.requests)
        # The command for two files is the reference: it finds the answers, and the same rates.
        for policy, heat, against in PAIRS:
            files = [str(run / "generations" / f"{name}-t{heat:g}.jsonl") for name in (policy, against)]
            here.succeeds("judge", *files, *command(run, server, "-y")[2:])
        assert len(server.requests) == asked
    folder = run / "evaluations" / "judge-test-vs-rkl-sft"
    rates = rates_of(folder)
    assert list(rates) == [
        ("js", 0.5, "rkl"), ("semantic", 0.5, "rkl"), ("semantic", 1.0, "rkl"), ("rkl", 0.5, "sft"),
        ("rkl", 1.0, "sft"), ("js", 0.5, "sft"), ("semantic", 0.5, "sft"), ("semantic", 1.0, "sft"),
    ]  # fmt: skip
    assert "240 comparisons (3 policies against rkl, sft; temperature 0.5, 1)" in dry.stderr
    assert f"to be sent: {asked} requests" in dry.stderr
    assert "in the currency of the prices given" in dry.stderr
    for baseline in ("rkl", "sft"):
        said = f"js against {baseline} at temperature 1 is skipped: js has no responses there"
        assert f"Note: {said} (`wpr generate {run} -p js -t 1` draws them)" in dry.stderr
        assert f"Left out: {said}" in finished.stdout
    rows = lines_of(folder / "data.jsonl")
    assert len(rows) == 240
    with (folder / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == COLUMNS
    assert float(table[1]["won_se_draws"]) == rates["semantic", 0.5, "rkl"].won_se_draws
    for policy, heat, against in PAIRS:
        pair = load(run / "evaluations" / f"judge-test-{policy}-t{heat:g}-vs-{against}-t{heat:g}")
        cells = {str(row[0]): row[1:4] for row in pair.rows}
        rate = rates[policy, heat, against]
        assert [rate.win_rate, rate.low_95, rate.high_95] == cells["win rate"]
        assert rate.won == cells["won outright"][0]
        assert rate.win_rate_se_draws == cells["standard error over draws"][0]
        assert rate.won_se_draws == cells["standard error over draws, outright"][0]
        shares = [cells[name][0] / 30 for name in ("wins", "ties", "losses")]  # type: ignore[operator]
        assert [rate.won, rate.tied, rate.lost] == pytest.approx(shares)
        assert [rate.place_a, rate.p] == [cells["position bias"][0], cells["sign test p"][0]]
        assert [rate.comparisons, rate.no_verdict] == [30, 0]
    # Found also by the analysis of temperatures, each once although two findings have it.
    lines = by_judges(found_in(run), "rkl")
    assert [(one.model, one.temperature) for one in lines] == [
        ("js", 0.5), ("semantic", 0.5), ("semantic", 1.0), ("sft", 0.5), ("sft", 1.0)
    ]  # fmt: skip
    assert lines[-1].rate == 1 - (rates["rkl", 1.0, "sft"].win_rate or 0)


def test_an_answer_is_never_paid_for_twice(here: Here, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"sft": (0.5,), "rkl": (0.5,), "js": (0.5,)})
    first = [str(run / "generations" / f"{name}-t0.5.jsonl") for name in ("rkl", "sft")]
    limit = 1000

    def sometimes(request: Request) -> Behaviour:
        return error(500) if len(server.requests) > limit else better_response(request)

    more = ["--against", "sft", "--against", "rkl", "-y", "--concurrency", "1", "--attempts", "1"]
    with ChatServer(sometimes) as server:
        here.succeeds("judge", *first, *command(run, server, "-y")[2:])  # two files before the run
        before = len(server.requests)
        limit = before + 5
        broken = here(*command(run, server, *more))
        assert broken.code == 1
        assert "comparisons have no answer (HTTP 500" in broken.stderr
        assert "Incomplete: " in broken.stdout
        answered = [request.key for request in server.requests[:limit]]
        limit, sent = 1000, len(server.requests)
        again = here.succeeds(*command(run, server, *more))
        new = [request.key for request in server.requests[sent:]]
        assert f"to be sent: {len(new)} requests" in again.stderr
        assert len({*answered, *new}) == len(answered) + len(new) > before + 5
        rates = rates_of(run / "evaluations" / "judge-test-vs-sft-rkl")
        assert len(rates) == 3
        assert all(rate.no_verdict == 0 for rate in rates.values())
        sent = len(server.requests)  # other company, other folder
        assert "to be sent: 0 requests" in here.succeeds(*command(run, server, "--against", "rkl", "-y")).stderr
        assert len(server.requests) == sent


def test_a_baseline_of_another_run(here: Here, tmp_path: Path) -> None:
    small = make_run(tmp_path / "small", {"sft": (0.5,), "rkl": (0.5,)})
    large = make_run(tmp_path / "large", {"sft": (0.5,), "rkl": (0.5,)})
    with ChatServer(better_response) as server:
        here.succeeds(
            *command(large, server, "--against", f"{small}:rkl", "-t", "0.5", "-y", "-o", str(tmp_path / "o"))
        )
    (rate,) = judged_rates(load(tmp_path / "o"))
    assert (rate.policy, rate.against, rate.win_rate, rate.tied) == ("rkl", f"{small}:rkl", 0.5, 1.0)  # the same texts


def test_a_function_judges_a_run_and_agrees_with_itself(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run_judges.py").write_text(
        "def longer(prompt, response_a, response_b):\n"
        "    return 'E' if len(response_a) == len(response_b) else 'AB'[len(response_b) > len(response_a)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = make_run(tmp_path / "run", {"sft": (0.5,), "rkl": (0.5,), "semantic": (0.5,)})
    more = ["--function", "run_judges:longer", "--all", "--both-orders"]
    finished = here.succeeds("judge", str(run), "--against", "rkl", "--against", "sft", *more)
    folder = run / "evaluations" / "judge-longer-vs-rkl-sft"
    rates = rates_of(folder)
    # The name of the model is in the response: rkl and sft are as long, semantic is longer.
    assert {key: rate.won for key, rate in rates.items()} == {
        ("semantic", 0.5, "rkl"): 1.0, ("rkl", 0.5, "sft"): 0.0, ("semantic", 0.5, "sft"): 1.0
    }  # fmt: skip
    tied = rates["rkl", 0.5, "sft"]
    assert (tied.tied, tied.comparisons, tied.prompts, tied.won_se_draws) == (1.0, 2 * PROMPTS, PROMPTS, None)
    assert "better: semantic at 0.5" in finished.stdout
    assert "not told apart: rkl at 0.5" in finished.stdout
    assert "over the" not in finished.stdout  # one draw has no standard error over draws
    again = here.succeeds(
        "judge", str(run), "--against", "sft", "--policy", "semantic", *more, "--agree-with", str(folder)
    )
    assert f"Agreement with {folder}: 1.000 of {PROMPTS} pairs" in again.stdout


def test_what_is_left_out_is_said(here: Here, tmp_path: Path) -> None:
    stages = {"rkl": "done", "js": "done", "late": "running"}
    run = make_run(tmp_path / "run", {"sft": (0.5,), "rkl": (0.5,)}, stages)
    (run / "generations" / "js-t0.5.jsonl.partial").write_text("{}\n")
    finished = here.succeeds(*command(run, "http://127.0.0.1:9/v1", "--against", "sft", "--dry-run"))
    assert "30 comparisons (1 policy against sft; temperature 0.5)" in finished.stderr
    assert f"js has no finished file of responses, and is left out (`wpr generate {run} -p js`" in finished.stderr
    assert "policy late is not finished, and is left out\n" in finished.stderr
    assert "js-t0.5.jsonl.partial is not finished, and left out" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}"], "name it with --against, as --against sft (it has sft, rkl, late, js)"),
        (["{run}", "--against", "rlk"], "--against rlk: {run} has no model rlk; did you mean rkl?"),
        (["{run}", "--against", "sft", "-p", "rk"], "--policy rk: {run} has no model rk; did you mean rkl?"),
        (["{run}", "--against", "late"], "finish it with `wpr run`, then draw them with `wpr generate {run} -p late`"),
        (["{run}", "--against", "sft", "-t", "0.7"], "only at 0.5, 1; draw them with `wpr generate {run} -t 0.7`"),
        (["{run}", "--against", "js"], "{run} has no two models to compare: rkl against js at temperature"),
        (["{run}", "--against", "sft", "--prompts", "99"], "rkl against sft at temperature 0.5: a draw of 99 prompts"),
        (["{run}", "{file}"], "{run} is a folder; name two files of responses, or a run's folder alone"),
        (["{file}"], "{file} is judged against nothing"),
        (["{file}", "{file}", "--against", "sft"], "--against, --policy and --temperature are of a run"),
        (["{other}", "--against", "sft"], "{other} is not a run folder: it has no manifest.json"),
        (["{empty}", "--against", "sft"], "responses yet; draw them with `wpr generate {empty}`"),
        (["{run}", "--against", "{empty}:sft"], "--against {empty}:sft: sft has no finished file of responses"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(here: Here, tmp_path: Path, arguments: list[str], message: str) -> None:
    run = make_run(
        tmp_path / "run", {"sft": (0.5,), "rkl": (0.5,), "js": (1.0,)}, {"rkl": "done", "late": "failed"}
    )  # fmt: skip
    places = {"run": run, "file": run / "generations" / "rkl-t0.5.jsonl", "other": tmp_path / "other",
              "empty": make_run(tmp_path / "empty", {})}  # fmt: skip
    places["other"].mkdir()
    given = [text.format(**places) for text in arguments]
    finished = here("judge", *given, "--judge", "test", "--base-url", "http://127.0.0.1:9/v1")
    assert finished.code == 2
    assert message.format(**places) in finished.error


def test_a_file_that_is_not_what_its_name_says(here: Here, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"sft": (0.5,), "rkl": (0.5,)})
    (run / "generations" / "rkl-t0.5.jsonl").rename(run / "generations" / "rkl-t1.jsonl")
    (run / "generations" / "sft-t0.5.jsonl").rename(run / "generations" / "sft-t1.jsonl")
    finished = here(*command(run, "http://127.0.0.1:9/v1", "--against", "sft", "-y"))
    assert "rkl-t1.jsonl was drawn at temperature 0.5, its name says 1" in finished.error
