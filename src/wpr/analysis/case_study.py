"""Case study of a response: what two penalties say of each token, and the transport behind one of them.

Notation for shapes: ``P`` positions of one response, ``V`` vocabulary, ``n`` support entries.

A study is made of plain numbers and texts, ready for JSON; the token view of the report shows it. Three choices make
its transport readable (``docs/evaluation.md`` gives the reasons):

    net flow        N_ij = max(P_ij - P_ji, 0), N_ii = the rest of row i
                    Entropy lets near synonyms swap mass both ways, also where policy and reference agree. Only the
                    difference is shown as moved. N has the row and column sums of the plan P.
    unmatched mass  sum_i max(rest_i - row_i, 0), and the same over columns
                    What relaxed marginals destroy of the policy and create of the reference, over what a distribution
                    leaves unmatched of itself (`TransportPlan`).
    unit of cost    the geometry's scale: 1 is the distance of a typical token to its nearest neighbour, whether or not
                    the regularizer divides by it
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.answers import positions
from wpr.analysis.context import AnalysisContext, Found, noted
from wpr.data import Row
from wpr.errors import OptionError
from wpr.findings import Cell, Figure, Finding, Series, slug
from wpr.language_models import is_peft
from wpr.regularizers import Regularizer, ReverseKL, Wasserstein
from wpr.regularizers.wasserstein import TransportPlan
from wpr.runs.responses import Response

OTHER_TOKENS = "(all other tokens)"
"""The text of the support's leftover entry."""

CANDIDATES, MOVES, FLOWS, NEAREST = 12, 10, 16, 6
"""Of a token: most likely candidates; moves, and flows (moves and what stayed) of the plan; nearest tokens."""

SHOWN = 6
"""Of a token that is singled out: candidates in the figures of distributions and costs."""

LEAST_MASS = 1e-5
"""Flows below it are rounding and the solver's tolerance."""

_POSITIONS_AT_ONCE = 16
"""A matrix of that many plans takes 8.5 MB for n = 258, and several exist at a time."""

Decode = Callable[[int], str]
"""The text of a token; `token_text` makes one of a tokenizer."""

COLUMNS = [
    "policy", "place", "token", "policy's probability", "reference's", "KL penalty", "Wasserstein penalty",
    "mass moved", "largest move", "its mass", "its cost",
]  # fmt: skip


def analyze(
    context: AnalysisContext, prompt: str | None = None, regularizer: str = "semantic", tokens: int = 64
) -> Found:
    """The most likely response of each policy to one prompt, token by token."""
    policies = context.chosen
    if prompt is None:
        ids = context.answers(policies[0])[0].prompt_ids
        prompt = context.run.tokenizer.decode(ids, skip_special_tokens=True)
    else:
        ids = context.run.encoder.prompt(Row(prompt))
    if not ids:
        raise OptionError("the prompt has no tokens; write one with --prompt TEXT")
    wasserstein = context.regularizers.make_all([regularizer])[regularizer]
    if not isinstance(wasserstein, Wasserstein):
        raise OptionError(f"{regularizer} moves no mass; name a Wasserstein setting, as semantic or paper")
    studies = {}
    for policy in policies:
        context.say(f"{policy} answers")
        model = context.run.load(policy)
        given = torch.tensor([ids], device=context.run.device)
        stops = sorted({context.run.encoder.end_id, context.run.tokenizer.eos_token_id})
        drawn = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False,
            eos_token_id=stops, pad_token_id=context.run.tokenizer.pad_token_id,
        )[0, len(ids) :].tolist()  # fmt: skip
        studies[policy] = study_response(
            model, context.reference, context.run.tokenizer, ids, drawn, ReverseKL(), wasserstein,
            temperature=context.run.temperature(policy),
        )  # fmt: skip
        for place in singled_out(studies[policy]["tokens"]):
            token = studies[policy]["tokens"][place]
            token["costs"] = candidate_costs(token, wasserstein)
    finding = case_finding(studies, prompt.strip(), regularizer, context.settings(tokens=tokens))
    data = ({"policy": policy} | study for policy, study in studies.items())
    return noted(finding, *context.regularizers.notes([regularizer])), data


def study_response(
    policy: Any,
    reference: Any | None,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    kl: Regularizer,
    wasserstein: Wasserstein,
    *,
    number: int = 0,
    score: float | None = None,
    gold: float | None = None,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """One study: a response by its tokens, under both models.

    policy, reference: causal LMs on the geometry's device; without a reference, the policy with its adapter off.
    prompt_ids, response_ids: without padding; the end-of-sequence token is part of the response if it was drawn.
    number, score, gold: of the response, put into the study as they are.
    temperature: of the distributions that are compared, a run's ``logprob_temperature``.
    """
    if not prompt_ids:
        raise ValueError(
            "a prompt of no tokens gives the first token nothing to follow; begin with the tokenizer's bos"
        )
    if reference is None and not is_peft(policy):
        raise ValueError(f"{type(policy).__name__} has no adapter to switch off; pass the reference model")
    training = policy.training
    decode = token_text(tokenizer)
    answer = Response("", "", "", prompt_ids=prompt_ids, response_ids=response_ids)
    tokens = [
        token
        for part in positions(policy, reference, [answer], temperature)
        for token in case_study(part.policy, part.reference, part.tokens, decode, kl, wasserstein)
    ]
    policy.train(training)
    return {
        "number": number,
        "prompt": tokenizer.decode(list(prompt_ids), skip_special_tokens=True),
        "response": tokenizer.decode(list(response_ids), skip_special_tokens=True),
        "score": score,
        "gold": gold,
        "tokens": tokens,
    }


@torch.no_grad()
def case_study(
    policy_logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    decode: Decode,
    kl: Regularizer,
    wasserstein: Wasserstein,
) -> list[dict[str, Any]]:
    """Each token ``(P,)`` of a response, from the logits ``(P, V)`` that it was drawn from and the reference's.

    A token has ``text``, ``id``, its penalties ``kl`` and ``wpr``, its probabilities ``policy`` and ``reference``;
    ``candidates``: the most likely tokens by the larger of both probabilities with their ``id``, and the token itself
    in any case;
    ``plan``: net flows from the policy to the reference with ``mass`` and ``cost``: the largest moves, and in the
    remaining places what stayed (``from`` is ``to``, cost 0), by mass; ``moved``: the mass that goes to another token;
    ``unmatched_policy`` and ``unmatched_reference``; ``nearest``: the nearest tokens with ``distance`` and both
    probabilities. Numbers have six digits; one that is not finite is None. All is computed in float64.
    """
    geometry = wasserstein.geometry
    count = min(NEAREST, geometry.vocabulary - 1)
    nearest = cache(lambda token: [found.tolist() for found in geometry.nearest_tokens(token, count)])
    studied: list[dict[str, Any]] = []
    for rows in torch.arange(len(tokens), device=tokens.device).split(_POSITIONS_AT_ONCE):
        policy, reference, drawn = policy_logits[rows].double(), reference_logits[rows].double(), tokens[rows]
        support = wasserstein.reduce(policy, reference, drawn)
        transport = wasserstein.transport_plan(support)
        flow = net_flow(transport.plan)
        stayed = flow.diagonal(dim1=-2, dim2=-1)
        cost = transport.cost if wasserstein.settings.scaled else transport.cost / geometry.scale
        by_position = {
            "kl": kl(policy, reference, drawn).penalty,
            "wpr": wasserstein.finish([support]).penalty,
            "moved": (flow - torch.diag_embed(stayed)).sum((-2, -1)),
            **_unmatched(transport),
        }
        p, q = policy.softmax(-1), reference.softmax(-1)
        for row, token in enumerate(drawn.tolist()):
            one = _Position(p[row], q[row], decode)
            studied.append(
                one.token(token)
                | {"id": token}
                | {name: _number(values[row]) for name, values in by_position.items()}
                | {
                    "candidates": one.candidates(token),
                    "plan": _largest_flows(flow[row], cost[row], support.ids[row].tolist(), decode),
                    "nearest": [one.token(i) | {"distance": _number(d)} for i, d in zip(*nearest(token), strict=True)],
                }
            )
    return studied


def net_flow(plan: Tensor) -> Tensor:
    """A plan ``(..., n, n)`` without what two entries only swap, of the same row and column sums: what is moved, and on
    the diagonal what stays.
    """
    moved = (plan - plan.mT).clamp_min_(0)
    stayed = plan.sum(-1) - moved.sum(-1)
    return moved + torch.diag_embed(stayed)


def _unmatched(transport: TransportPlan) -> dict[str, Tensor]:
    """Mass of either side that the plan leaves unmatched, beyond what each side leaves of itself: ``(P,)`` each."""
    rows, columns = transport.plan.sum(-1), transport.plan.sum(-2)
    return {
        "unmatched_policy": (transport.policy_at_rest - rows).clamp_min(0).sum(-1),
        "unmatched_reference": (transport.reference_at_rest - columns).clamp_min(0).sum(-1),
    }


class _Position:
    """Two next-token distributions ``(V,)`` and how their tokens are written."""

    def __init__(self, policy: Tensor, reference: Tensor, decode: Decode) -> None:
        self.policy, self.reference, self.decode = policy, reference, decode

    def token(self, token: int) -> dict[str, Any]:
        probabilities = {"policy": _number(self.policy[token]), "reference": _number(self.reference[token])}
        return {"text": self.decode(token)} | probabilities

    def candidates(self, drawn: int) -> list[dict[str, Any]]:
        larger = torch.maximum(self.policy, self.reference)
        best: list[int] = larger.topk(min(CANDIDATES, len(larger))).indices.tolist()
        if drawn not in best:
            best[-1] = drawn
        return [self.token(token) | {"id": token} for token in best]


def singled_out(tokens: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the tokens that the two penalties see most differently, of those that neither lacks: where reverse KL
    objects more than the Wasserstein penalty, each on its own range, and where it objects less.
    """
    kl, wpr = (_normalised([token[key] for token in tokens]) for key in ("kl", "wpr"))
    apart = {place: a - b for place, (a, b) in enumerate(zip(kl, wpr, strict=True)) if math.isfinite(a - b)}
    if not apart:
        return []
    return list(dict.fromkeys([max(apart, key=lambda place: apart[place]), min(apart, key=lambda place: apart[place])]))


def first_candidates(token: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first `SHOWN` candidates, the token itself in the last place where it is not among them."""
    first: list[Mapping[str, Any]] = token["candidates"][:SHOWN]
    if all(one["id"] != token["id"] for one in first):
        first[-1] = next(one for one in token["candidates"] if one["id"] == token["id"])
    return first


def candidate_costs(token: Mapping[str, Any], wasserstein: Wasserstein) -> list[list[float | None]]:
    """Costs between `first_candidates`, in units of the geometry's scale; None between tokens that are not
    among each other's nearest, which are infinitely far apart.
    """
    geometry = wasserstein.geometry
    ids = torch.tensor([[one["id"] for one in first_candidates(token)]], device=geometry.embeddings.device)
    return [[_number(cost) for cost in row] for row in geometry.cost(ids)[0]]


def _largest_flows(flow: Tensor, cost: Tensor, ids: Sequence[int], decode: Decode) -> list[dict[str, Any]]:
    """The flows ``(n, n)`` that are shown, by mass."""
    last = len(ids) - 1

    def name(entry: int) -> str:
        return OTHER_TOKENS if entry == last else decode(ids[entry])

    def describe(start: int, end: int) -> dict[str, Any]:
        source, target = name(start), name(end)
        if start != end and source == target:  # different tokens that are written alike did move
            source, target = f"{source} #{ids[start]}", f"{target} #{ids[end]}"
        return {
            "from": source,
            "to": target,
            "mass": _number(flow[start, end]),
            "cost": _number(cost[start, end]),
        }

    moved = flow - torch.diag_embed(flow.diagonal())
    masses, places = moved.flatten().topk(min(MOVES, moved.numel()))
    shown = [divmod(place, len(ids)) for place in places[masses >= LEAST_MASS].tolist()]
    masses, stayed = flow.diagonal().topk(min(FLOWS - len(shown), len(ids)))
    shown += [(entry, entry) for entry in stayed[masses >= LEAST_MASS].tolist()]
    return [describe(*pair) for pair in sorted(shown, key=lambda pair: -float(flow[pair]))]


def token_text(tokenizer: Any) -> Decode:
    """How single tokens are written, with the space before a word.

    A piece that is no whole character (a byte of an emoji, say) is written as far as it is text, and the rest as bytes,
    ``\\xf0\\x9f``. Special tokens are written by their names, ids that the tokenizer does not know as ``(token 51)``.
    """
    special = set(tokenizer.all_special_ids)

    @cache
    def text(token: int) -> str:
        piece: str | None = tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"(token {token})"
        if token in special:
            return piece
        if piece.startswith(_WORD_START):  # decoding a single token would drop the space
            return piece.replace(_WORD_START, " ")
        decoded: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if decoded and "\ufffd" not in decoded:
            return decoded
        raw = _bytes_of(piece)
        return piece if raw is None else raw.decode("utf-8", errors="backslashreplace")

    return text


_WORD_START = "\u2581"
"""What SentencePiece writes for a space."""

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))
}
"""The byte behind each character of byte-level pieces: bytes that can be seen stand for themselves, the others for the
characters from U+0100 on, in order.
"""


def _bytes_of(piece: str) -> bytes | None:
    """The bytes of a byte-level piece, or of a byte like ``<0xF0>``; None for other pieces."""
    fallback = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    if fallback:
        return bytes.fromhex(fallback[1])
    return bytes(_BYTES[character] for character in piece) if set(piece) <= set(_BYTES) else None


def _number(value: Tensor | float) -> float | None:
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def case_finding(
    studies: Mapping[str, Mapping[str, Any]], prompt: str, wasserstein: str, settings: Mapping[str, Any] | None = None
) -> Finding:
    """The finding on one study per policy, as `study_response` makes them. wasserstein: what its penalty is called."""
    rows: list[list[Cell]] = []
    figures, text = [], [f"Prompt: {prompt}"]
    for policy, study in studies.items():
        tokens = study["tokens"]
        text.append(f"{policy} answers: {study['response'].strip() or '(nothing)'}")
        text += _summary(policy, tokens)
        for place, token in enumerate(tokens, 1):
            move = next((flow for flow in token["plan"] if flow["from"] != flow["to"]), None)
            moved = (
                [None, None, None] if move is None else [f"{move['from']} -> {move['to']}", move["mass"], move["cost"]]
            )
            rows.append(
                [
                    policy, place, token["text"], token["policy"], token["reference"], token["kl"], token["wpr"],
                    token["moved"], *moved,
                ]
            )  # fmt: skip
        places = [float(place) for place in range(1, len(tokens) + 1)]
        series = [
            Series(name, places, _normalised([token[key] for token in tokens]))
            for name, key in (("reverse KL", "kl"), (wasserstein, "wpr"))
        ]
        figures.append(
            Figure(
                "lines", f"{policy}: penalties token by token", "token", "penalty, of its range", series,
                name=f"tokens-{slug(policy)}",
                note="Each penalty from its smallest value in the response (0) to its largest (1).",
            )
        )  # fmt: skip
        for place, token in enumerate(tokens, 1):
            figures += _two_distributions(policy, place, token) if token.get("costs") else []
    return Finding(
        name="case-study",
        title="Case study of a prompt",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=figures,
        settings={"prompt": prompt, "wasserstein": wasserstein, **(settings or {})},
    )


def _two_distributions(policy: str, place: int, token: Mapping[str, Any]) -> list[Figure]:
    """Both models' probabilities of the candidates for one token, and the costs between these."""
    shown = first_candidates(token)
    written = [one["text"].strip() or repr(one["text"]) for one in shown]
    names = [
        f"{text} #{one['id']}" if written.count(text) > 1 else text for text, one in zip(written, shown, strict=True)
    ]
    head = f"{policy}, token {place} ({token['text'].strip() or repr(token['text'])})"
    distributions = [
        Series(title, names, [math.nan if one[key] is None else one[key] for one in shown])
        for title, key in ((policy, "policy"), ("reference", "reference"))
    ]
    costs = [
        Series(name, names, [math.nan if cost is None else cost for cost in row])
        for name, row in zip(names, token["costs"], strict=True)
    ]
    return [
        Figure(
            "bars", f"{head}: next-token probabilities", "", "probability", distributions,
            name=f"token-{slug(policy)}-{place}-probabilities",
            note=f"{len(shown)} tokens: the most likely by the larger of both probabilities, and the one drawn. "
            f"Penalties: reverse KL {token['kl']:.3g}, Wasserstein {token['wpr']:.3g}.",
        ),
        Figure(
            "matrix", f"{head}: costs between candidates", "", "cost", costs,
            name=f"token-{slug(policy)}-{place}-costs",
            note="1 is the distance of a typical token to its nearest neighbour. Gaps: not among each other's nearest, "
            "so that no mass goes there.",
        ),
    ]  # fmt: skip


def _summary(policy: str, tokens: list[Mapping[str, Any]]) -> list[str]:
    """The tokens that each penalty objects to most."""
    sentences = []
    for name, key in (("reverse KL", "kl"), ("the Wasserstein penalty", "wpr")):
        ranked = sorted((token for token in tokens if token[key] is not None), key=lambda token: -token[key])[:3]
        listed = ", ".join(f"{token['text']!r} ({token[key]:.3g})" for token in ranked)
        sentences.append(f"{policy}: {name} is largest at {listed}.")
    return sentences


def _normalised(values: list[float | None]) -> list[float]:
    """From 0 at the smallest to 1 at the largest; a gap where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    spread = (high - low) or 1.0
    return [float("nan") if value is None else (value - low) / spread for value in values]
