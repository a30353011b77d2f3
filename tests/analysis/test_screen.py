"""The screen: what it says of scores that are made to know everything, nothing, or only what the odds know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wpr import ReverseKL, TokenGeometry, Wasserstein
from wpr.analysis.screen import LIKELY, InContext, candidates, distance_scores, geometry_scores, screen, settings_scores
from wpr.analysis.word_positions import WordPosition, WordPositions
from wpr.errors import OptionError
from wpr.model_geometry import RegularizerFactory
from wpr.transport.distances import resolve_metric
from wpr.transport.support import NO_TOKEN

P, N = 200, 60


@pytest.fixture(scope="module")
def words() -> WordPositions:
    """Made-up positions: entry 0 is the word; two positions of each text."""
    generator = torch.Generator().manual_seed(0)
    log_reference = (2 * torch.randn(P, N + 1, generator=generator, dtype=torch.float64)).log_softmax(-1)
    ids = torch.cat([torch.arange(N).expand(P, N), torch.full((P, 1), NO_TOKEN)], -1)
    forbidden = (ids >= 0) & (ids < 2)
    positions = [WordPosition(p // 2, "", "", "w", "") for p in range(P)]
    return WordPositions(positions, ids, log_reference, torch.zeros(P, dtype=torch.long), forbidden, None)


def noise(seed: int) -> Tensor:
    return torch.randn(P, N + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_candidates(words: WordPositions) -> None:
    chosen = candidates(words)
    assert (chosen.sum(-1) == 2 * LIKELY).all()
    assert not (chosen & ~words.allowed).any()
    likely = words.log_reference.masked_fill(~words.allowed, -torch.inf).topk(LIKELY).indices
    assert chosen.gather(-1, likely).all()
    assert torch.equal(chosen, candidates(words))
    assert not torch.equal(chosen, candidates(words, seed=1))


def test_what_is_known(words: WordPositions) -> None:
    """Similarity is the sum of what the odds know, of what a geometry knows, and of noise."""
    odds = words.log_reference / words.log_reference.std()
    known = noise(1)
    chosen = candidates(words)
    similarity = (odds + known + noise(2)).masked_fill(~chosen, torch.nan)
    found = screen(
        InContext(words, similarity), {"knows": known, "guesses": noise(3), "repeats the odds": odds + 0.1 * noise(4)}
    )
    assert list(found) == ["odds", "knows", "guesses", "repeats the odds"]
    assert found["odds"].alone.low > 0.3
    assert torch.isnan(torch.tensor(found["odds"].beyond_odds.value))
    assert found["knows"].beyond_odds.low > 0.4
    assert found["knows"].with_odds.low > max(found["odds"].alone.high, found["knows"].alone.high)
    assert found["guesses"].alone.low < 0 < found["guesses"].alone.high
    assert found["guesses"].beyond_odds.low < 0 < found["guesses"].beyond_odds.high
    assert found["repeats the odds"].alone.low > 0.3
    assert found["repeats the odds"].beyond_odds.low < 0 < found["repeats the odds"].beyond_odds.high


def test_too_few_candidates_do_not_count(words: WordPositions) -> None:
    few = replace(words, positions=words.positions[:1])
    similarity = torch.full((1, N + 1), torch.nan, dtype=torch.float64)
    similarity[0, 5:9] = torch.arange(4.0, dtype=torch.float64)
    assert torch.isnan(torch.tensor(screen(InContext(few, similarity), {})["odds"].alone.value))


def test_distances(words: WordPositions) -> None:
    weight = torch.randn(N, 5, generator=torch.Generator().manual_seed(5))
    found = distance_scores(words, weight, resolve_metric("euclidean"))
    torch.testing.assert_close(found[3, :N], -(weight - weight[0]).norm(dim=-1).double(), atol=1e-5, rtol=0)


def test_tokens_without_a_row_are_farthest(words: WordPositions) -> None:
    weight = torch.randn(N, 5, generator=torch.Generator().manual_seed(5))
    mapped = torch.ones(N, dtype=torch.bool)
    mapped[7] = False
    weight[7] = weight[0]
    found = distance_scores(words, weight, resolve_metric("euclidean"), power=2.0, mapped=mapped)
    assert (found[:, 7] == found[:, :N].amin(-1)).all()
    torch.testing.assert_close(found[0, 9], -(weight[9] - weight[0]).square().sum().double(), atol=1e-4, rtol=0)
    mapped[0] = False  # the word itself
    assert distance_scores(words, weight, resolve_metric("euclidean"), mapped=mapped).isnan().all()


def test_each_geometry_once_under_a_name_of_its_own(words: WordPositions) -> None:
    weights = [torch.randn(N, 5, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    one, other = (TokenGeometry.from_embeddings(weight, neighbours=8, progress=False) for weight in weights)
    made = {
        "a": Wasserstein(one, "unbalanced", k2=8),
        "b": ReverseKL() + 2 * Wasserstein(one, "unbalanced", k2=8),
        "c": Wasserstein(other, "unbalanced", k2=8),
    }
    found = geometry_scores(words, made)
    assert list(found) == ["euclidean", "euclidean of c"]
    torch.testing.assert_close(found["euclidean of c"], distance_scores(words, weights[1], one.metric))


def test_settings_that_are_none_are_named(words: WordPositions) -> None:
    for text, message in (("transform=units", "has the step 'units'"), ("lamb=3", "is no setting of a regularizer")):
        with pytest.raises(OptionError, match=f"--geometry {text}: .*{message}"):
            settings_scores(text, words, RegularizerFactory(None))
