"""The rewriting world: copies with other words, sentences of a user's own, and the whole of it in miniature."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.command import start
from wpr import pico
from wpr.data.rows import DataError
from wpr.recipes import rewrite
from wpr.recipes.stories_gold import load_pico
from wpr.runs.finished_run import FinishedRun

STORY = [
    "One day, a little girl named Lily went to the park.", "She saw a big dog and wanted to play with it.",
    "The dog was very happy to see her.", "They ran and played until it was time to go home.",
    "Her mom said that she was a good girl.", "Tom and his dad went to the store to buy some food.",
]  # fmt: skip


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def rows_of(folder: Path, **options: Any) -> list[dict[str, str]]:
    folder.mkdir()
    rewrite.prepare(folder, **options)
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def test_copies_have_other_words_in_some_places() -> None:
    model, tokenizer = load_pico()
    texts = STORY * 20
    copies, replaced = rewrite.noisy_copies(texts, model, tokenizer, 0.2, seed=0)
    assert copies == rewrite.noisy_copies(texts, model, tokenizer, 0.2, seed=0)[0]
    assert copies != rewrite.noisy_copies(texts, model, tokenizer, 0.2, seed=1)[0]
    assert 0.05 < replaced < 0.2
    known = {word.strip(".,") for text in STORY for word in text.split()}
    for text, copy in zip(texts, copies, strict=True):
        ours, theirs = text.split(), copy.split()
        assert len(ours) == len(theirs)
        assert ours[0] == theirs[0]
        assert {word.strip(".,") for word in theirs} <= known  # whole words of the texts, no parts of words


def test_words_of_several_tokens_stay() -> None:
    model, tokenizer = load_pico()
    text = "She ate a marshmallow marshmallow marshmallow."
    assert len(tokenizer("marshmallow")["input_ids"]) > 2
    copies, _ = rewrite.noisy_copies([text] * 30 + STORY, model, tokenizer, 0.9, seed=0)
    assert all(copy.endswith("marshmallow marshmallow marshmallow.") for copy in copies[:30])
    assert len(set(copies[:30])) > 3


def test_sentences_of_a_file(tmp_path: Path) -> None:
    lines = [*STORY, STORY[0], "Too short.", "no end of a sentence here at all", '"Hello," said the dog to the cat.']
    source = write_lines(tmp_path / "my.txt", lines)
    Path(source).write_bytes(BOM_UTF8 + Path(source).read_bytes())
    rows = rows_of(tmp_path / "a", source=source, instruction="Say: {}")
    assert [row["source"] for row in rows[::2]] == [row["source"] for row in rows[1::2]] == STORY
    assert [row["prompt"] for row in rows[::2]] == [f"Say: {text}" for text in STORY]
    assert rows[::2] != rows[1::2]  # two copies of each, which differ
    first, *entries = (tmp_path / "a" / "words.txt").read_text().splitlines()
    assert first.startswith("# The recipe's own list.")
    assert entries[:2] == ["big", "little"]
    assert (tmp_path / "a" / "model" / "model.safetensors").is_file()


def test_sentences_of_a_dataset_s_responses(tmp_path: Path) -> None:
    talk = "\n\nHuman: Tell me a story.\n\nAssistant: " + " ".join(STORY[:3]) + "\nAnd more"
    source = write_lines(tmp_path / "hh.jsonl", [json.dumps({"chosen": talk, "rejected": talk[:-4] + "less"})])
    rows = rows_of(tmp_path / "a", source=source, format="hh", model=str(pico.path()), copies=1)
    assert [row["source"] for row in rows] == STORY[:3]
    assert not (tmp_path / "a" / "model").exists()


def test_stories_are_written_where_nothing_is_named(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a", count=20, copies=1)
    assert len({row["source"] for row in rows}) == len(rows) == 20


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"my.csv is no .txt file with one sentence per line; .*format=hh"):
        rewrite.prepare(tmp_path, source="my.csv")
    with pytest.raises(DataError, match="no sentence of 6 to 20 tokens"):
        rewrite.prepare(tmp_path, source=write_lines(tmp_path / "a.txt", ["Short."]))
    message = "left out: 1 without . ! or . at the end, 1 with a quotation mark, 1 shorter than 6 tokens"
    with pytest.raises(DataError, match=message):
        rewrite.prepare(tmp_path, source=write_lines(tmp_path / "a.txt", ["Short.", "no end of it", 'A "b" is c.']))
    with pytest.raises(DataError, match="none.txt cannot be read"):
        rewrite.prepare(tmp_path, source="none.txt")
    for options, message in (
        ({"noise": 1}, "noise=1 must lie between 0 and 1"),
        ({"copies": 0}, "copies=0 must be a whole number, 1 or more"),
        ({"count": 0}, "count=0 must be a whole number, 1 or more"),
        ({"longest": 5}, "longest=5 must be a whole number, prepare.options.shortest=6 or more"),
        ({"instruction": "Rewrite this."}, "instruction='Rewrite this.' must be a text with {} where"),
        ({"instruction": 3}, "instruction=3 must be a text"),
        ({"words": "my/words.txt"}, "words=my/words.txt is no list that comes with .*; .* set reward.words=FILE"),
    ):
        with pytest.raises(DataError, match=message):
            rewrite.prepare(tmp_path, **options)


def test_no_endless_search_for_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "ROUNDS_WITHOUT_NEW", 0)
    with pytest.raises(DataError, match="wpr-pico wrote 0 different sentences of 400 to 500 tokens"):
        rewrite._made(5, 0, load_pico()[1], 400, 500)


def test_lines_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "my.txt", [*STORY, STORY[0], "no end of it"])
    found = rewrite.prepare(tmp_path, source=source, copies=1)
    assert found["left_out"] == {"repeated": 1, "without . ! or ? at the end": 1}
    assert "6 sentences are used; left out: 1 repeated, 1 without" in caplog.text


@pytest.mark.parametrize("trainer", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_recipe_runs_on_sentences_and_words_of_one_s_own(tmp_path: Path, trainer: str) -> None:
    people = ["girl", "boy", "cat", "bird", "fox", "man", "bear", "duck"]
    mine = [text.replace("dog", one).replace("girl", one) for one in people for text in STORY]
    write_lines(tmp_path / "my.txt", mine)
    write_lines(tmp_path / "my-words.txt", ["happy", "play"])
    small = (
        "sft.max_steps=2", "ppo.max_steps=2", "ppo.batch_size=8", "ppo.per_device_train_batch_size=8",
        "ppo.responses_per_prompt=2", "evaluation.prompts=3", "evaluation.case_studies=0", "split.held_out=0.2",
        f"evaluation.gold.encoder={pico.path()}", f"trainer={trainer}", "output=run",
    )  # fmt: skip
    process = start(
        "run", "rewrite", "--policy", "rkl", "data.source=my.txt", "reward.words=my-words.txt", *small, cwd=tmp_path
    )
    printed, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert "words_kept" in printed
    folder = tmp_path / "run"
    assert (folder / "ppo/rkl/words.txt").read_text() == "happy\nplay\n"
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    assert len(stages["prepare"]["inputs"]["files"]) == 1
    rows = [json.loads(line) for line in (folder / "ppo/rkl/responses.jsonl").read_text().splitlines()]
    watched = {"gold", "words_kept", "copies", "fluency"}
    for row in rows:
        assert row["columns"]["source"] in mine
        assert row["prompt"] == row["columns"]["source"] + "\n"
        said = re.findall(r"\w+", row["response"].lower())
        if said:  # a response without words has no score
            assert row["score"] == -sum(said.count(word) for word in ("happy", "play", "plays", "played", "playing"))
            assert watched <= set(row)
    assert any("score" in row for row in rows)
    assert watched <= set(stages["ppo/rkl"]["results"]["after"])
    logged = [json.loads(line) for line in (folder / "ppo/rkl/metrics.jsonl").read_text().splitlines()]
    assert any(watched <= set(line) and "loss" in line for line in logged)
    assert FinishedRun(folder, "cpu").recipe["data"]["source"] == str(folder / "prepare" / "pairs.jsonl")
