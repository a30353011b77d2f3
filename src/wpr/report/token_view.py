"""The token view: each token of a response with its penalties, the distributions behind them and the transport plan.

The page's script draws it from data that is checked and shortened here; `tokens.json` of a policy is where it is from.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wpr.report.charts import looks
from wpr.report.markup import Markup, join, paragraph, shown, tag
from wpr.report.section import ReportData, Section
from wpr.runs.responses import Response, prompt_text
from wpr.runs.tolerant import Policy, Problems
from wpr.runs.values import as_text, finite, mapping

TOKENS = 400
"""Tokens of a response that are shown."""

BYTES = 1_900_000
"""Of all studies together."""

FEWEST = 24
"""Tokens that a study has in any case."""

LONGEST_PROMPT = 2000
"""Characters of a prompt; its end is what a response follows."""

CANDIDATES, MOVES, NEAREST = 12, 16, 6
SHOW = "run the policy's stage again to write it again; the rest of the page is not touched by it"


def token_section(findings: ReportData) -> Section:
    """Studies of all policies, as many as fit."""
    studies, left_out = findings.studies
    lead = (
        "Each token of a response, coloured by its penalty: orange would be discouraged, blue encouraged. Under KL "
        "orange means that the policy prefers the token more than the SFT model does; the Wasserstein penalty looks at "
        "its neighbours too. Click a token, or press Enter on it, for the two next-token "
        "distributions, the transport plan between them and the nearest tokens; arrow keys move."
    )
    if not studies:
        text = "No policy has a token view (ppo/POLICY/tokens.json): older runs, and those of some recipes, have none."
        body = paragraph(text, class_="empty")
        return Section("tokens", "Token view", lead, body)
    notes = []
    if left_out:
        text = f"{left_out} more responses were left out to keep the page small; tokens.json of each policy has them."
        notes.append(paragraph(text, class_="note"))
    # What stands in the box is replaced by the script.
    waiting = paragraph("The token view is drawn by JavaScript, which is off.", class_="empty")
    body = join(*notes, tag("div", waiting, id="token-view", data_first=_first(findings)))
    return Section("tokens", "Token view", lead, body, studies=studies)


class TokenLinks:
    """Where words of responses stand in the token view, of responses that it has."""

    def __init__(self, studies: Sequence[Mapping[str, Any]]) -> None:
        self._studies: dict[tuple[str, float | None], tuple[int, Mapping[str, Any]]] = {}
        for index, study in enumerate(studies):
            self._studies.setdefault((study["policy"], study["number"]), (index, study))

    def link(self, policy: Policy, row: Response, start: int, word: Markup) -> Markup:
        """The word, as a link to the token view if that has the token at this place of the response."""
        found = self.find(policy, row, start)
        if found is None:
            return word
        study, token = found
        return tag("a", word, href="#tokens", data_study=study, data_token=token, title="Open in the token view")

    def find(self, policy: Policy, row: Response, start: int) -> tuple[int, int] | None:
        """The study of a response and the token at this place of it, if the token view has them."""
        index, study = self._studies.get((policy.name, row.number), (0, {"tokens": ()}))
        token = token_at([token["text"] for token in study["tokens"]], row.response.strip(), start)
        return None if token is None else (index, token)


def token_at(tokens: Sequence[str], text: str, start: int) -> int | None:
    """Which token has the character at ``start`` of a text; None where the tokens do not spell the text, or end before.

    They may begin with spaces, and go on after it with a token that ends it.
    """
    spelled = "".join(tokens)
    before = len(spelled) - len(spelled.lstrip())
    if spelled[before : before + len(text)] != text[: len(spelled) - before]:
        return None
    end = -before
    for number, token in enumerate(tokens):
        end += len(token)
        if end > start:
            return number
    return None


def studies_on_page(findings: ReportData) -> tuple[list[dict[str, Any]], int]:
    """Studies that fit on the page, of the policies in turn, so that each has its first; and how many do not fit."""
    sources = [_studies_of(policy, findings.problems) for policy in findings.policies if policy.tokens is not None]
    share = BYTES // max(1, len(sources))
    kept: list[dict[str, Any]] = []
    used = left_out = 0
    for turn in itertools.zip_longest(*sources):
        for study in turn:
            if study is None:
                continue
            if used >= BYTES:
                left_out += 1
                continue
            used += _shorten(study, min(share, BYTES - used) if kept else share)
            kept.append(study)
    return kept, left_out


def _first(findings: ReportData) -> int:
    """The study that is open at first: one with a replaced word, if there is any."""
    links = TokenLinks(findings.studies[0])
    found = (
        links.find(policy, row, outcome.start)
        for words in findings.word_lists
        for policy in words.policies
        for row, outcome in words.outcomes[policy.name]
        if outcome.what == "replaced"
    )
    return min((place[0] for place in found if place is not None), default=0)


def _studies_of(policy: Policy, problems: Problems) -> Iterator[dict[str, Any]]:
    """The studies of a policy's tokens.json that have the shape they should, one when it is asked for."""
    given = policy.tokens or {}
    path = policy.folder / "tokens.json"
    listed = given.get("studies")
    if not isinstance(listed, list):
        problems.add(path, "has no list called studies", SHOW)
        return
    names = mapping(given.get("penalties"))
    settings = {name: finite(given.get(name)) for name in ("beta", "lam", "scale")}
    about = {
        "policy": policy.name,
        "looks": looks(policy.colour, policy.dash),
        "names": {"kl": as_text(names.get("kl")) or "KL", "wpr": as_text(names.get("wpr")) or "Wasserstein"},
        "settings": ", ".join(f"{name} {shown(value)}" for name, value in settings.items() if value is not None),
    }
    bad, first = 0, ""
    for number, study in enumerate(listed, 1):
        tokens, wrong = _tokens(study)
        if wrong is not None:
            bad += 1
            first = first or f"study {number}: {wrong}"
            continue
        known = mapping(study)
        yield about | {
            "number": finite(known.get("number")),
            "prompt": prompt_text(known.get("prompt"))[-LONGEST_PROMPT:],
            "score": _short(known.get("score")),
            "gold": _short(known.get("gold")),
            "tokens": tokens,
            "cut": len(known["tokens"]) - len(tokens),
        }
    if bad:
        problems.add(path, f"{bad} of {len(listed)} studies could not be used ({first})", SHOW)


def _shorten(study: dict[str, Any], most: int) -> int:
    """Leave out the last tokens of a study that takes more bytes than it may; the bytes that it takes then."""
    used = 0
    for number, token in enumerate(study["tokens"]):
        used += len(json.dumps(token))
        if used > most and number >= FEWEST:
            study["cut"] += len(study["tokens"]) - number
            study["tokens"] = study["tokens"][:number]
            break
    return used


def _tokens(study: object) -> tuple[list[dict[str, Any]], str | None]:
    """Tokens to show, and what is wrong with the study, if anything."""
    listed = mapping(study).get("tokens")
    if not isinstance(listed, list) or not listed:
        return [], "no list called tokens"
    found = []
    for number, token in enumerate(listed[:TOKENS], 1):
        if not isinstance(token, dict) or not isinstance(token.get("text"), str):
            return [], f"token {number} has no text"
        if finite(token.get("kl")) is None and finite(token.get("wpr")) is None:
            return [], f"token {number} has no penalty (kl, wpr)"
        found.append(_token(token))
    return found, None


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("kl", "wpr", "policy", "reference", "moved", "unmatched_policy", "unmatched_reference")
    return {
        "text": token["text"],
        **{name: _short(token.get(name)) for name in numbers},
        "candidates": _rows(token.get("candidates"), ("text",), ("policy", "reference"), CANDIDATES),
        "plan": _rows(token.get("plan"), ("from", "to"), ("mass", "cost"), MOVES),
        "nearest": _rows(token.get("nearest"), ("text",), ("distance", "policy", "reference"), NEAREST),
    }


def _rows(listed: object, texts: Sequence[str], numbers: Sequence[str], most: int) -> list[list[Any]]:
    """Objects of a list as rows of their texts and numbers; entries of another shape are left out."""
    rows = [mapping(entry) for entry in listed] if isinstance(listed, list) else []
    kept = [row for row in rows if all(isinstance(row.get(name), str) for name in texts)]
    return [[*(row[name] for name in texts), *(_short(row.get(name)) for name in numbers)] for row in kept[:most]]


def _short(value: object) -> float | None:
    found = finite(value)
    return None if found is None else float(f"{found:.4g}")
