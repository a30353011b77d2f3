"""Word lists, spelling and reading level as rewards."""

from __future__ import annotations

import itertools
import math
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from tests.rewards.test_token_text import tokenizer
from wpr.rewards import (
    Completions,
    FunctionReward,
    ReadingLevel,
    RewardError,
    Spelling,
    TokenReward,
    WeightedSum,
    WordList,
    WordListError,
    as_reward,
    score_by_token,
)

FORBIDDEN = ["walk", '"cat" = 2', "catal* = 0.5", "in order to", "naïve"]
PREFERRED = ["dog", "café = 3", "don't"]
TEXT = "The cats walked, in order to don't a catalog: cat. Dogs' naïve café 你好 CAT"


def completions(kind: str, rows: list[list[int]]) -> Completions:
    texts = tokenizer(kind).batch_decode(rows, skip_special_tokens=True)
    ids = torch.zeros(len(rows), 1, dtype=torch.long)
    return Completions(
        [""] * len(rows), texts, ids, ids + 1, ids[:, 0], response_ids=rows, tokenizer=tokenizer(kind)
    )  # fmt: skip


def test_the_score_of_a_text() -> None:
    reward = WordList(FORBIDDEN, PREFERRED)
    # walked, in order to, cat twice, catalog, naïve; don't, Dogs, café
    assert reward.score(TEXT) == -1 - 1 - 2 - 2 - 0.5 - 1 + 1 + 1 + 3
    assert WordList(FORBIDDEN).score(TEXT) == -7.5
    assert WordList(preferred=PREFERRED).score(TEXT) == 5
    assert reward.score("in order. To") == 0  # a phrase ends with its sentence
    assert reward.score("in-order to") == -1


@pytest.mark.parametrize("kind", ["pico", "bytes", "gpt2", "sentencepiece"])
def test_a_token_earns_the_change_that_it_makes(kind: str) -> None:
    """Against the score of every start of a text, also of tokens that make no sense."""
    reward, chosen = WordList(FORBIDDEN, PREFERRED), random.Random(0)
    known = tokenizer(kind).encode(TEXT, add_special_tokens=False)
    rows = [known, *([chosen.choice(known) for _ in range(12)] for _ in range(20))]
    if kind != "sentencepiece":  # where a lone byte can change the text before it
        rows += [[chosen.randrange(len(tokenizer(kind))) for _ in range(8)] + known[:5] for _ in range(20)]
    batch = completions(kind, rows)
    scores, placed = reward.by_token(batch)
    assert placed.shape == (len(rows), max(map(len, rows)))
    assert (placed != 0).sum() > 10
    for row, tokens in enumerate(rows):
        before = 0.0
        for t in range(len(tokens)):
            after = reward.score(tokenizer(kind).decode(tokens[: t + 1], skip_special_tokens=True))
            assert float(placed[row, t]) == pytest.approx(after - before), (batch.responses[row], t)
            before = after
        assert float(placed[row].sum()) == pytest.approx(before)
        assert float(scores[row]) == pytest.approx(before) or not batch.responses[row].strip()
    assert torch.equal(WordList(FORBIDDEN, PREFERRED)(batch), scores)
    assert (WordList(FORBIDDEN, PREFERRED, placement="end").by_token(batch)[1] == 0).all()


def test_the_penalty_lands_on_the_word() -> None:
    tokens = tokenizer("bytes").encode("a cat sat", add_special_tokens=False)
    _, placed = WordList(["cat"]).by_token(completions("bytes", [tokens]))
    assert placed[0].tolist() == [0, 0, 0, 0, -1, 0, 0, 0, 0]
    again = tokenizer("bytes").encode("catalog", add_special_tokens=False)
    _, placed = WordList(["cat"]).by_token(completions("bytes", [again]))
    assert placed[0].tolist() == [0, 0, -1, 1, 0, 0, 0]


def test_responses_without_words_have_no_score() -> None:
    reward = WordList(["cat"])
    rows = [tokenizer("bytes").encode(text, add_special_tokens=False) for text in ("cat", "你好", "... 😀", "dog")]
    scores, placed = reward.by_token(completions("bytes", [*rows, []]))
    assert [None if math.isnan(score) else score for score in scores.tolist()] == [-1, None, None, 0, None]
    assert placed.sum(-1).tolist() == [-1, 0, 0, 0, 0]
    assert reward.may_skip
    assert reward(completions=["cat", "你好"], prompts=["", ""]) == [-1, None]


def test_entries_that_no_token_can_spell() -> None:
    WordList(FORBIDDEN, PREFERRED).check_tokenizer(tokenizer("pico"))
    WordList(["naïve", "walk"]).check_tokenizer(tokenizer("bytes"))
    WordList(["W7"]).check_tokenizer(tiny.tokenizer())
    with pytest.raises(
        WordListError, match=r"2 of 3 entries cannot be .*: привет \(entry:1\), walk\* \(entry:3\); leave"
    ):
        WordList(["привет", "w7", "walk*"]).check_tokenizer(tiny.tokenizer())
    with pytest.raises(WordListError, match="placed on tokens by the tokenizer, and there is none; give the trainer"):
        WordList(["walk"]).check_tokenizer(None)
    WordList(["walk"], placement="end").check_tokenizer(None)


def test_a_list_in_another_language() -> None:
    message = r"entry:2: the list seems to be in another language .*: 2 of 3 entries .* \(привет: 2.0 a letter\)"
    with pytest.raises(WordListError, match=message):
        WordList(["walk", "привет", "мир"]).check_tokenizer(tokenizer("pico"))
    WordList(["walk", "talk", "привет"]).check_tokenizer(tokenizer("pico"))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WordListError, match="no list is given"):
        WordList()
    with pytest.raises(ValueError, match="placement='start' must be 'token' or 'end'"):
        WordList(["walk"], placement="start")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spelling='french' must be 'british' or 'american'"):
        Spelling("french")  # type: ignore[arg-type]
    unknown = Completions([""], ["I walk"], *torch.zeros(3, 1, 1).long())
    with pytest.raises(RewardError, match="no tokens are known; give the trainer its tokenizer"):
        WordList(["walk"]).by_token(unknown)
    assert WordList(["walk"])(unknown).tolist() == [-1]


def test_weights_in_a_mapping_and_entries_that_are_no_text() -> None:
    assert WordList({"walk": 2.5, "in order to": 2}).score("We walked in order to walk.") == -2.5 - 2 - 2.5
    with pytest.raises(WordListError, match="entry:2: 3 is no text"):
        WordList(["walk", 3])  # type: ignore[list-item]


def test_accents_that_are_characters_of_their_own() -> None:
    apart = unicodedata.normalize("NFD", "The café is naïve.")
    assert WordList(["café", "naïve"]).score(apart) == -2
    assert WordList(["cafe"]).score(apart) == 0
    tokens = tokenizer("bytes").encode(apart, add_special_tokens=False)
    reward = WordList(["cafe", "café = 3"])
    (placed,) = reward.by_token(completions("bytes", [tokens]))[1].tolist()
    starts = [reward.score(tokenizer("bytes").decode(tokens[:t])) for t in range(len(tokens) + 1)]
    assert placed == [after - before for before, after in itertools.pairwise(starts)]
    assert sum(placed) == -3
    assert -1 in placed  # cafe, before its accent


def test_spelling() -> None:
    british, american = Spelling("british"), Spelling("american")
    text = "The colour of the theater was gray; we organised, analyzed and travelled. Size, program, realist."
    assert british.score(text) == -3
    assert american.score(text) == -3
    for entries, others in ((british, american), (american, british)):
        mine = {form for table in (entries.forbidden.exact, entries.forbidden.forms) for form in table}
        theirs = {form for table in (others.forbidden.exact, others.forbidden.forms) for form in table}
        assert len(mine) > 1000
        assert not mine & theirs
    tokens = tokenizer("bytes").encode("colors", add_special_tokens=False)
    assert british.by_token(completions("bytes", [tokens]))[1].tolist() == [[0, 0, 0, 0, -1, 0]]


def test_reading_level() -> None:
    pytest.importorskip("textstat")
    simple = "The cat sat. The dog ran. We had fun."
    hard = "Notwithstanding considerable administrative complications, the parliamentary investigation proceeded."
    reward = ReadingLevel(6)
    assert reward.score(simple) == 0
    # One sentence of 8 words; textstat counts its comma and its full stop among the characters.
    grade = 4.71 * len(hard.replace(" ", "")) / 8 + 0.5 * 8 - 21.43
    assert reward.score(hard) == pytest.approx(6 - grade)
    assert ReadingLevel(1).score(hard) == pytest.approx(reward.score(hard) - 5)
    rows = [tokenizer("bytes").encode(text, add_special_tokens=False) for text in (simple, hard, "你好")]
    scores, placed = reward.by_token(completions("bytes", rows))
    assert scores[:2].tolist() == pytest.approx([0, reward.score(hard)])
    assert scores[2].isnan()
    assert (placed == 0).all()
    with pytest.raises(ValueError, match="grade=nan must be a number"):
        ReadingLevel(math.nan)
    with pytest.raises(ValueError, match="textstat has no measure 'grades'"):
        ReadingLevel(6, "grades")
    with pytest.raises(ValueError, match="grade='6' must be a number"):
        ReadingLevel("6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="textstat's set_lang gives None for a text, and no grade"):
        ReadingLevel(6, "set_lang")


def tokens_worth(prompts: Any, responses: Any) -> list[Any]:
    return [[0.5] * 3, 2.0, [1.0, -1.0, 3.0]]


def test_functions_may_give_a_number_per_token() -> None:
    batch = completions("bytes", [[70, 71, 72]] * 3)
    scores, placed = as_reward(tokens_worth).by_token(batch)  # type: ignore[attr-defined]
    assert scores.tolist() == [1.5, 2, 3]
    assert placed.tolist() == [[0.5] * 3, [0, 0, 0], [1, -1, 3]]
    assert FunctionReward(tokens_worth)(batch).tolist() == [1.5, 2, 3]
    for bad, message in (
        ([0.5], "returned 1 numbers for response 0, which has 3 tokens; return one number per token"),
        ([0.5, None, 1], "returned None for response 0; return a finite number for every token"),
        ([0.5, math.nan, 1], "returned nan for response 0"),
        ([0.5, "x", 1], "returned 'x' for response 0"),
    ):
        with pytest.raises(RewardError, match=message):
            FunctionReward(lambda p, r, bad=bad: [bad] * 3)(batch)


def test_a_sum_passes_tokens_on() -> None:
    """Parts that know nothing of tokens, those that do, and one that skips a response."""
    rows = [tokenizer("bytes").encode(text, add_special_tokens=False) for text in ("a cat", "你好", "catalog")]
    batch = completions("bytes", rows)
    both = as_reward([(lambda prompts, responses: [1.0, 2.0, 3.0], 10.0), (WordList(["cat"]), 2.0)])
    assert isinstance(both, WeightedSum)
    assert isinstance(both, TokenReward)
    scores, placed = score_by_token(both, batch)
    assert scores.tolist() == [8, 20, 30]
    assert placed.tolist() == [[0, 0, 0, 0, -2, 0, 0], [0] * 7, [0, 0, -2, 2, 0, 0, 0]]
    assert {name: part.tolist()[0] for name, part in both.last_scores.items()} == {"<lambda>": 1, "words": -1}
    with pytest.raises(WordListError, match="cannot be written"):
        both.check_tokenizer(tiny.tokenizer())


def test_a_class_that_places_on_tokens_that_are_not_there() -> None:
    class Wide:
        name = "wide"

        def __call__(self, batch: Completions) -> torch.Tensor:
            return torch.ones(len(batch))

        def by_token(self, batch: Completions) -> tuple[torch.Tensor, torch.Tensor]:
            return self(batch), torch.ones(len(batch), 5)

    with pytest.raises(RewardError, match=r"'wide' placed numbers of shape \(2, 5\) on tokens; return 2 rows of 3"):
        score_by_token(Wide(), completions("bytes", [[70, 71, 72], [70]]))


def test_a_reward_that_knows_nothing_of_tokens() -> None:
    class Plain:
        name = "plain"

        def __call__(self, batch: Completions) -> torch.Tensor:
            return torch.ones(len(batch))

    scores, placed = score_by_token(Plain(), completions("bytes", [[70, 71], [72]]))
    assert scores.tolist() == [1, 1]
    assert placed.tolist() == [[0, 0], [0, 0]]
