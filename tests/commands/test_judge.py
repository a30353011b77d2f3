"""`wpr judge` as users meet it: what it prints and writes, what it costs, kills and interruptions, judges that are
exposed.
"""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.judging.asked import (
    AWKWARD,
    KEY,
    better_response,
    choice_by_quality,
    lines_of,
    response_files,
    written,
)
from tests.evaluation.judging.leaks import FORMS, reveals
from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, cut_before_answering, error, raw, reply
from tests.pipeline.command import Finished, Here, start
from wpr.evaluation.judging.answer_cache import AnswerCache, key_of
from wpr.evaluation.judging.questions import JudgingError
from wpr.evaluation.judging.server import ServerJudge
from wpr.findings import Finding, load


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def command(files: tuple[Path, Path], server: ChatServer, output: Path, *more: str) -> list[str]:
    return ["judge", *map(str, files), "--judge", "test", "--base-url", server.address, "-o", str(output), "-y", *more]


def value(finding: Finding, name: str) -> Any:
    """The value of a row of the table."""
    return next(row[1] for row in finding.rows if row[0] == name)


def everything_in(folder: Path) -> str:
    return "".join(path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file())


def test_the_papers_protocol(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 300, better=0.7)
    with ChatServer(better_response) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", "--rubric", "summary"))
    finding = load(tmp_path / "out")
    assert finding.name == "judge-test-ours-t0.5-vs-theirs-t0.5"
    rows = lines_of(tmp_path / "out" / "data.jsonl")
    assert len(rows) == 250
    merit = {row["prompt_id"]: "quality 9" in row["response"] for row in lines_of(files[0])}
    assert all((row["winner"] == "ours") == merit[row["prompt_id"]] for row in rows)
    rates = [sum(merit[row["prompt_id"]] for row in rows if row["draw"] == draw) / 50 for draw in range(5)]
    assert [value(finding, f"win rate of draw {number}") for number in range(1, 6)] == pytest.approx(rates)
    assert value(finding, "win rate") == pytest.approx(sum(rates) / 5)
    mean = sum(rates) / 5
    error_of_mean = (sum((rate - mean) ** 2 for rate in rates) / 4 / 5) ** 0.5
    assert value(finding, "standard error over draws") == pytest.approx(error_of_mean)
    assert "By this judge, ours-t0.5 wins." in finished.stdout
    assert "Warning" not in finished.stdout
    for name in ("table.csv", "win-rate.svg", "position-bias.svg", "answers.jsonl"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    with (tmp_path / "out" / "table.csv").open() as file:
        assert next(csv.reader(file)) == ["figure", "value", "low", "high", "note"]
    asked = {(row["prompt_id"], row["first_place"]) for row in rows}
    assert len(server.requests) == len(asked) < 250  # a comparison that comes again in another draw is asked once


def test_it_lands_in_the_run(here: Here, tmp_path: Path) -> None:
    (tmp_path / "run" / "generations").mkdir(parents=True)
    (tmp_path / "run" / "manifest.json").write_text("{}")
    files = response_files(tmp_path / "run" / "generations", 60)
    with ChatServer(better_response) as server:
        arguments = command(files, server, tmp_path)
        place = arguments.index("-o")
        here.succeeds(*arguments[:place], *arguments[place + 2 :])
    assert (tmp_path / "run/evaluations/judge-test-ours-t0.5-vs-theirs-t0.5/finding.json").is_file()


@pytest.mark.parametrize("more", [["--both-orders"], [], ["--all"], ["--all", "--both-orders"]])
def test_a_judge_that_always_says_a_is_exposed(here: Here, tmp_path: Path, more: list[str]) -> None:
    files = response_files(tmp_path, 100, better=0.9)
    with ChatServer(lambda request: reply(written("A", request))) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", *more))
    finding = load(tmp_path / "out")
    assert value(finding, "win rate") == 0.5
    assert value(finding, "position bias") == 1.0
    assert value(finding, "position bias p") < 1e-6
    assert "Warning: the judge prefers place A. It chose the response there in 100% of" in finished.stdout
    assert "cannot be told apart" in finished.stdout


def test_a_judge_that_always_says_b_is_exposed(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 100)
    with ChatServer(lambda request: reply(written("B", request))) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", "--both-orders"))
    finding = load(tmp_path / "out")
    assert (value(finding, "win rate"), value(finding, "position bias")) == (0.5, 0)
    assert value(finding, "place B won both times") == 1
    assert "prefers place B" in finished.stdout


def test_ties_are_shown_and_count_half(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 50, better=0.5)

    def behave(request: Request) -> Behaviour:
        number = int(request.text.split("prompt ")[1].split("?")[0])
        return reply("E" if number < 20 else choice_by_quality(request.text))

    with ChatServer(behave) as server:
        here.succeeds(*command(files, server, tmp_path / "out", "--all", "--rubric", "summary"))
    finding = load(tmp_path / "out")
    wins = sum(row["winner"] == "ours" for row in lines_of(tmp_path / "out" / "data.jsonl"))
    assert value(finding, "ties") == 20
    assert value(finding, "win rate") == pytest.approx((wins + 10) / 50)
    assert value(finding, "won outright") == pytest.approx(wins / 50)


def test_unreadable_answers_are_counted_and_shown(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 40, better=1.0)

    def behave(request: Request) -> Behaviour:
        number = int(request.body["messages"][0]["content"].split("prompt ")[1].split("?")[0])
        return reply("I like both!") if number < 10 else better_response(request)

    with ChatServer(behave) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", "--all"))
    finding = load(tmp_path / "out")
    assert value(finding, "comparisons") == 40
    assert value(finding, "answered and read") == 30
    assert value(finding, "unreadable") == 10
    bounds = next(row for row in finding.rows if row[0] == "win rate, whatever the missing say")
    assert bounds[1:4] == [1.0, 0.75, 1.0]
    assert "Warning: 10 of 40 answers could not be read" in finished.stdout
    rows = [row for row in lines_of(tmp_path / "out" / "data.jsonl") if row["status"] == "unreadable"]
    assert [row["texts"] for row in rows] == [["I like both!"] * 2] * 10
    assert len(server.requests) == 30 + 2 * 10


def test_nothing_readable_at_all(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 6)
    with ChatServer(lambda request: reply("???")) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", "--all"))
    assert "No comparison has a verdict, so that there is no win rate." in finished.stdout
    assert load(tmp_path / "out").figures == []


def test_failures_are_shown_the_exit_code_says_so_and_a_rerun_asks_only_for_these(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 30)

    def behave(request: Request) -> Behaviour:
        return error(500, "overloaded") if "prompt 7?" in request.text else better_response(request)

    with ChatServer(behave) as server:
        arguments = command(files, server, tmp_path / "out", "--all", "--attempts", "1")
        finished = here(*arguments)
        assert finished.code == 1
        message = "Incomplete: 1 of 30 comparisons have no answer (HTTP 500: overloaded (attempt 1 of 1))."
        assert message in finished.stderr
        assert "Incomplete: 1 of 30 comparisons have no answer. Run the same command again" in finished.stdout
        assert value(load(tmp_path / "out"), "failed") == 1
        sent = len(server.requests)
        server.behave = better_response
        here.succeeds(*arguments)
        assert len(server.requests) == sent + 1
    assert value(load(tmp_path / "out"), "answered and read") == 30


def test_a_wrong_key_stops_with_one_paragraph(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    with ChatServer(lambda request: error(401, f"wrong key {request.headers['authorization']}")) as server:
        finished = here(*command(files, server, tmp_path / "out"))
    assert finished.code == 1
    assert "refused the model 'test' with HTTP 401: wrong key Bearer [key removed]; check the key" in finished.error
    assert KEY not in finished.stdout + finished.stderr + everything_in(tmp_path)


def test_a_traceback_does_not_show_the_key(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    server = ChatServer(lambda request: error(403, f"wrong key {request.headers['authorization']}"))
    with server, pytest.raises(JudgingError) as caught:
        here(*command(files, server, tmp_path / "out"), "--debug")
    printed = "".join(traceback.format_exception(caught.value))
    assert "HTTP 403: wrong key Bearer [key removed]" in printed
    assert KEY not in printed + everything_in(tmp_path)


@pytest.mark.parametrize("write", FORMS.values(), ids=FORMS.keys())
def test_a_key_that_a_server_gives_away_is_in_no_file_and_not_printed(
    here: Here, tmp_path: Path, write: Callable[[str], str]
) -> None:
    """In why an answer ended, in a choice, in an error, in a header, whatever its form."""
    here.monkeypatch.setenv("OPENAI_API_KEY", AWKWARD)
    files = response_files(tmp_path, 6)
    reason = write(AWKWARD)
    fine = json.dumps({"comparison": reason, "choice": "A"})
    message = {"message": {"content": fine}, "finish_reason": reason}
    behaviours = [
        reply(None, choices=[message]),
        reply(f'{{"comparison": "", "choice": "{reason}"}}'),
        reply(json.dumps({"comparison": "", "choice": reason})),
        error(400, reason),
        error(500, reason),
        raw(b"{}", headers={"x-request-id": reason.replace("\0", "")}),
    ]

    def behave(request: Request) -> Behaviour:
        return behaviours[int(request.body["messages"][0]["content"].split("prompt ")[1].split("?")[0])]

    with ChatServer(behave) as server:
        finished = here(*command(files, server, tmp_path / "out", "--all", "--attempts", "1"))
    rows = lines_of(tmp_path / "out" / "data.jsonl")
    assert sorted(row["status"] for row in rows) in (
        ["failed"] * 3 + ["read"] + ["unreadable"] * 2,
        ["failed"] * 3 + ["unreadable"] * 3,  # where all of the first text had to go
    )
    for text in (finished.stdout, finished.stderr, everything_in(tmp_path / "out")):
        assert reveals(text, AWKWARD) == []


# Kills and interruptions, in processes of their own.


def wait_for(server: ChatServer, count: int, process: subprocess.Popen[str]) -> None:
    """Until the server was asked so often."""
    ends = time.monotonic() + 120
    while len(server.requests) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_thousand_with_kills_none_that_arrived_is_asked_twice_and_the_key_is_nowhere(tmp_path: Path) -> None:
    """16 at a time, from a server that misbehaves, killed (-9) and interrupted (Ctrl-C) in between."""
    files = response_files(tmp_path, 500)
    bad: list[Behaviour] = [error(500), error(429, headers={"retry-after": "0"}), cut_before_answering, raw(b"{")]

    def behave(request: Request) -> Behaviour:
        if request.times == 1 and int(request.key[:8], 16) % 20 == 0:
            return bad[int(request.key[8:16], 16) % len(bad)]
        return better_response(request)

    out = tmp_path / "out"
    written_down: set[str] = set()
    asked_again: list[set[str]] = []
    with ChatServer(behave) as server:
        arguments = command(files, server, out, "--all", "--both-orders", "--rubric", "summary")
        identity = ServerJudge("test", server.address).identity
        for number in (signal.SIGKILL, signal.SIGINT, None):
            before = len(server.requests)
            process = start(*arguments, cwd=tmp_path)
            if number is not None:
                wait_for(server, before + 250, process)
                process.send_signal(number)
            stdout, stderr = process.communicate(timeout=120)
            # The requests' keys are those of the cache: what was on disk before must not have come again.
            asked_again.append({key_of(identity, request.body["messages"]) for request in server.requests[before:]})
            assert not asked_again[-1] & written_down
            cache = AnswerCache.look(out / "answers.jsonl")
            written_down = {key for group in asked_again for key in group if cache.get(key) is not None}
            assert "Traceback" not in stderr
            if number is None:
                assert process.returncode == 0, stderr
            else:
                assert process.returncode == (-9 if number == signal.SIGKILL else 130), stderr
                assert len(written_down) < 1000
        finished = Finished(0, stdout, stderr)
        successes = Counter(request.key for request in server.requests)
        assert len(successes) == 1000
        extra = sum(successes.values()) - 1000
        planned = sum(int(key[:8], 16) % 20 == 0 for key in successes)
        assert extra <= planned + 2 * 16  # bad answers, and at most those that were under way at either end
        assert server.most_under_way <= 16 + 16  # those of a killed process may still be answered
    rows = lines_of(out / "data.jsonl")
    assert len(rows) == 1000
    assert {row["status"] for row in rows} == {"read"}
    assert len((out / "answers.jsonl").read_text().splitlines()) == 1000
    assert KEY not in everything_in(tmp_path) + finished.stdout + finished.stderr
    assert value(load(out), "position bias") == 0


def test_a_second_process_on_the_same_folder_is_refused(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    with ChatServer(better_response) as server:
        arguments = command(files, server, tmp_path / "out")
        (tmp_path / "out").mkdir()
        with AnswerCache(tmp_path / "out" / "answers.jsonl").writing():
            finished = here(*arguments)
        assert finished.code == 1
        assert "another process is asking judges with" in finished.error
        assert server.requests == []


# Cost.


def test_the_estimate_and_the_question_before(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    with ChatServer(better_response) as server:
        arguments = command(files, server, tmp_path / "out", "--all", "--price-in", "2.5", "--price-out", "10")
        finished = here.succeeds(*arguments, "--dry-run")
        assert not (tmp_path / "out").exists()
        words = re.search(r"sent: (\d+) requests, about ([\d,]+) tokens in and at most ([\d,]+) out, at most ([\d.]+)",
                         finished.stderr)  # fmt: skip
        assert words is not None
        requests, into, out = (int(words.group(i).replace(",", "")) for i in (1, 2, 3))
        assert (requests, out) == (60, 60 * 512)
        assert float(words.group(4)) == pytest.approx((into * 2.5 + out * 10) / 1e6, abs=0.005)
        finished = here(*[one for one in arguments if one != "-y"])  # not on a terminal
        assert finished.code == 2
        assert "60 requests would be sent; add --yes to send them" in finished.error
        assert server.requests == []
        here.succeeds(*arguments)
        sent = sum(len(request.text) for request in server.requests)
        assert into == pytest.approx(sent / 3.5 + 4 * 60, abs=60)
        again = here.succeeds(*arguments, "--dry-run")
        assert "to be sent: 0 requests" in again.stderr
        here.succeeds(*[one for one in arguments if one != "-y"])  # nothing to be asked for, nothing to be paid


def test_without_prices_there_are_tokens_only(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    with ChatServer(better_response) as server:
        finished = here.succeeds(*command(files, server, tmp_path / "out", "--dry-run"))
    assert "tokens in and at most" in finished.stderr
    assert "currency" not in finished.stderr


# Other judges, and agreement.


def test_a_function_and_how_far_it_agrees_with_a_server(here: Here, tmp_path: Path) -> None:
    (tmp_path / "my_judges.py").write_text(
        "def better(prompt, response_a, response_b):\n"
        "    a, b = (int(one.split()[-1]) for one in (response_a, response_b))\n"
        "    return 'A' if a > b else 'B' if b > a else 'E'\n"
        "def worse(**given):\n"
        "    return {'A': 'B', 'B': 'A', 'E': 'E'}[better(**given)]\n"
    )
    here.monkeypatch.chdir(tmp_path)
    files = response_files(tmp_path, 80)
    with ChatServer(better_response) as server:
        here.succeeds(*command(files, server, tmp_path / "server", "--seed", "1"))
    for name, share, kappa in (("better", 1.0, 1.0), ("worse", 0.0, None)):
        out = tmp_path / name
        finished = here.succeeds(
            "judge", *map(str, files), "--function", f"my_judges:{name}", "-o", str(out), "--agree-with",
            str(tmp_path / "server"),
        )  # fmt: skip
        finding = load(out)
        assert value(finding, f"agreement with {tmp_path / 'server'}") == share
        found = value(finding, f"Cohen's kappa with {tmp_path / 'server'}")
        assert found == kappa if kappa is not None else found < 0
        assert f"250 comparisons by {name}" in finished.stderr
    assert value(load(tmp_path / "better"), "position bias") == pytest.approx(0.5, abs=0.1)


def test_a_function_whose_answers_cannot_be_read(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why is said at once; nothing was asked again, and there is no row of rates to point to."""
    (tmp_path / "no_judges.py").write_text("def forgets(prompt, response_a, response_b):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    files = response_files(tmp_path, 4)
    out = tmp_path / "out"
    here.succeeds("judge", *map(str, files), "-o", str(out), "--function", "no_judges:forgets", "--all")
    text = " ".join(load(out).text)
    assert "Warning: 4 of 4 answers could not be read. Of the first: 'NoneType None' is not one of the letters" in text
    assert "whatever the missing say" not in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "a judge is one of --judge, --reward-model and --function; none is given"),
        (["--judge", "m", "--function", "a:b"], "--judge and --function are given"),
        (["--function", "nowhere:judge"], "--function='nowhere:judge' cannot be imported"),
        (["--function", "json:dumps", "--set", "a=1"], "--base-url and --set are of servers"),
        (["--judge", "m", "--protocol", "odd"], "--protocol odd must be paper or all"),
        (["--judge", "m", "--rubric", "sumary"], "did you mean summary?"),
        (["--judge", "m", "--prompts", "61"], "a draw of 61 prompts is more than the 60 that both files answer"),
        (["--judge", "m", "--set", "temperature"], "--set temperature must be NAME=VALUE"),
        (["--judge", "m", "--base-url", "http://me:pw@host/v1"], "holds a user name or password"),
        (["--judge", "m", "--base-url", ""], "base URL '' must start with http"),
        (["--judge", "m", "--price-in", "1"], "--price-in and --price-out go together"),
        (["--judge", "m", "--concurrency", "0"], "concurrency=0 must be at least 1"),
        (["--judge", "m", "--agree-with", "none"], "cannot be read (No such file or directory)"),
    ],
)
def test_refusals(here: Here, tmp_path: Path, more: list[str], message: str) -> None:
    files = response_files(tmp_path, 60)
    finished = here("judge", *map(str, files), "-o", str(tmp_path / "out"), "-y", *more)
    assert finished.code == 2
    assert message in finished.error


def test_files_that_do_not_belong_together(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    text = files[1].read_text()
    for old, new, message in (('"p0', '"q0', "no prompt_id in common"), ('"prompt 3?"', '"?"', "is another prompt in")):
        files[1].write_text(text.replace(old, new))
        finished = here("judge", *map(str, files), "--judge", "m", "-o", str(tmp_path / "out"))
        assert finished.code == 2
        assert message in finished.error


def test_no_run_and_no_folder(here: Here, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    finished = here("judge", *map(str, files), "--judge", "m", "-y")
    assert finished.code == 2
    assert "lies in no run's folder; name a folder for the result with -o" in finished.error
