"""The report's section on wording, and what the summary says of runs with a list of forbidden words."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.report.reading import SECTIONS, Page, report, table
from tests.report.rewriting_run import INSTEAD, SENTENCES, WORDS, change, pieces, write_rewriting
from tests.report.run_folder import write_json, write_lines, write_run
from tests.report.test_broken_runs import ATTACK, junk
from wpr.report import token_view
from wpr.report.comparisons import mean_difference, student
from wpr.report.token_view import token_at
from wpr.runs.tolerant import Problems, read_run

HEADINGS = ("How much of the meaning is left", "What policies write instead", "Sentence by sentence")


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
    assert text_of(rows[0].replace("<t", " <t")) == "big 6 odd 100% large 100%"
    assert text_of(rows[2].replace("<t", " <t")) == "nice 2 kept 100% kind 100%"
    counted = {(row["policy"], row["forbidden"], row["outcome"]): row for row in table(tmp_path / "replaced_words.csv")}
    assert counted["sum", "big", "replaced"]["instead"] == "large"
    assert counted["sum", "big", "replaced"]["count"] == "6"
    assert counted["rkl", "nice", "kept"]["count"] == "2"


def test_how_much_of_the_meaning_is_left(rewriting: Path, tmp_path: Path) -> None:
    page, _ = report(rewriting, csv=tmp_path)
    rows = {row["model"]: row for row in table(tmp_path / "wording.csv")}
    assert list(rows) == ["the sentences themselves", "SFT", "rkl", "sum"]
    assert list(rows["rkl"]) == [
        "model", "forbidden words per sentence", "meaning (WordLlama)", "words kept", "copies", "KL per token",
    ]  # fmt: skip
    per_sentence = {name: float(row["forbidden words per sentence"]) for name, row in rows.items()}
    assert per_sentence == pytest.approx({"the sentences themselves": 1, "SFT": 1, "rkl": 3 / 12, "sum": 1 / 12})
    assert float(rows["sum"]["meaning (WordLlama)"]) == pytest.approx(1 - 11 / 12 / 10)
    assert float(rows["rkl"]["copies"]) == pytest.approx(5 / 12)
    assert tuple(re.findall(r"<h3>(.*?)</h3>", section(page))) == HEADINGS


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
    assert "Forbidden words per sentence: SFT 1 before training; rkl 0.25; sum 0.0833." in verdict
    kept = "Meaning kept (WordLlama): SFT 1 before training; rkl 0.925; sum 0.908."
    assert kept in verdict
    assert "loses to the SFT model" not in verdict, "who lost meaning to the SFT model says nothing at another reward"
    assert "cannot be told" not in verdict, "what is compared stands once on the page"
    said = "are at the same reward cannot be told from 12 prompts: their mean scores differ by 0.333 (95%"
    assert page.text.count(said) == 1
    assert "Score is the word list's score, minus the weights of a response's forbidden words" in page.text
    assert "word list's score over KL" in page.text
    assert "reward model" not in page.text


def score(run: Path, policy: str, scores: Sequence[float], **values: Sequence[float]) -> None:
    """Give a policy's responses these scores, in turn, and these other values."""
    path = run / "ppo" / policy / "responses.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {name: given[number % len(given)] for name, given in {"score": scores, **values}.items()}
    write_lines(path, rows)


def test_rewards_that_differ_are_not_compared(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run", {"rkl": {}, "sum": INSTEAD["sum"]})
    text = text_of(section(report(run)[0]))
    assert "sum and rkl are not at the same reward: their mean scores differ by 1.08 (95%" in text
    assert "rkl, with the lower reward, may keep more meaning for that reason alone" in text
    assert "can be compared" not in text


def test_the_same_reward_is_more_than_no_difference_seen(tmp_path: Path) -> None:
    """The SFT model scores -1.167, so that a mean of 0 is a gain of 1.167, of which 15% are 0.175."""
    run = write_rewriting(tmp_path / "run", sentences=SENTENCES * 4)
    prompts = len(SENTENCES)
    for path in run.glob("ppo/*/responses*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [row | {"prompt": f"{row['prompt']}{row['number'] // prompts}"} for row in rows])
    kept = {"rkl": [0.6, 0.7], "sum": [0.7, 0.9]}
    for other, said in (
        (
            [0.1, -0.1],
            "rkl and sum are at the same reward: their mean scores differ by 0 (95% interval \u22120.0293 to ",
        ),
        ([0.0, 0.1], "sum and rkl are at the same reward: their mean scores differ by 0.05 (95% interval 0.0353 to "),
        ([3.0, -3.0], "Whether rkl and sum are at the same reward cannot be told from 48 prompts: their mean scores"),
        ([1.0, 0.5], "sum and rkl are not at the same reward: their mean scores differ by 0.75 (95%"),
        ([-1.0, -0.5], "rkl and sum are not at the same reward: their mean scores differ by 0.75 (95%"),
        ([0.0], "rkl and sum are at the same reward: their scores are the same."),
    ):
        score(run, "rkl", [0.0], gold=kept["rkl"])
        score(run, "sum", other, gold=kept["sum"])
        text = text_of(section(report(run)[0]))
        assert said in text
        if "cannot be told" in said:
            assert "of a gain of 1.17. sum keeps 0.15 (95%" in text
            assert "more meaning; a difference of reward may account for it." in text
        elif "are not" not in said:
            assert "Their meaning can be compared: sum keeps 0.15 (95% interval" in text
        elif said.startswith("sum"):
            assert "sum has both, more reward and more meaning: it keeps 0.15 (95%" in text
        else:
            assert "sum, with the lower reward, may keep more meaning for that reason alone" in text
        assert ("which is within 15% of the 1." in text) == ("are at the same reward: their mean" in said)


@pytest.mark.parametrize(
    ("start", "said"), [(None, "what training gained is not known"), (5.0, "gained nothing (\u2212")]
)
def test_without_a_gain_no_rewards_are_the_same(tmp_path: Path, start: float | None, said: str) -> None:
    run = write_rewriting(tmp_path / "run")
    for path in run.glob("ppo/*/responses-before.jsonl"):
        change(path, score=start)
    text = report(run)[0].text
    assert "Whether sum and rkl are at the same reward cannot be told: their mean scores differ by 0.333" in text
    assert said in text


def test_policies_of_other_starts_are_not_compared(rewriting: Path, tmp_path: Path) -> None:
    other = write_rewriting(tmp_path / "second")
    compared = re.findall(r'class="compared">(.*?)</p>', section(report(rewriting, other)[0]))
    assert [text_of(one).partition(" are ")[0] for one in compared] == [
        "Whether rewrite: sum and rewrite: rkl", "Whether second: sum and second: rkl",
    ]  # fmt: skip
    manifest = json.loads((other / "manifest.json").read_text())
    for number, name in enumerate(INSTEAD):
        manifest["stages"][f"ppo/{name}"]["inputs"] = {"needs": {"sft": str(number)}}
    write_json(other / "manifest.json", manifest)
    assert "same reward cannot" not in report(other)[0].text


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
        reach = 2.20099 * error  # Student's t with 11 degrees of freedom
        assert (one.mean, one.low, one.high) == pytest.approx((mean, mean - reach, mean + reach), abs=1e-3)


@pytest.mark.parametrize(("freedom", "value"), [(9, 2.26216), (19, 2.09302), (99, 1.98422), (10**6, 1.95997)])
def test_student(freedom: int, value: float) -> None:
    assert student(freedom) == pytest.approx(value, abs=5e-3)


def test_few_prompts_say_nothing_of_rewards(tmp_path: Path) -> None:
    page, _ = report(write_rewriting(tmp_path / "run", sentences=SENTENCES[:5]))
    assert "are at the same reward cannot be told: they share fewer than 10 prompts" in page.text


def test_of_many_policies_the_nearest_are_compared(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run", {f"p{number}": INSTEAD["sum"] if number else {} for number in range(7)})
    for number, value in enumerate((-5.0, 0.0, 0.5, 2.0, 2.1, 4.0, 4.3)):
        score(run, f"p{number}", [value, value + 0.01])
    page, _ = report(run)
    compared = [text_of(one) for one in re.findall(r'class="compared">(.*?)</p>', section(page))]
    assert compared[0] == "Of 7 policies, those nearest in score are compared."
    assert [re.findall(r"p\d and p\d", one)[0] for one in compared[1:]] == ["p4 and p3", "p6 and p5", "p2 and p1"]
    assert "Of 7 policies, those with the fewest and the most forbidden words are named." in page.text
    assert "per sentence: SFT 1 before training; p1 0.0833; p0 1." in page.text


def test_runs_without_a_list_have_no_such_section(whole: Path) -> None:
    page, _ = report(whole)
    assert "wording" not in page.ids
    assert 'href="#wording"' not in page.source
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
    assert section(page).count("<h3>") == 2
    assert [text for text in re.findall("<h4>(.*?)</h4>", section(page)) if text in HEADINGS] == [*HEADINGS] * 2
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
    assert "meaning (WordLlama)" in first
    assert "meaning (MiniLM)" in second


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
    assert "Forbidden words per response: SFT 1 before training; rkl 0.25; sum 0.0833." in page.text
    assert not any(heading in section(page) for heading in HEADINGS)
    assert "meaning" not in text_of(section(page)).lower()


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


def test_shares_are_of_what_each_policy_had(tmp_path: Path) -> None:
    """Two responses per sentence: a word occurs once in the sentences and twice in what is rewritten."""
    run = write_rewriting(tmp_path / "run", sentences=[*SENTENCES, *SENTENCES])
    change(run / "ppo/rkl/responses.jsonl", SENTENCES.index("The nice man smiled."), response="The kind man smiled.")
    rows = [row for row in re.findall(r"<tr>(.*?)</tr>", section(report(run)[0])) if "<mark>" in row]
    assert text_of(rows[2].replace("<t", " <t")) == "nice 2 kind 25%kept 75% kind 100%"


def test_no_forbidden_word_in_any_sentence(tmp_path: Path) -> None:
    page, _ = report(write_rewriting(tmp_path / "run", words="elephant\n"))
    assert page.text.count("No forbidden word occurs in any") == 2, "in the summary and in its section"
    assert "same reward" not in page.text


def test_how_the_list_is_told(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run", words=f'"big"\nin*\n"{"x" * 300}"\n')
    part = section(report(run)[0])
    assert "how often it occurs in 12 sentences." in part, "no entry has regular forms"
    assert f"{'x' * 39}…" in part
    assert "x" * 41 not in part
    assert "12 sentences, with its regular forms" in section(report(write_rewriting(tmp_path / "other"))[0])


def test_the_order_of_entries_makes_no_other_list(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "run")
    (run / "ppo/sum/words.txt").write_text("\n".join(reversed(WORDS.splitlines())))
    assert "The list of" not in report(run)[0].text


def test_what_the_recipe_made_is_told_in_words(tmp_path: Path) -> None:
    run = write_rewriting(tmp_path / "rewrite")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["recipe"] |= {"data": {"source": None}, "prepare": {"function": "wpr.pipeline.rewriting:make"}}
    manifest["data"] = {"rows": 12}
    write_json(run / "manifest.json", manifest)
    for said in ("words: the recipe's own list (5 entries)", "words: the recipe's own list"):
        report(run, csv=tmp_path)
        facts = {row["run"]: row[run.name] for row in table(tmp_path / "runs.csv")}
        assert facts["scorer"] == said
        assert facts["data"] == "made by wpr.pipeline.rewriting:make (12 rows)"
        for path in run.glob("ppo/*/words.txt"):
            path.unlink()


def test_the_token_view_opens_at_a_replaced_word(tmp_path: Path) -> None:
    page, _ = report(write_rewriting(tmp_path / "run", sentences=["She sang all day.", *SENTENCES]))
    first = int(re.search(r'id="token-view" data-first="(\d+)"', page.source)[1])  # type: ignore[index]
    study = page.data["studies"][first]
    assert (study["policy"], "".join(one["text"] for one in study["tokens"])) == ("rkl", "The odd dog ran home.</s>")
    page, _ = report(write_rewriting(tmp_path / "copies", {"rkl": {}}))
    assert 'data-first="0"' in page.source


def test_studies_are_made_once(rewriting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(token_view, "studies_on_page", lambda findings: calls.append(findings) or ([], 0))
    report(rewriting)
    assert len(calls) == 1


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
