"""Responses side by side: the SFT model and every policy on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

from wpr.report.charts import looks
from wpr.report.comparisons import SFT
from wpr.report.markup import Markup, join, paragraph, shown, tag
from wpr.report.section import ReportData, Section
from wpr.runs.responses import Response

PROMPTS = 60
"""Prompts that are shown at most."""

CHARACTERS = 1_200_000
"""Of prompts and responses together, at most; fewer prompts are shown where they are long."""

LONGEST = 4000
"""Characters of a prompt or response; the rest is cut off with a word on it."""

Answer = tuple[str, str, Response]
"""Who answered, its looks, and what."""


def response_section(findings: ReportData) -> Section:
    """One card per prompt, with the answers in columns."""
    exchanges = _exchanges(findings)
    kept = _within_budget(exchanges)
    articles = [_article(number, answers) for number, answers in enumerate(kept, 1)]
    parts: list[Markup] = []
    if len(kept) < len(exchanges):
        text = f"The first {len(kept)} of {len(exchanges)} are shown; responses.jsonl of each policy has all."
        parts.append(paragraph(text, class_="note"))
    if articles:
        parts.append(tag("div", *articles, class_="exchanges", id="exchanges"))
    else:
        parts.append(paragraph("There are no held-out responses yet.", class_="empty"))
    lead = (
        "What the SFT model and each policy answer to the same held-out prompts, with the "
        f"{findings.measures['score']} and, where there is one, the hidden gold score. "
        "Differences in brackets are from the SFT model's response."
    )
    return Section("responses", "Responses side by side", lead, join(*parts))


def _exchanges(findings: ReportData) -> list[list[Answer]]:
    """Answers to each prompt, in the order in which prompts are met."""
    found: dict[tuple[int, str], list[Answer]] = {}
    for policy in findings.policies:
        for row in policy.before:
            answers = found.setdefault((row.number, row.prompt_text), [])
            # Policies of one run, and of runs alike, started from one SFT model: its answer is shown once.
            if not any(looked == "neutral" and other.response == row.response for _, looked, other in answers):
                answers.append((SFT, "neutral", row))
    for policy in findings.policies:
        for row in policy.responses:
            answer = (policy.name, looks(policy.colour, policy.dash), row)
            found.setdefault((row.number, row.prompt_text), []).append(answer)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def _within_budget(exchanges: Sequence[list[Answer]]) -> list[list[Answer]]:
    kept: list[list[Answer]] = []
    used = 0
    for answers in exchanges[:PROMPTS]:
        used += min(LONGEST, len(answers[0][2].prompt_text))
        used += sum(min(LONGEST, len(row.response)) + 300 for _, _, row in answers)  # 300: the markup around it
        if kept and used > CHARACTERS:
            break
        kept.append(answers)
    return kept


def _article(number: int, answers: Sequence[Answer]) -> Markup:
    prompt = answers[0][2].prompt_text
    start = next((row for _, looked, row in answers if looked == "neutral"), None)
    cards = [_card(name, looked, row, start) for name, looked, row in answers]
    return tag(
        "article",
        tag("h3", f"Prompt {number}"),
        tag("div", _cut(prompt.strip()), class_="prompt"),
        tag("div", *cards, class_="cards"),
        class_="exchange",
    )


def _card(name: str, looked: str, row: Response, start: Response | None) -> Markup:
    compared = start if looked != "neutral" else None
    numbers = [
        _fact("score", row.measured("score"), None if compared is None else compared.measured("score")),
        _fact("gold", row.measured("gold"), None if compared is None else compared.measured("gold")),
        _fact("tokens", row.length, None),
        _fact("KL", row.measured("kl"), None) if looked != "neutral" else None,
    ]
    text = _cut(row.response.strip()) if row.response.strip() else tag("em", "(empty)")
    return tag(
        "div",
        tag("h4", name),
        tag("div", text, class_="text"),
        tag("p", *numbers, class_="facts"),
        class_=f"card {looked}",
    )


def _fact(name: str, value: float | None, start: float | None) -> Markup | None:
    if value is None:
        return None
    change = None
    if start is not None:
        difference = float(f"{value - start:.3g}")
        change = f" ({'+' if difference >= 0 else ''}{shown(difference)})"
    return tag("span", tag("b", name), f" {shown(float(f'{value:.3g}'))}", change)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
