"""Case studies: the transport is shown as it is, texts of tokens are readable, models give the same as their logits."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.analysis.columns import column
from tests.data.tokenizers_made_here import plain
from tests.ppo import tiny
from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein
from wpr.analysis.case_study import (
    OTHER_TOKENS,
    candidate_costs,
    case_finding,
    case_study,
    first_candidates,
    net_flow,
    singled_out,
    study_response,
    token_text,
)

EXACT: dict[str, Any] = {"tolerance": 1e-12, "iterations": 5000}
KEYS = {
    "text", "id", "kl", "wpr", "policy", "reference", "candidates", "plan", "moved", "unmatched_policy",
    "unmatched_reference", "nearest",
}  # fmt: skip


def geometry(scale: Any = "median-nn", neighbours: int | None = 12) -> TokenGeometry:
    """20 words of three near synonyms each, in consecutive ids."""
    return TokenGeometry.from_embeddings(clustered_embeddings(spread=0.1), neighbours=neighbours, scale=scale)


def logits(rows: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = 2 * torch.randn(2, rows, 60, generator=generator)
    return policy, reference, policy.softmax(-1).multinomial(1, generator=generator).squeeze(-1)


def study(policy: Tensor, reference: Tensor, tokens: Tensor, regularizer: Wasserstein) -> list[dict[str, Any]]:
    return case_study(policy, reference, tokens, lambda token: f"t{token}", ReverseKL(), regularizer)


def one_hot_logits(masses: dict[int, float]) -> Tensor:
    """Logits ``(1, 60)`` of a distribution with these masses; the other tokens share what is left."""
    p = torch.full((1, 60), (1 - sum(masses.values())) / (60 - len(masses)), dtype=torch.float64)
    for token, mass in masses.items():
        p[0, token] = mass
    return p.log()


def test_a_study_holds_what_the_token_view_needs() -> None:
    policy, reference, tokens = logits(20)
    regularizer = Wasserstein(geometry(), "unbalanced", k2=20)
    found = study(policy, reference, tokens, regularizer)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(found) == 20
    penalties = {"kl": ReverseKL()(policy, reference, tokens), "wpr": regularizer(policy, reference, tokens)}
    for row, token in enumerate(found):
        assert set(token) == KEYS
        assert (token["text"], token["id"]) == (f"t{tokens[row]}", int(tokens[row]))
        for name, out in penalties.items():
            assert token[name] == pytest.approx(out.penalty[row].item(), abs=2e-3), name
        assert token["policy"] == pytest.approx(policy[row].softmax(-1)[tokens[row]].item(), rel=1e-4)
        assert token["reference"] == pytest.approx(reference[row].softmax(-1)[tokens[row]].item(), rel=1e-4)
        assert len(token["candidates"]) <= 12
        assert token["text"] in [candidate["text"] for candidate in token["candidates"]]
        assert len(token["plan"]) <= 16
        masses = [flow["mass"] for flow in token["plan"]]
        assert masses == sorted(masses, reverse=True)
        assert len(token["nearest"]) == 6


def test_candidates_are_the_likeliest_of_either_model() -> None:
    policy, reference, _ = logits(1)
    larger = torch.maximum(policy.softmax(-1), reference.softmax(-1))[0]
    order = larger.argsort(descending=True).tolist()
    rare = order[-1]
    found = study(policy, reference, torch.tensor([rare]), Wasserstein(geometry(), "unbalanced", k2=20))[0][
        "candidates"
    ]
    assert [candidate["text"] for candidate in found] == [f"t{token}" for token in [*order[:11], rare]]
    assert found[0]["policy"] == pytest.approx(policy.softmax(-1)[0, order[0]].item(), rel=1e-5)


@pytest.mark.parametrize("preset", ["unbalanced", "paper"])
def test_nothing_moves_where_policy_and_reference_agree(preset: Any) -> None:
    """Although the entropic plan itself is spread over synonyms. Only they are joined here: between words as far apart
    as these, balanced iterations converge too slowly to show a zero.
    """
    policy, _, tokens = logits()
    regularizer = Wasserstein(geometry(neighbours=2), preset, k2=60, lam=2.0, scaled=True, floor=0.0, **EXACT)
    support = regularizer.support(policy.double(), policy.double(), tokens)
    plan = regularizer.transport_plan(support).plan
    swapped = plan.sum((-2, -1)) - plan.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert swapped.min().item() > 0.02
    for token in study(policy, policy.clone(), tokens, regularizer):
        assert token["moved"] < 1e-9
        assert token["unmatched_policy"] < 1e-9
        assert token["unmatched_reference"] < 1e-9
        assert all(flow["from"] == flow["to"] and flow["cost"] == 0 for flow in token["plan"])
        if preset == "unbalanced":
            assert token["wpr"] == pytest.approx(0, abs=1e-9)


def test_mass_goes_to_the_synonym_at_its_distance() -> None:
    """0.3 more on token 6 than the reference has, which has it on the synonym 7."""
    space = geometry()
    policy, reference = one_hot_logits({6: 0.6, 7: 0.1, 30: 0.25}), one_hot_logits({6: 0.3, 7: 0.4, 30: 0.25})
    regularizer = Wasserstein(space, "unbalanced", k2=20, lam=20.0, **EXACT)
    token = study(policy, reference, torch.tensor([6]), regularizer)[0]
    ids, distances = space.nearest_tokens(6, 2)
    (move,) = [flow for flow in token["plan"] if flow["from"] != flow["to"] and flow["mass"] > 0.01]
    assert (move["from"], move["to"]) == ("t6", "t7")
    assert 0.2 < move["mass"] < 0.3
    assert move["cost"] == pytest.approx(distances[ids.tolist().index(7)].item(), rel=1e-4)
    assert token["moved"] == pytest.approx(move["mass"], abs=0.01)
    assert [near["text"] for near in token["nearest"]][:2] == [f"t{i}" for i in ids.tolist()]
    assert token["nearest"][0]["distance"] == pytest.approx(distances[0].item(), rel=1e-5)


def test_costs_are_in_units_of_the_scale_whether_or_not_the_regularizer_uses_it() -> None:
    space = geometry()
    assert abs(space.scale - 1) > 0.3
    policy, reference = one_hot_logits({6: 0.6, 7: 0.1, 30: 0.25}), one_hot_logits({6: 0.3, 7: 0.4, 30: 0.25})
    scaled = Wasserstein(space, "unbalanced", k2=20, lam=20.0, rho=8.0, **EXACT)
    plain_units = Wasserstein(
        space, "unbalanced", k2=20, lam=20.0 / space.scale, rho=8.0 * space.scale, scaled=False, **EXACT
    )
    one, other = (study(policy, reference, torch.tensor([6]), each)[0] for each in (scaled, plain_units))
    assert one["plan"][0] == other["plan"][0]
    for this, that in zip(one["plan"], other["plan"], strict=True):
        assert (this["from"], this["to"]) == (that["from"], that["to"])
        assert this["mass"] == pytest.approx(that["mass"], rel=1e-4)
        assert this["cost"] == pytest.approx(that["cost"], rel=1e-4)


def test_with_huge_costs_mass_is_unmatched_instead() -> None:
    """The limit is the squared Hellinger distance: sqrt(a b) is matched, a token at a time."""
    policy, reference, tokens = logits()
    regularizer = Wasserstein(geometry(scale=1e-7), "unbalanced", k2=60, lam=500.0, rho=1.0, **EXACT)
    p, q = policy.double().softmax(-1), reference.double().softmax(-1)
    for row, token in enumerate(study(policy, reference, tokens, regularizer)):
        assert token["moved"] == 0
        matched = (p[row] * q[row]).sqrt()
        assert token["unmatched_policy"] == pytest.approx((p[row] - matched).clamp_min(0).sum().item(), abs=5e-3)
        assert token["unmatched_reference"] == pytest.approx((q[row] - matched).clamp_min(0).sum().item(), abs=5e-3)


def test_swapping_the_models_turns_every_flow_round() -> None:
    policy, reference, tokens = logits(8)
    regularizer = Wasserstein(geometry(), "unbalanced", k2=30, **EXACT)
    there, back = study(policy, reference, tokens, regularizer), study(reference, policy, tokens, regularizer)
    for one, other in zip(there, back, strict=True):
        flows = {(flow["from"], flow["to"]): flow["mass"] for flow in one["plan"]}
        turned = {(flow["to"], flow["from"]): flow["mass"] for flow in other["plan"]}
        assert flows == pytest.approx(turned, rel=1e-5)
        assert one["moved"] == pytest.approx(other["moved"], rel=1e-5)
        assert one["unmatched_policy"] == pytest.approx(other["unmatched_reference"], rel=1e-4)


@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_net_flow_keeps_both_marginals_and_swaps_nothing(n: int, seed: int) -> None:
    plan = torch.rand(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = net_flow(plan)
    torch.testing.assert_close(found.sum(-1), plan.sum(-1))
    torch.testing.assert_close(found.sum(-2), plan.sum(-2))
    assert (found >= 0).all()
    assert (torch.minimum(found, found.mT).triu(1) == 0).all()


def test_the_leftover_has_a_name() -> None:
    policy, reference, tokens = logits()
    found = study(policy, reference, tokens, Wasserstein(geometry(), "unbalanced", k2=2))
    for token in found:
        (rest,) = [flow for flow in token["plan"] if OTHER_TOKENS in (flow["from"], flow["to"])]
        assert rest["from"] == rest["to"] == OTHER_TOKENS
        assert 0 < rest["mass"] < 1


def test_tokens_written_alike_are_told_apart_in_a_move() -> None:
    policy, reference = one_hot_logits({6: 0.6, 7: 0.1, 30: 0.25}), one_hot_logits({6: 0.3, 7: 0.4, 30: 0.25})
    regularizer = Wasserstein(geometry(), "unbalanced", k2=20)
    found = case_study(policy, reference, torch.tensor([6]), lambda _: "same", ReverseKL(), regularizer)[0]
    moves = [flow for flow in found["plan"] if flow["cost"] > 0]
    assert (moves[0]["from"], moves[0]["to"]) == ("same #6", "same #7")


def test_an_infinite_penalty_is_none() -> None:
    policy, reference, _ = logits(1)
    reference[0, 9] = -torch.inf
    found = study(policy, reference, torch.tensor([9]), Wasserstein(geometry(), "unbalanced", k2=20))[0]
    assert found["kl"] is None
    assert np.isfinite(found["wpr"])
    assert found["reference"] == 0


def test_byte_level_tokens() -> None:
    tokenizer = plain()
    text = token_text(tokenizer)
    ids = tokenizer(" the sea \U0001f600é")["input_ids"]
    shown = [text(token) for token in ids]
    assert shown[:2] == [" the", " sea"]
    assert "\ufffd" not in "".join(shown)
    assert shown[-6:] == ["\\xf0", "\\x9f", "\\x98", "\\x80", "\\xc3", "\\xa9"]
    assert text(tokenizer.eos_token_id) == "<eos>"
    assert text(100_000) == "(token 100000)"


def test_every_byte_is_written() -> None:
    """ASCII as itself, other bytes by their value, whatever character stands for them in the vocabulary."""
    tokenizer = plain()
    text = token_text(tokenizer)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    shown = {text(tokenizer.convert_tokens_to_ids(character)) for character in alphabet}
    assert shown == {chr(i) for i in range(128)} | {f"\\x{i:02x}" for i in range(128, 256)}


def test_a_piece_with_half_a_character_shows_the_rest() -> None:
    pieces = {"<unk>": 0, "aÃ": 1, "Ġ\u0141\u0142": 2}
    inner = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    inner.decoder = decoders.ByteLevel()
    text = token_text(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert text(1) == "a\\xc3"
    assert text(2) == " \\x9f\\xa0"


def test_sentencepiece_tokens() -> None:
    pieces = {"<unk>": 0, "\u2581happy": 1, "ness": 2, "<0xF0>": 3, "\u2581\u2581": 4}
    inner = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = token_text(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert [text(token) for token in range(5)] == ["<unk>", " happy", "ness", "\\xf0", "  "]


def test_a_study_of_models_is_that_of_their_logits() -> None:
    policy, reference, tokenizer = tiny.policy(0), tiny.policy(1), tiny.tokenizer()
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)
    regularizer = Wasserstein(TokenGeometry.from_model(reference, neighbours=10, progress=False), "unbalanced", k2=10)
    prompt, response = [2, 5, 6], [7, 8, 9, 10, 1]
    policy.train()
    found = study_response(
        policy, reference, tokenizer, prompt, response, ReverseKL(), regularizer, number=4, score=1.5, temperature=0.7
    )
    assert policy.training
    assert not reference.training
    assert (found["number"], found["score"], found["gold"]) == (4, 1.5, None)
    assert (found["prompt"], found["response"]) == ("w5 w6", "w7 w8 w9 w10")
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        p, q = (model.eval()(input_ids=ids).logits[0, 2:-1] / 0.7 for model in (policy, reference))
    expected = case_study(p, q, torch.tensor(response), token_text(tokenizer), ReverseKL(), regularizer)
    assert [token["text"] for token in found["tokens"]] == ["w7", "w8", "w9", "w10", "</s>"]
    for this, that in zip(found["tokens"], expected, strict=True):
        for name in ("kl", "wpr", "moved", "policy", "reference"):
            assert this[name] == pytest.approx(that[name], abs=1e-5), name
    assert max(abs(token["kl"]) for token in expected) > 0.1


def test_without_a_reference_it_is_the_policy_with_its_adapter_off() -> None:
    base = tiny.policy(0)
    adapted = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    regularizer = Wasserstein(TokenGeometry.from_model(base, neighbours=10, progress=False), "unbalanced", k2=10)
    parts = (tiny.tokenizer(), [2, 5], [7, 8, 9], ReverseKL(), regularizer)
    found, expected = study_response(adapted, None, *parts), study_response(adapted, base, *parts)
    assert found == expected
    assert max(abs(token["kl"]) for token in found["tokens"]) > 0.1


def test_a_response_of_no_tokens_has_an_empty_study() -> None:
    model = tiny.policy(0)
    regularizer = Wasserstein(TokenGeometry.from_model(model, neighbours=10, progress=False), "unbalanced", k2=10)
    found = study_response(model, model, tiny.tokenizer(), [2, 5], [], ReverseKL(), regularizer)
    assert (found["response"], found["tokens"]) == ("", [])


def test_refusals() -> None:
    model = tiny.policy(0)
    regularizer = Wasserstein(TokenGeometry.from_model(model, neighbours=10, progress=False), "unbalanced", k2=10)
    with pytest.raises(ValueError, match="a prompt of no tokens"):
        study_response(model, model, tiny.tokenizer(), [], [5], ReverseKL(), regularizer)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapter to switch off; pass the reference model"):
        study_response(model, None, tiny.tokenizer(), [2], [5], ReverseKL(), regularizer)


def token(text: str, kl: float | None, wpr: float, plan: list[dict[str, Any]]) -> dict[str, Any]:
    return {"text": text, "policy": 0.5, "reference": 0.25, "kl": kl, "wpr": wpr, "moved": 0.1, "plan": plan}


def test_a_case_study_as_a_table() -> None:
    stays = {"from": " dog", "to": " dog", "mass": 0.9, "cost": 0.0}
    moves = {"from": " dog", "to": " cat", "mass": 0.1, "cost": 1.5}
    tokens = [token(" dog", 0.7, 0.2, [stays, moves]), token(" ran", 0.1, 0.4, [stays]), token("!", None, 0.3, [])]
    finding = case_finding({"rkl": {"response": " dog ran!", "tokens": tokens}}, "A", "semantic")
    assert column(finding, "largest move") == [" dog ->  cat", None, None]
    assert column(finding, "KL penalty") == [0.7, 0.1, None]
    kl, other = finding.figures[0].series
    assert kl.y[:2] == [1.0, 0.0]
    assert math.isnan(kl.y[2])
    assert other.y == pytest.approx([0.0, 1.0, 0.5])
    assert any("reverse KL is largest at ' dog' (0.7)" in sentence for sentence in finding.text)


def test_tokens_that_penalties_see_differently_are_shown_with_both_distributions_and_costs() -> None:
    policy, reference, tokens = logits(20)
    regularizer = Wasserstein(geometry(), "unbalanced", k2=20)
    found = study(policy, reference, tokens, regularizer)
    spread = {key: [token[key] for token in found] for key in ("kl", "wpr")}
    own = {key: [(one - min(values)) / (max(values) - min(values)) for one in values] for key, values in spread.items()}
    apart = [kl - wpr for kl, wpr in zip(own["kl"], own["wpr"], strict=True)]
    places = singled_out(found)
    assert places == [apart.index(max(apart)), apart.index(min(apart))]
    for place in places:
        found[place]["costs"] = candidate_costs(found[place], regularizer)
    finding = case_finding({"w": {"response": "x", "tokens": found}}, "A", "semantic")
    assert [figure.kind for figure in finding.figures] == ["lines", "bars", "matrix", "bars", "matrix"]
    for number, place in enumerate(sorted(places)):
        bars, costs = finding.figures[1 + 2 * number : 3 + 2 * number]
        ids = [int(str(name)[1:]) for name in bars.series[0].x]
        assert int(tokens[place]) in ids
        for series, models_logits in zip(bars.series, (policy, reference), strict=True):
            assert series.y == pytest.approx(models_logits[place].softmax(-1)[ids].tolist(), rel=1e-4)
        expected = geometry().cost(torch.tensor([ids]))[0]
        assert [one.name for one in costs.series] == bars.series[0].x
        for series, row in zip(costs.series, expected, strict=True):
            np.testing.assert_allclose(series.y, row.masked_fill(row.isinf(), math.nan), rtol=1e-4, equal_nan=True)


def test_a_token_that_nobody_expected_is_among_those_shown() -> None:
    policy, reference, _ = logits(1)
    rare = int(torch.maximum(policy.softmax(-1), reference.softmax(-1))[0].argmin())
    (token,) = study(policy, reference, torch.tensor([rare]), Wasserstein(geometry(), "unbalanced", k2=20))
    assert [one["id"] for one in first_candidates(token)][-1] == rare
    assert len(first_candidates(token)) == 6
