"""The report's section on wording, and what the summary says of runs with a list of forbidden words."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from tests.report.reading import SECTIONS, Page, report, table
from tests.report.rewriting_run import INSTEAD, SENTENCES, change, pieces, write_rewriting
from tests.report.run_folder import write_json, write_lines, write_run
from tests.report.test_broken_runs import ATTACK, junk
from wpr.report.comparisons import mean_difference
from wpr.report.wording import token_at
from wpr.runs.tolerant import Problems, read_run

HEADINGS = ("What policies write instead", "How much of the meaning is left", "Sentence by sentence")


def section(page: Page) -> str:
    return re.search(r'<section id="wording".*?</section>', page.source, re.S)[0]  # type: ignore[index]


def text_of(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", "", markup).split())


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rewriting(tmp_path_factory.mktemp("rewriting") / "rewrite")


def test_what_was_forbidden_and_what_stands_there(rewriting: Path, tmp_path: Path) -> None:
    page, problems = report(rewriting, csv=tmp_path)
    assert problems == []
    assert [name for name in page.ids if name in (*SECTIONS, "wording")][:3] == ["summary", "wording", "training"]
    part = section(page)
    chips = re.findall(r"<li[^>]*>(.*?)</li>", part)
    assert [text_of(chip) for chip in chips] == [
        "big 6", "happy 3", "nice (weight 2) 2", "in order to 1", "unused 0",
    ]  # fmt: skip
    rows = [row for row in re.findall(r"<tr>(.*?)</tr>", part) if "<mark>" in row]
    assert text_of(rows[0].replace("<t", " <t")) == "big 6 odd 6 large 6"
    assert text_of(rows[2].replace("<t", " <t")) == "nice 2 kept 2 kind 2"
    counted = {(row["policy"], row["forbidden"], row["outcome"]): row for row in table(tmp_path / "replaced_words.csv")}
    assert counted["sum", "big", "replaced"]["instead"] == "large"
    assert counted["sum", "big", "replaced"]["count"] == "6"
    assert counted["rkl", "nice", "kept"]["count"] == "2"


def test_how_much_of_the_meaning_is_left(rewriting: Path, tmp_path: Path) -> None:
    page, _ = report(rewriting, csv=tmp_path)
    rows = {row["model"]: row for row in table(tmp_path / "wording.csv")}
    assert list(rows) == ["the sentences themselves", "SFT", "rkl", "sum"]
    assert list(rows["rkl"]) == [
        "model", "forbidden words per sentence", "meaning (wordllama)", "words kept", "copies", "KL per token",
    ]  # fmt: skip
    per_sentence = {name: float(row["forbidden words per sentence"]) for name, row in rows.items()}
    assert per_sentence == pytest.approx({"the sentences themselves": 1, "SFT": 1, "rkl": 3 / 12, "sum": 1 / 12})
    assert float(rows["sum"]["meaning (wordllama)"]) == pytest.approx(1 - 11 / 12 / 10)
    assert float(rows["rkl"]["copies"]) == pytest.approx(5 / 12)
    assert all(heading in section(page) for heading in HEADINGS)


def test_examples_are_the_first_with_a_forbidden_word(rewriting: Path) -> None:
    page, _ = report(rewriting)
    articles = re.findall(r'<article class="rewrite">(.*?)</article>', section(page))
    shown = [text_of(re.findall(r'class="text">(.*?)</span>', article)[0]) for article in articles]
    assert shown == [SENTENCES[number] for number in (0, 2, 3, 4, 5, 6, 7, 9, 10, 11)]
    assert "The <mark>big</mark> dog ran home." in articles[0]
    ins = '<a href="#tokens" data-study="1" data-token="1" title="Open in the token view"><ins>large</ins></a>'
    assert f"The {ins} dog ran home." in articles[0]
    assert "<ins>large</ins>, <ins>large</ins> hat" in articles[4], "no study of it is on the page"
    assert "data-study" not in "".join(articles[3:])


def test_links_name_the_token_that_begins_the_word(tmp_path: Path) -> None:
    sentences = ["The big dog.", "Big dogs ran.", "A big, happy cat.", *SENTENCES]
    instead = {"rkl": {"big": "large", "Big": "Wide", "happy": "nice"}, "sum": {"big": "odd"}}
    page, _ = report(write_rewriting(tmp_path / "run", instead, sentences=sentences))
    studies = page.data["studies"]
    links = re.findall(r'data-study="(\d+)" data-token="(\d+)"[^>]*><(?:ins|mark)>(\w+)<', section(page))
    assert {word for _, _, word in links} == {"large", "wide", "Wide", "nice", "odd"}
    for study, token, word in links:
        tokens = [one["text"] for one in studies[int(study)]["tokens"]]
        assert word.lower().startswith(tokens[int(token)].strip().lower())


def test_token_at() -> None:
    tokens = pieces("The large dog.")
    assert [tokens[token_at(tokens, "The large dog.", at) or 0] for at in (0, 4, 7, 13)] == ["The", " la", "rge", "."]
    assert token_at([" The", " dog"], "The dog", 0) == 0, "a space before the text is none of it"
    assert token_at(["The", " dog"], "The dog ran", 4) == 1, "a response whose tokens are cut off"
    assert token_at(["The", " dog"], "The dog ran", 8) is None
    assert token_at(["The", "dog"], "The dog", 4) is None, "tokens that do not spell the text"
    assert token_at([], "The dog", 0) is None


def test_the_summary_says_it_in_words(rewriting: Path) -> None:
    page, _ = report(rewriting)
    verdict = page.text[: page.text.index("Policies on held-out prompts")]
    assert "Forbidden words per sentence: SFT, before training, 1; rkl 0.25; sum 0.0833." in verdict
    kept = "Of the sentence's meaning (wordllama) is kept: SFT, before training, 1; rkl 0.925; sum 0.908."
    assert kept in verdict
    assert "loses to the SFT model" not in verdict, "who lost meaning to the SFT model says nothing at another reward"
    assert "are at the same reward as far as 12 prompts can tell: their mean scores differ by 0.333 (95%" in verdict
    assert "Score is the word list's score, minus the weights of a response's forbidden words" in page.text
    assert "word list's score over KL" in page.text
    assert "reward model" not in page.text


def test_rewards_that_differ_are_not_compared(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run", {"rkl": {}, "sum": INSTEAD["sum"]})
    page, _ = report(run)
    assert "sum and rkl are not at the same reward: their mean scores differ by 1" in page.text
    assert "can be compared" not in page.text
    change(run / "ppo/rkl/responses.jsonl", score=-1.0)
    change(run / "ppo/sum/responses.jsonl", score=-1.0)
    page, _ = report(run)
    same = "rkl and sum are at the same reward as far as 12 prompts can tell: their mean scores differ by 0 (95% "
    same += "interval 0 to 0)."
    assert f"{same} Their meaning can be compared: rkl keeps 0.0917" in page.text


def test_the_interval_of_a_difference(tmp_path: Path) -> None:
    """Two of each prompt count as one: the interval is that of half as many."""
    found = {}
    for times in (1, 2):
        run = write_rewriting(tmp_path / f"run{times}", sentences=SENTENCES * times)
        record = read_run(run, Problems())
        assert record is not None
        found[times] = mean_difference(record.policies[1], record.policies[0], "score")
        assert mean_difference(record.policies[0], record.policies[1], "none") is None
    scores = [(2.0 if "nice" in one else 0.0) for one in SENTENCES]
    mean = sum(scores) / 12
    error = (sum((one - mean) ** 2 for one in scores) / 11 / 12) ** 0.5
    for one in found.values():
        assert one is not None
        assert (one.mean, one.low, one.high) == pytest.approx((mean, mean - 1.96 * error, mean + 1.96 * error))


def test_few_prompts_say_nothing_of_rewards(tmp_path: Path) -> None:
    page, _ = report(write_rewriting(tmp_path / "run", sentences=SENTENCES[:5]))
    assert "are at the same reward is not known: they share fewer than 10 prompts" in page.text


def test_of_many_policies_the_ends_are_compared(tmp_path: Path) -> None:
    many = {f"p{number}": INSTEAD["sum"] if number % 2 else {} for number in range(7)}
    page, _ = report(write_rewriting(tmp_path / "run", many))
    assert section(page).count("same reward:") == 2, "one sentence, and the rule"
    assert "Of 7 policies the highest and the lowest score: p1 and p6 are not at the same reward" in page.text
    assert "Of 7 policies, those with the fewest and the most forbidden words are named." in page.text
    assert "per sentence: SFT, before training, 1; p1 0.0833; p6 1." in page.text


def test_runs_without_a_list_have_no_such_section(whole: Path) -> None:
    page, _ = report(whole)
    assert "wording" not in page.ids
    assert "#wording" not in page.source
    assert "Score is the reward model's mean over held-out responses; gold" in page.text
    assert "reward model's score over KL" in page.text


def test_several_runs(rewriting: Path, tmp_path: Path) -> None:
    same = write_rewriting(tmp_path / "second")
    other = write_rewriting(tmp_path / "third", {"js": {"dog": "cat"}}, words="dog\n")
    plain = write_run(tmp_path / "stories", ["paper"], prompts=3, steps=3)
    page, problems = report(rewriting, same, other, plain, csv=tmp_path / "csv")
    assert problems == []
    assert "The list of rewrite: rkl, rewrite: sum, second: rkl, second: sum" in page.text
    assert "The list of js" in page.text
    first = [row["model"] for row in table(tmp_path / "csv/wording-1.csv")]
    assert first[1:] == ["rewrite: SFT", "second: SFT", "rewrite: rkl", "rewrite: sum", "second: rkl", "second: sum"]
    assert len(table(tmp_path / "csv/wording-2.csv")) == 3
    assert "score over KL" in page.text
    assert "reward model's" not in page.text, "the score is another one in each run"


def test_meaning_by_another_encoder_is_not_mixed(rewriting: Path, tmp_path: Path) -> None:
    other = write_rewriting(tmp_path / "second")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["recipe"]["evaluation"]["gold"]["encoder"] = "minilm"
    write_json(other / "manifest.json", manifest)
    report(rewriting, other, csv=tmp_path / "csv")
    first, second = (table(tmp_path / f"csv/wording-{number}.csv")[-1] for number in (1, 2))
    assert "meaning (wordllama)" in first
    assert "meaning (minilm)" in second


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_files_hold_there_is_a_page(rewriting: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.copytree(rewriting, tmp_path / "run")
    share = rng.choice([0.01, 0.1])
    for path in sorted((tmp_path / "run").rglob("*.*")):
        if path.suffix == ".json":
            write_json(path, junk(json.loads(path.read_text()), rng, share / 3))
        elif path.suffix == ".jsonl":
            write_lines(path, [junk(json.loads(line), rng, share) for line in path.read_text().splitlines()])
    page, _ = report(tmp_path / "run", csv=tmp_path / "csv")
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS


def test_without_sources(tmp_path: Path) -> None:
    page, problems = report(write_rewriting(tmp_path / "run", sources=False, watched=False, studies=0))
    assert problems == []
    assert "Responses have no sentence to be compared with" in page.text
    assert "big 6" in text_of(section(page)), "counted in what the SFT model wrote"
    assert "Forbidden words per response: SFT, before training, 1; rkl 0.25; sum 0.0833." in page.text
    assert not any(heading in section(page) for heading in HEADINGS)


def test_the_prompt_may_be_the_source(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run", sources=False)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["recipe"]["evaluation"]["gold"]["of"] = "prompt"
    write_json(run / "manifest.json", manifest)
    for path in run.glob("ppo/*/responses*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        chat = [{"role": "system", "content": "Rewrite."}, {"role": "user", "content": ""}]
        write_lines(path, [row | {"prompt": [chat[0], chat[1] | {"content": row["prompt"]}]} for row in rows])
    page, problems = report(run)
    assert problems == []
    assert "<ins>large</ins>" in section(page)
    assert "Rewrite." not in section(page)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"# nothing\n", "is empty"),
        (b"a = -1\n", "the weight"),
    ],
)
def test_a_damaged_list(tmp_path: Path, content: bytes | None, message: str) -> None:
    run = write_rewriting(tmp_path / "run")
    for path in run.glob("ppo/*/words.txt"):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    page, problems = report(run)
    assert len(problems) == 2
    for problem in problems:
        assert message in problem
        assert "run the policy's stage again to write the list again" in problem
    assert "There is no list of forbidden words to read." in page.text


def test_a_list_of_one_policy_alone_and_no_manifest(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run")
    (run / "manifest.json").unlink()
    (run / "ppo/rkl/words.txt").unlink()
    page, problems = report(run)
    assert len(problems) == 1, "that of the manifest"
    assert "<ins>large</ins>" in section(page)
    assert "<ins>odd</ins>" not in section(page)


def test_an_unfinished_run(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["stages"]["ppo/sum"] |= {"status": "running", "results": {}}
    write_json(run / "manifest.json", manifest)
    for path in (run / "ppo/sum").iterdir():
        path.unlink()
    page, problems = report(run)
    assert len(problems) == 1
    assert "<ins>odd</ins>" in section(page)


def test_text_of_files_is_only_text(tmp_path: Path) -> None:
    hostile = {"dog": ATTACK, "home": "<b>x</b>"}
    run = write_rewriting(tmp_path / "run", {"<i>rkl": {}, "sum": {}}, sentences=[f"The big dog {ATTACK} ran home."])
    for path in run.glob("ppo/*/responses*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["response"] = row["response"].replace("dog", hostile["dog"]).replace("home", hostile["home"])
        write_lines(path, rows)
    page, _ = report(run)
    assert "<img" not in page.source
    assert "<i>rkl" not in page.source
    assert "<b>x" not in page.source
    assert page.source.count("<script") == 2
    assert "&lt;img" in section(page)


def test_long_responses_are_cut(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run")
    for path in run.glob("ppo/*/responses.jsonl"):
        change(path, response="The big dog. " * 5000)
    page, _ = report(run)
    assert len(section(page)) < 200_000
    assert "…" in section(page)
