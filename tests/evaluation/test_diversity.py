"""Diversity: by hand, against sacrebleu, and where responses are empty, alike or alone."""

from __future__ import annotations

import random

import pytest
import sacrebleu
import torch

from tests.data.tokenizers_made_here import plain
from wpr.evaluation.diversity import distinct, diversity, embedding_spread, self_bleu, words


def sentences(count: int, seed: int, longest: int = 14) -> list[str]:
    generator = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(generator.randint(3, 25))]
    return [" ".join(generator.choices(vocabulary, k=generator.randint(1, longest))) for _ in range(count)]


def test_words() -> None:
    assert words("Don't stop,  it\u2019s 3 o'clock!\n") == ["don't", "stop", ",", "it\u2019s", "3", "o'clock", "!"]
    assert words("'quoted' snake_case ...") == ["'", "quoted", "'", "snake_case", ".", ".", "."]
    assert words(" \n") == []


def test_distinct_by_hand() -> None:
    responses = ["the cat saw the cat", "The dog"]
    assert distinct(responses, 1) == pytest.approx(4 / 7)  # the cat saw dog
    assert distinct(responses, 2) == pytest.approx(4 / 5)  # "the cat" twice; none across responses
    assert distinct(responses, 3) == 1
    assert distinct(["one two"], 3) == 0
    assert distinct(["", ""], 1) == 0


@pytest.mark.parametrize("seed", range(30))
def test_self_bleu_is_the_mean_sentence_bleu_of_sacrebleu(seed: int) -> None:
    """Words are split here and joined by spaces, which sacrebleu then takes as they are."""
    responses = sentences(2 + seed % 7, seed, longest=3 if seed % 5 == 0 else 14)
    scorer = sacrebleu.BLEU(tokenize="none", effective_order=True, smooth_method="exp")
    joined = [" ".join(words(response)) for response in responses]
    scores = [scorer.sentence_score(text, joined[:i] + joined[i + 1 :]).score for i, text in enumerate(joined)]
    assert self_bleu(responses) == pytest.approx(sum(scores) / len(scores) / 100, abs=1e-12)


def test_self_bleu_at_its_ends() -> None:
    assert self_bleu(["a b c d e"] * 3) == pytest.approx(1)
    assert self_bleu(["yes", "Yes"]) == pytest.approx(1)
    assert self_bleu(["a b c", "d e f", "g h i"]) == 0


def test_empty_responses() -> None:
    """Two empty responses are alike; an empty one and another have nothing in common."""
    assert self_bleu(["", ""]) == 1
    assert self_bleu(["", "a b c"]) == 0
    assert self_bleu(["", "", "a b"]) == pytest.approx(2 / 3)


def test_many_responses_are_sampled_by_seed() -> None:
    responses = sentences(300, 1)
    assert self_bleu(responses, limit=50) == self_bleu(responses, limit=50)
    assert self_bleu(responses, limit=50) != self_bleu(responses, limit=50, seed=1)
    chosen = sorted(random.Random(0).sample(range(300), 50))
    assert self_bleu(responses, limit=50) == self_bleu([responses[i] for i in chosen])


def test_self_bleu_does_not_depend_on_the_order() -> None:
    responses = sentences(12, 5)
    assert self_bleu(responses) == pytest.approx(self_bleu(responses[::-1]), abs=1e-12)


def test_diversity_leaves_out_what_a_single_response_has_not() -> None:
    assert list(diversity(["a b", "c d"])) == ["distinct_1", "distinct_2", "distinct_3", "self_bleu"]
    assert diversity(["a a"]) == {"distinct_1": 0.5, "distinct_2": 1, "distinct_3": 0}


def test_a_collapsed_policy_shows_in_every_measure() -> None:
    varied, collapsed = sentences(40, 3), [f"so happy and glad {i % 2}" for i in range(40)]
    tokenizer = plain()
    embedding = torch.randn(len(tokenizer), 16, generator=torch.Generator().manual_seed(0))
    one, other = diversity(varied), diversity(collapsed)
    assert all(one[name] > other[name] for name in ("distinct_1", "distinct_2", "distinct_3"))
    assert one["self_bleu"] < other["self_bleu"]
    assert embedding_spread(varied, tokenizer, embedding) > embedding_spread(collapsed, tokenizer, embedding)


def test_embedding_spread_is_the_mean_over_pairs() -> None:
    tokenizer = plain()
    embedding = torch.randn(len(tokenizer), 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    responses = ["the sea was cold", "", "Paris", "the capital of France is Paris", "the sea was cold"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses if text]
    means = [embedding.double()[row].mean(0) for row in rows]
    pairs = [1 - torch.cosine_similarity(means[i], means[j], dim=0).item() for i in range(len(rows)) for j in range(i)]
    assert embedding_spread(responses, tokenizer, embedding) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert embedding_spread(["cold sea"] * 3, tokenizer, embedding) == pytest.approx(0, abs=1e-12)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        distinct(["a"], 0)
    with pytest.raises(ValueError, match="0 responses; at least 1"):
        diversity([])
    with pytest.raises(ValueError, match="1 responses to compare with one another; at least 2"):
        self_bleu(["a"])
    with pytest.raises(ValueError, match="limit=1 must be at least 2"):
        self_bleu(["a", "b"], limit=1)
    with pytest.raises(ValueError, match="1 responses with tokens; at least 2"):
        embedding_spread(["cold", ""], plain(), torch.zeros(400, 4))
