"""`wpr mt-bench` end to end: eighty questions, two turns, graded by servers that behave and by one that does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands.learned import judge_of_one_rating
from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, error, reply
from tests.evaluation.judging.served import serving
from tests.evaluation.mt_bench.eighty import questions, write
from tests.pipeline.command import Here
from wpr import pico
from wpr.findings import load
from wpr.runs.responses import read_responses

SHORT = ["--max-new-tokens", "12", "--batch-size", "40"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of questions; answers come with the first test."""
    folder = tmp_path_factory.mktemp("mt-bench")
    write(folder / "question.jsonl")
    return folder


def command(folder: Path, *more: str) -> list[str]:
    model = f"story={pico.path()}"
    return ["mt-bench", "-m", model, "-q", str(folder / "question.jsonl"), "-o", str(folder / "out"), *SHORT, *more]


def by_length(request: Request) -> Behaviour:
    """A rating that hangs on the question, so that mixed-up answers would be seen."""
    asked = re.findall(r"=== QUESTION(?: \d)? ===\n(.*)\n", request.text)[-1]
    return reply(f"As long as it is. Rating: [[{1 + len(asked) % 10}]]")


def expected() -> dict[str, float]:
    ratings: dict[str, list[int]] = {}
    for row in questions():
        for turn in row["turns"]:
            ratings.setdefault(row["category"], []).append(1 + len(turn) % 10)
    return {name: sum(own) / len(own) for name, own in ratings.items()}


def test_eighty_questions(here: Here, answered: Path) -> None:
    with ChatServer(by_length) as server:
        judge = ["--judge", "tester", "--base-url", server.address]
        dry = here.succeeds(*command(answered, *judge, "--dry-run"))
        assert not server.requests
        assert "160 requests" in dry.stderr
        refused = here(*command(answered, *judge))
        assert refused.code == 2
        assert "--yes" in refused.error
        finished = here.succeeds(*command(answered, *judge, "--yes"))
        assert len(server.requests) == 160
        assert set(server.times.values()) == {1}
        here.succeeds(*command(answered, *judge, "--yes"))
        assert len(server.requests) == 160  # nothing is asked twice
        texts = [request.text for request in server.requests]
    assert sum("REFERENCE ANSWER" in text for text in texts) == 40
    finding = load(answered / "out" / "mt-bench-tester")
    rows = {row[1]: dict(zip(finding.columns, row, strict=True)) for row in finding.rows}
    assert {name: row["score"] for name, row in rows.items() if name != "all"} == pytest.approx(expected())
    assert (rows["all"]["questions"], rows["all"]["graded"], rows["all"]["unparsable"]) == (80, 160, 0)
    assert "MT-Bench, graded by tester" in finished.stdout
    assert (answered / "out/mt-bench-tester/MT-Bench-by-category.svg").read_text().startswith("<svg")
    data = [json.loads(line) for line in (answered / "out/mt-bench-tester/data.jsonl").read_text().splitlines()]
    assert len(data) == 160
    first, second = (read_responses(answered / "out" / "answers" / f"story-turn{turn}.jsonl") for turn in (1, 2))
    assert {row.temperature for row in first.rows} == {0.0, 0.1, 0.7}
    for one, two in zip(first.rows, second.rows, strict=True):
        assert [turn["content"] for turn in two.prompt][:2] == [one.prompt[0]["content"], one.response]  # type: ignore[index]
        assert two.temperature == one.temperature


def test_what_a_judge_does_not_answer_is_seen(here: Here, answered: Path) -> None:
    """Math gets no rating, of stem the first requests fail and are repaired by a second run."""
    broken = True

    def behave(request: Request) -> Behaviour:
        if " times 7?" in request.body["messages"][0]["content"]:
            return reply("I like it.")
        if "climate" in request.body["messages"][0]["content"] and broken:
            return error(400, "too long")
        return reply("[[6]]")

    with ChatServer(behave) as server:
        judge = ["--judge", "sulky", "--base-url", server.address, "--yes"]
        finished = here(*command(answered, *judge))
        assert finished.code == 1
        assert "20 of 160 answers were not graded (HTTP 400: too long)" in finished.stderr
        sent = len(server.requests)
        assert sent == 160 + 20  # math was asked once more each
        broken = False
        again = here.succeeds(*command(answered, *judge))
        assert len(server.requests) == sent + 20
    assert "Warning: 20 of 160 answers of story have no rating" in again.stdout
    finding = load(answered / "out" / "mt-bench-sulky")
    rows = {row[1]: dict(zip(finding.columns, row, strict=True)) for row in finding.rows}
    assert (rows["math"]["score"], rows["math"]["unparsable"]) == (None, 20)
    assert (rows["stem"]["score"], rows["stem"]["failed"], rows["all"]["unparsable"]) == (6.0, 0, 20)


def test_a_rubric_of_ones_own(here: Here, answered: Path, tmp_path: Path) -> None:
    rubric = tmp_path / "mine.yaml"
    rubric.write_text(
        "first: {user: 'One [[5]] {question} | {answer}'}\n"
        "second: {system: Strict., user: 'Two [[5]] {question_1} {answer_1} {question_2} | {answer_2}'}\n"
    )
    with ChatServer(lambda request: reply(f"[[{2 if request.text.startswith('One') else 4}]]")) as server:
        judge = ["--judge", "mine", "--base-url", server.address, "--rubric", str(rubric), "--yes"]
        here.succeeds(*command(answered, *judge))
        assert len(server.requests) == 160
        roles = {tuple(turn["role"] for turn in request.body["messages"]) for request in server.requests}
    assert roles == {("user",), ("system", "user")}
    finding = load(answered / "out" / "mt-bench-mine")
    assert {tuple(row[3:7:2]) for row in finding.rows} == {(3.0, 2.0)}
    assert finding.settings["rubric"]["templates"]["second"]["system"] == "Strict."


def test_a_function_as_the_judge(here: Here, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_judges.py").write_text(
        "def grade(questions, answers, reference, category, turn):\n    return 3 if reference is None else 9\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    here.succeeds(*command(answered, "--function", "our_judges:grade"))
    finding = load(answered / "out" / "mt-bench-grade")
    scores = {row[1]: row[3] for row in finding.rows}
    assert (scores["math"], scores["reasoning"], scores["writing"]) == (9, 9, 3)


def test_of_a_run_with_its_own_temperatures(here: Here, own_run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "question.jsonl")
    here.succeeds("mt-bench", str(own_run), "-q", str(path), "--limit", "4", *SHORT, "-t", "writing=0", "-t", "1.0")
    files = sorted(path.name for path in (own_run / "generations" / "mt-bench").iterdir())
    assert files == [f"{model}-turn{turn}.jsonl" for model in ("rkl", "sft") for turn in (1, 2)]
    rows = read_responses(own_run / "generations/mt-bench/rkl-turn2.jsonl").rows
    assert [row.temperature for row in rows] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "PICO", "-o", "OUT"], "no questions"),
        (["-m", "PICO", "-q", "QUESTIONS"], "-o"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-t", "hot"], "neither a number nor CATEGORY=NUMBER"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-t", "poetry=1"], "which no question has"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT"], "positions"),  # 1,024 new tokens
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-j", "gpt-4o", "--key-variable", "NOT_SET"], "NOT_SET"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "--function", "nowhere:f"], "cannot be imported"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "--rubric", "QUESTIONS"], "name it with --judge"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-j", "x", "--base-url", "http://localhost:1/v1", "--rubric",
          "OUT"], "out is no file; name a YAML file"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "--function", "a:b", "-j", "x"], "leave them out"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "--base-url", "http://localhost:1/v1"], "name its model"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-j", "x", "--base-url", ""], "base URL '' must start with"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-j", "x", "--price-in", "1"], "--price-out go together"),
        (["-m", "PICO", "-q", "QUESTIONS", "-o", "OUT", "-j", "x", "--base-url", "http://localhost:1/v1", "--set",
          "x"], "NAME=VALUE"),
    ],
)  # fmt: skip
def test_mistakes(here: Here, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {"PICO": pico.path(), "QUESTIONS": write(tmp_path / "q.jsonl"), "OUT": tmp_path / "out"}
    finished = here("mt-bench", *(str(places.get(one, one)) for one in arguments))
    assert finished.code in (1, 2)
    assert message in finished.error


def test_eighty_questions_before_a_real_server(here: Here, answered: Path, tmp_path: Path) -> None:
    """`transformers serve` with a real, if simple-minded, model: it rates everything 7."""
    judge = judge_of_one_rating(tmp_path / "judge", "7")
    with serving(tmp_path / "log") as address:
        more = ["--judge", str(judge), "--base-url", address, "--set", "max_tokens=3", "--yes"]
        here.succeeds(*command(answered, *more))
    finding = load(answered / "out" / "mt-bench-judge")
    rows = {row[1]: dict(zip(finding.columns, row, strict=True)) for row in finding.rows}
    assert len(rows) == 9
    assert (rows["all"]["graded"], rows["all"]["unparsable"], rows["all"]["failed"]) == (160, 0, 0)
    assert {row["score"] for row in rows.values()} == {7.0}
