"""The world of the stories: what is sampled, what is preferred, and the whole of it in miniature."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.judging.nasty import LIMIT, SIZE, seconds
from tests.pipeline.command import start
from wpr.recipes import stories, stories_gold
from wpr.recipes.stories_gold import gold_scores, log_likelihoods, missing, repeated, sentences, sentiment

OPENING = "Once upon a time, there was a little girl named Lily. She loved to play in the park."


def test_sentences() -> None:
    assert sentences('She said, "Hi!" Then she ran.  Was it far? It') == [
        'She said, "Hi!"', "Then she ran.", "Was it far?", "It",
    ]  # fmt: skip
    assert sentences("") == []
    assert sentences("Wait... what?!") == ["Wait...", "what?!"]


def test_a_happy_ending_counts_more_than_a_happy_beginning() -> None:
    ends_well = "Lily was sad and cried. Then they were all happy and laughed."
    ends_badly = "They were all happy and laughed. Then Lily was sad and cried."
    assert sentiment(ends_well) > sentiment(ends_badly)
    assert sentiment("") == 0


def test_fluency_sees_shuffled_and_repeated_words() -> None:
    good = "One day, she saw a big dog. The dog was friendly and wanted to play."
    shuffled = "big dog One was a wanted day saw. friendly she and dog to play The."
    endless = "She was happy. She was happy. She was happy. She was happy. She was happy."
    likely, unlikely = log_likelihoods([OPENING] * 2, [good, shuffled])
    assert likely > stories_gold.TYPICAL > unlikely
    assert repeated(good) == 0
    assert repeated(endless) > 0.7
    # VADER finds the repetition happier than a story; gold does not prefer it.
    plain = "One day, she met a kind boy. They were happy and became friends."
    assert sentiment(endless) > 0
    first, second = gold_scores([OPENING] * 2, [plain, endless])
    assert first > second


def test_responses_without_words_have_a_score() -> None:
    assert gold_scores([OPENING] * 3, ["", " ", "?"]) == [-2, -2, -2]


def test_missing_sentences() -> None:
    texts = {"": 2, "She ran": 2, "She ran.": 1, "She ran. She": 1, 'She ran. "Oh!"': 0, "... !": 2, "A. B. C.": 0}
    assert {text: missing(text) for text in texts} == texts
    assert gold_scores([], []) == []


@given(st.text("ab .!?\"'\n", max_size=20))
def test_whole_sentences_are_counted_as_by_an_expression(text: str) -> None:
    """Which tries every letter with every end: it is slow where there is no end."""
    whole = sum(bool(re.search(r"\w.*[.!?][\"']?$", part)) for part in sentences(text))
    assert missing(text) == max(0, stories_gold.SENTENCES - whole)


def test_a_response_without_an_end_does_not_take_long() -> None:
    assert seconds(missing, "a" * SIZE) < LIMIT


def test_scores_do_not_depend_on_batch_mates() -> None:
    texts = ["One day, she ran.", "She saw a very big tree and climbed up to the top of it. It was fun!", ""]
    together = gold_scores([OPENING] * 3, texts)
    alone = [gold_scores([OPENING], [text])[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-4)


def test_the_world_is_made_from_the_seed(tmp_path: Path) -> None:
    written = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        facts = stories.prepare(folder, seed=seed, openings=24)
        written.append((folder / "pairs.jsonl").read_text())
        rows = [json.loads(line) for line in written[-1].splitlines()]
        assert facts["pairs"] == len(rows) > 15
        assert len({row["prompt"] for row in rows}) == len(rows)
        for row in rows:
            assert len(sentences(row["prompt"])) == len(sentences(row["demonstrated"])) == 2
            assert missing(row["demonstrated"]) == 0
            assert row["chosen"] != row["rejected"]
        assert (folder / "model" / "model.safetensors").is_file()
    assert written[0] == written[1] != written[2]


def test_labels_follow_gold_as_far_as_they_are_told_to() -> None:
    import random

    happy, sad = "They laughed and were happy. It was the best day.", "They cried and were sad. It was the worst day."
    whole = [(OPENING, happy, sad), (OPENING, sad, happy)] * 60
    rows, facts = stories._label(whole, random.Random(0), flips=0.0, temperature=0.01)
    assert facts["labels_that_agree"] == 1
    assert all(row["chosen"] == happy for row in rows)
    _, facts = stories._label(whole, random.Random(0), flips=0.1, temperature=0.01)
    assert 0.85 < facts["labels_that_agree"] < 0.95


@pytest.mark.slow  # the quickstart's test, those of the recipe tiny and the unit tests here cover the same code
def test_the_recipe_runs_through_and_judges_by_gold(tmp_path: Path) -> None:
    small = (
        "prepare.options.openings=64", "sft.max_steps=2", "reward.max_steps=2", "ppo.max_steps=2", "ppo.batch_size=8",
        "ppo.per_device_train_batch_size=8", "split.held_out=0.15", "evaluation.prompts=6", "evaluation.case_studies=1",
        "output=run",
    )  # fmt: skip
    process = start("run", "stories", *small, cwd=tmp_path)
    printed, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    folder = tmp_path / "run"
    assert "win rates on held-out prompts, by gold" in printed
    for policy in ("rkl", "sum"):
        rows = [json.loads(line) for line in (folder / "ppo" / policy / "responses.jsonl").read_text().splitlines()]
        assert {"gold", "score", "divergences"} <= set(rows[0])
        assert set(rows[0]["divergences"]) == {"semantic"}
        (study,) = json.loads((folder / "ppo" / policy / "tokens.json").read_text())["studies"]
        assert study["gold"] == rows[0]["gold"]
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    assert "accuracy" in stages["reward"]["results"]["held_out"]
    assert {"gold", "divergence_semantic", "distinct_2"} <= set(stages["ppo/rkl"]["results"]["after"])
