"""TokenGeometry against the paper's sparse matrix, built slowly; the scale on vocabularies with dead tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.problems import clustered_embeddings
from wpr import TokenGeometry, token_frequencies
from wpr.transport import neighbours
from wpr.transport.support import NO_TOKEN


def papers_mask(cost: Tensor, k1: int) -> Tensor:
    """Each token's k1 nearest others, mirrored, with the diagonal: the released construction."""
    v = len(cost)
    others = cost.clone()
    others.fill_diagonal_(torch.inf)
    mask = torch.eye(v, dtype=torch.bool)
    mask[torch.arange(v).unsqueeze(-1), others.topk(k1, largest=False).indices] = True
    return mask | mask.T


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize(("vocabulary", "size", "k1"), [(41, 5, 3), (200, 16, 20), (150, 33, 149)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_radius_rule_equals_nearest_k1(metric: str, vocabulary: int, size: int, k1: int, dtype: torch.dtype) -> None:
    weight = torch.randn(vocabulary, size, generator=torch.Generator().manual_seed(k1)).to(dtype)
    geometry = TokenGeometry.from_embeddings(weight, metric, k1, scale=None)
    exact = geometry.metric.pairwise(weight.double(), weight.double())
    cost = geometry.cost(torch.arange(vocabulary).unsqueeze(0))[0]
    assert torch.equal(cost.isfinite(), papers_mask(exact, k1))
    torch.testing.assert_close(
        cost[cost.isfinite()].double(), exact.fill_diagonal_(0)[cost.isfinite()], atol=1e-5, rtol=1e-5
    )
    assert torch.equal(cost, cost.T)
    assert (cost.diagonal() == 0).all()


def test_blocks_do_not_change_radii(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(97, 8, generator=torch.Generator().manual_seed(2))
    whole = TokenGeometry.from_embeddings(weight, neighbours=9)
    monkeypatch.setattr(neighbours, "BLOCK_BYTES", 97 * 4 * 5)
    parts = TokenGeometry.from_embeddings(weight, neighbours=9)
    torch.testing.assert_close(whole.radius, parts.radius, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.nearest, parts.nearest, atol=1e-6, rtol=0)


def test_cost_of_supports_with_dummies() -> None:
    weight = clustered_embeddings()
    geometry = TokenGeometry.from_embeddings(weight, neighbours=4)
    ids = torch.tensor([[3, 4, 17, NO_TOKEN, NO_TOKEN], [0, 1, 2, 5, NO_TOKEN]])
    cost = geometry.cost(ids)
    assert cost.shape == (2, 5, 5)
    assert cost[0, 0, 1].item() == pytest.approx((weight[3] - weight[4]).norm().item() / geometry.scale, rel=1e-5)
    assert cost[0, 3, 4] == cost[0, 0, 3] == torch.inf
    assert (cost.diagonal(dim1=1, dim2=2) == 0).all()
    torch.testing.assert_close(geometry.cost(ids, scaled=False), cost * geometry.scale)


@pytest.mark.parametrize("power", [0.5, 2.0, 3.3])
@pytest.mark.parametrize("metric", ["euclidean", "cosine", torch.cdist])
def test_powers_of_distances(metric: Any, power: float) -> None:
    """Costs, scale and nearest costs are powers of the distances'; who is near whom stays as it is."""
    weight = clustered_embeddings(words=30, spread=0.3)
    plain = TokenGeometry.from_embeddings(weight, metric, neighbours=6)
    raised = TokenGeometry.from_embeddings(weight, metric, neighbours=6, power=power)
    ids = torch.arange(len(weight)).unsqueeze(0)
    torch.testing.assert_close(raised.cost(ids), plain.cost(ids) ** power, rtol=2e-5, atol=0)
    torch.testing.assert_close(raised.cost(ids, scaled=False), plain.cost(ids, scaled=False) ** power)
    assert torch.equal(raised.alive, plain.alive)
    assert torch.equal(raised.nearest, plain.nearest**power)
    assert raised.scale == pytest.approx(plain.scale**power)
    assert float(raised.nearest[raised.alive].median()) == pytest.approx(raised.scale)
    torch.testing.assert_close(raised.nearest_tokens(5)[1], plain.nearest_tokens(5)[1] ** power, rtol=2e-5, atol=0)
    assert f"cost to the power {power:g}, the 6 nearest kept" in raised.describe()


def test_squared_distances_of_a_long_row_do_not_overflow() -> None:
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * 1e8
    cost = TokenGeometry.from_embeddings(weight, neighbours=None, power=4.0).cost(torch.arange(50).unsqueeze(0))
    assert cost.isfinite().all()


@pytest.mark.parametrize("power", [0.0, -1.0, 0.05, 4.5, float("nan"), float("inf")])
def test_powers_outside_the_limits(power: float) -> None:
    with pytest.raises(ValueError, match=r"power=.* is outside 0.1 to 4; set 1 for distances, 2 for squared ones"):
        TokenGeometry.from_embeddings(torch.randn(10, 3), neighbours=3, power=power)


@pytest.mark.parametrize("neighbours", [4, None])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("options", [{}, {"power": 0.5}, {"transform": "centre/unit"}])
def test_tokens_without_an_embedding(metric: str, neighbours: int | None, options: dict[str, Any]) -> None:
    """They are infinitely far from all, whatever their rows are; the others are as without them."""
    weight, mapped = clustered_embeddings(), torch.ones(60, dtype=torch.bool)
    mapped[[0, 1, 17, 59]] = False
    weight[1] = weight[2]
    weight[17] = 0
    options = options | {"metric": metric, "neighbours": neighbours, "token_weights": torch.rand(60)}
    geometry = TokenGeometry.from_embeddings(weight, mapped=mapped, **options)
    fewer = TokenGeometry.from_embeddings(
        weight[mapped], **options | {"token_weights": options["token_weights"][mapped]}
    )
    cost = geometry.cost(torch.arange(60).unsqueeze(0))[0]
    assert torch.equal(cost[mapped][:, mapped], fewer.cost(torch.arange(56).unsqueeze(0))[0])
    assert cost[~mapped].isinf().sum() == cost[:, ~mapped].isinf().sum() == 4 * 59
    assert not cost.isnan().any()
    assert geometry.scale == fewer.scale
    assert torch.equal(geometry.mapped, mapped)
    assert torch.equal(geometry.alive[mapped], fewer.alive)
    assert not geometry.alive[~mapped].any()
    ids, costs = geometry.nearest_tokens(5, 59)
    assert mapped[ids[:55]].all()
    assert costs.isfinite().sum() == 55
    assert geometry.nearest_tokens(17)[1].isinf().all()
    assert "without an embedding: 4 tokens (6.7%)" in geometry.describe()
    assert "without" not in fewer.describe()


def test_too_few_embeddings() -> None:
    weight, mapped = torch.randn(10, 3), torch.zeros(10, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"embeddings of 0 token\(s\); a geometry needs at least 2"):
        TokenGeometry.from_embeddings(weight, neighbours=3, mapped=mapped)
    mapped[:4] = True
    with pytest.raises(ValueError, match=r"neighbours=4 is outside 1..3"):
        TokenGeometry.from_embeddings(weight, neighbours=4, mapped=mapped)
    with pytest.raises(ValueError, match=r"mapped of shape \(4,\) for a vocabulary of 10 tokens"):
        TokenGeometry.from_embeddings(weight, neighbours=3, mapped=mapped[:4])


def test_all_pairs() -> None:
    geometry = TokenGeometry.from_embeddings(torch.randn(30, 4), neighbours=None)
    assert geometry.cost(torch.arange(30).unsqueeze(0)).isfinite().all()


def test_users_metric_builds_a_geometry() -> None:
    weight = torch.randn(40, 6, generator=torch.Generator().manual_seed(4))
    ours = TokenGeometry.from_embeddings(weight, lambda x, y: torch.cdist(x, y), neighbours=5)
    theirs = TokenGeometry.from_embeddings(weight, "euclidean", neighbours=5)
    torch.testing.assert_close(ours.radius, theirs.radius, atol=1e-5, rtol=1e-5)
    ids = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(ours.cost(ids), theirs.cost(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dead", [0, 15, 180, 1900])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_scale_ignores_dead_tokens(dead: int, metric: str) -> None:
    """Untrained tokens huddle together; however many there are, the median is that of the trained ones."""
    generator = torch.Generator().manual_seed(5)
    live = torch.randn(60, 32, generator=generator)
    huddle = torch.randn(1, 32, generator=generator) * 0.3 + 1e-3 * torch.randn(dead, 32, generator=generator)
    alone = TokenGeometry.from_embeddings(live, metric, neighbours=5)
    geometry = TokenGeometry.from_embeddings(torch.cat([live, huddle]), metric, neighbours=5)
    assert geometry.alive.sum() == 60
    assert geometry.scale == pytest.approx(alone.scale, rel=0.1)
    assert f"near-duplicates: {dead} tokens" in geometry.describe()


def test_exact_duplicates_cost_nothing_to_exchange() -> None:
    weight = torch.randn(30, 8, generator=torch.Generator().manual_seed(6))
    weight[7] = weight[3]
    geometry = TokenGeometry.from_embeddings(weight, neighbours=5)
    assert geometry.cost(torch.tensor([[3, 7]]))[0, 0, 1] == 0
    assert not geometry.alive[[3, 7]].any()


def test_degenerate_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"all 20 tokens are near-duplicates.*pass a number"):
        TokenGeometry.from_embeddings(torch.ones(20, 4), neighbours=3)
    with pytest.raises(ValueError, match=r"scale 0.0 \(given\) is degenerate"):
        TokenGeometry.from_embeddings(torch.randn(20, 4), neighbours=3, scale=0)
    with pytest.raises(ValueError, match="'mean' is unknown"):
        TokenGeometry.from_embeddings(torch.randn(20, 4), neighbours=3, scale="mean")  # type: ignore[arg-type]
    assert TokenGeometry.from_embeddings(torch.ones(20, 4), neighbours=3, scale=None).scale == 1


def test_weighted_median() -> None:
    weight = clustered_embeddings(words=30)
    plain = TokenGeometry.from_embeddings(weight, neighbours=4)
    weights = torch.zeros(len(weight))
    far = int(plain.nearest.argmax())
    weights[far] = 1
    chosen = TokenGeometry.from_embeddings(weight, neighbours=4, token_weights=weights)
    assert chosen.scale == pytest.approx(plain.nearest[far].item())
    assert chosen.scale_rule == "median-nn, weighted"
    even = TokenGeometry.from_embeddings(weight, neighbours=4, token_weights=torch.ones(len(weight)))
    assert even.scale == pytest.approx(plain.scale, rel=0.05)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        TokenGeometry.from_embeddings(weight, neighbours=4, token_weights=torch.ones(3))


def test_from_transformers_models() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=90, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=70, n_embd=16, n_layer=1, n_head=2))
    for model, size in ((llama, 90), (gpt2, 70)):
        geometry = TokenGeometry.from_model(model, neighbours=8)
        assert geometry.vocabulary == size
        assert geometry.embeddings.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        frequencies = token_frequencies(model, torch.randint(size, (2, 5)))
        assert frequencies.sum().item() == pytest.approx(1, abs=1e-5)
        assert TokenGeometry.from_model(model, neighbours=8, token_weights=frequencies).scale > 0
    with pytest.raises(TypeError, match="get_input_embeddings"):
        TokenGeometry.from_model(torch.nn.Linear(2, 2))


def test_output_embeddings() -> None:
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=90, tie_word_embeddings=tied, **settings))
        geometry = TokenGeometry.from_model(model, neighbours=8, embeddings="output")
        assert geometry.embeddings.data_ptr() == model.lm_head.weight.data_ptr()
        assert (geometry.embeddings.data_ptr() == model.get_input_embeddings().weight.data_ptr()) is tied
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings; load it with AutoModelForCausalLM"):
        TokenGeometry.from_model(model.model, neighbours=8, embeddings="output")
    with pytest.raises(ValueError, match="embeddings='head' must be 'input' or 'output'"):
        TokenGeometry.from_model(model, neighbours=8, embeddings="head")  # type: ignore[arg-type]


def test_nearest_tokens() -> None:
    geometry = TokenGeometry.from_embeddings(clustered_embeddings(per_word=4), neighbours=5)
    ids, costs = geometry.nearest_tokens(9, 3)
    assert sorted(ids.tolist()) == [8, 10, 11]
    assert (costs.diff() >= 0).all()


def test_bfloat16_embeddings_are_exact_operands() -> None:
    weight = torch.randn(50, 12, generator=torch.Generator().manual_seed(7)).bfloat16()
    ids = torch.arange(50).unsqueeze(0)
    half, full = (TokenGeometry.from_embeddings(w, neighbours=10).cost(ids) for w in (weight, weight.float()))
    assert torch.equal(half, full)


@pytest.mark.parametrize(
    ("weight", "neighbours", "message"),
    [
        (torch.randn(10, 3), 10, r"neighbours=10 is outside 1..9"),
        (torch.randn(10, 3), 0, r"neighbours=0 is outside 1..9"),
        (torch.randn(1, 3), 1, "at least 2"),
        (torch.randn(10), 1, r"shape \(10,\)"),
        (torch.ones(10, 3, dtype=torch.long), 1, "int64"),
        (torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [1.0, 1.0]]), 1, "first at token 1"),
    ],
)
def test_bad_embeddings_are_refused(weight: Tensor, neighbours: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenGeometry.from_embeddings(weight, neighbours=neighbours)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    geometry = TokenGeometry.from_embeddings(torch.randn(10, 3), neighbours=3)
    for bad in (10, -2):
        with pytest.raises(ValueError, match="0..9"):
            geometry.cost(torch.tensor([[1, bad]]))
    with pytest.raises(ValueError, match="meta"):
        geometry.cost(torch.zeros(1, 2, dtype=torch.long, device="meta"))


def test_never_holds_a_vocabulary_squared_matrix() -> None:
    """Everything a geometry keeps beside the embeddings is a few numbers per token."""
    geometry = TokenGeometry.from_embeddings(torch.randn(300, 8), neighbours=50)
    kept = [value for name, value in vars(geometry).items() if isinstance(value, Tensor) and name != "embeddings"]
    assert sum(tensor.numel() for tensor in kept) == 3 * 300
    assert np.isfinite(geometry.scale)


@pytest.mark.parametrize("factor", [1e2, 1e5])
def test_an_outlier_does_not_move_the_scale(factor: float) -> None:
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(8))
    plain = TokenGeometry.from_embeddings(weight, neighbours=10)
    weight[0] *= factor
    assert TokenGeometry.from_embeddings(weight, neighbours=10).scale == pytest.approx(plain.scale, rel=0.01)


def test_users_metric_may_round_below_zero_but_must_be_symmetric() -> None:
    weight = torch.randn(80, 6, generator=torch.Generator().manual_seed(9))
    unit = torch.nn.functional.normalize
    cosine = TokenGeometry.from_embeddings(weight, lambda x, y: 1 - unit(x, dim=-1) @ unit(y, dim=-1).mT, neighbours=5)
    torch.testing.assert_close(
        cosine.radius, TokenGeometry.from_embeddings(weight, "cosine", neighbours=5).radius, atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="not symmetric: the cost from token"):
        TokenGeometry.from_embeddings(weight, lambda x, y: torch.cdist(x, 2 * y), neighbours=5)


def test_nearest_tokens_outside_the_vocabulary() -> None:
    geometry = TokenGeometry.from_embeddings(torch.randn(10, 3), neighbours=3)
    for token, count in ((10, 1), (-1, 1), (0, 10)):
        with pytest.raises(ValueError, match="vocabulary of 10 tokens"):
            geometry.nearest_tokens(token, count)
