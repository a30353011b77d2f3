"""Wording: the words that a reward forbids, what policies write instead, and how much of the meaning is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from wpr.findings import Cell
from wpr.report.charts import looks, policy_name, swatch
from wpr.report.comparisons import SFT, mean
from wpr.report.markup import Markup, join, paragraph, scrolling, shown, tag
from wpr.report.same_reward import reward_comparisons
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.report.token_view import studies_on_page
from wpr.report.word_lists import ForbiddenWords, has_word_list
from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy
from wpr.runs.values import as_text

CHIPS, WORDS, INSTEAD, EXAMPLES = 80, 12, 3, 10
"""Forbidden words that are listed; those whose replacements are, and replacements of each; sentences."""

OTHERWISE = ("rephrased", "left out", "kept")
"""What may become of a word that is not replaced."""

LONGEST = 600
"""Characters of a sentence or response; the rest is cut off."""

SENTENCES = "the sentences themselves"
FAIR = (
    "Compare meaning only at the same reward: a policy that leaves more forbidden words standing changes less, and "
    "keeps more meaning for that reason alone."
)
MEANING = (
    "Meaning is the cosine of an encoder's vectors of response and sentence, 1 for the same meaning; words kept is the "
    "share of the sentence's words that are still there, copies the share of responses that are the sentence itself. "
    "No policy was trained on them. "
)
NO_SOURCES = (
    "Responses have no sentence to be compared with, so what stands in a word's place is not known. Where they rewrite "
    "one, keep it with data.columns: {source: COLUMN}."
)


def wording_section(findings: ReportData) -> Section | None:
    """Of policies that were trained on a list of forbidden words; None where there are none."""
    if not any(has_word_list(policy) for policy in findings.policies):
        return None
    lists, parts, tables = findings.word_lists, [], []
    links = TokenLinks(studies_on_page(findings)[0])
    for number, words in enumerate(lists, 1):
        if len(lists) > 1:
            parts.append(tag("h3", f"The list of {', '.join(policy.name for policy in words.policies)}"))
        ending = f"-{number}" if len(lists) > 1 else ""
        table = numbers_table(words, findings, f"wording{ending}")
        parts += [_chips(words), *_instead(words, links), *_meaning(words, table), *_examples(words, links)]
        tables += [table, outcome_table(words, f"replaced_words{ending}")]
    lead = (
        "What the reward forbids, what each policy writes in its place, and how much of the meaning is left, on "
        "held-out prompts."
    )
    body = join(*parts) if parts else paragraph("There is no list of forbidden words to read.", class_="empty")
    return Section("wording", "Wording", lead, body, [one for one in tables if one.rows])


class TokenLinks:
    """Where words of responses stand in the token view, of responses that it has."""

    def __init__(self, studies: Sequence[Mapping[str, Any]]) -> None:
        self._studies: dict[tuple[str, float | None], tuple[int, Mapping[str, Any]]] = {}
        for index, study in enumerate(studies):
            self._studies.setdefault((study["policy"], study["number"]), (index, study))

    def link(self, policy: Policy, row: Response, start: int, word: Markup) -> Markup:
        """The word, as a link to the token view if that has the token at this place of the response."""
        index, study = self._studies.get((policy.name, row.number), (0, {"tokens": ()}))
        token = token_at([token["text"] for token in study["tokens"]], row.response.strip(), start)
        if token is None:
            return word
        return tag("a", word, href="#tokens", data_study=index, data_token=token, title="Open in the token view")


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


def numbers_table(words: ForbiddenWords, findings: ReportData, name: str) -> Table:
    """Forbidden words and meaning: of the sentences, of each run's SFT model, of each policy."""
    titles = [title for _, title in words.watched.values()]
    columns = ["model", f"forbidden words per {words.unit}", *titles, "KL per token"]
    rows: list[list[Cell]] = []
    if words.sources:
        rows.append([SENTENCES, words.per_text(words.sources), *(None for _ in titles), None])
    for run, before in words.starts:
        rows.append([SFT if len(findings.runs) == 1 else f"{run}: {SFT}", *_means(words, before), 0.0])
    for policy in words.policies:
        rows.append([policy.name, *_means(words, policy.responses), findings.after[policy.name].get("kl")])
    return Table(name, "Forbidden words and meaning", columns, rows)


def outcome_table(words: ForbiddenWords, name: str) -> Table:
    """What became of every forbidden word of the sentences, counted."""
    rows: list[list[Cell]] = []
    for policy, outcomes in words.outcomes.items():
        found = Counter((one.entry.text, one.what, one.instead) for _, one in outcomes)
        rows += [[policy, *what, count] for what, count in found.most_common()]
    return Table(name, "What became of forbidden words", ["policy", "forbidden", "outcome", "instead", "count"], rows)


def _means(words: ForbiddenWords, rows: Sequence[Response]) -> list[Cell]:
    return [words.per_text([row.response for row in rows]), *(mean(rows, name) for name in words.watched)]


def _chips(words: ForbiddenWords) -> Markup:
    weights = {entry.text: entry.weight for entry in words.table.entries}
    listed = list(words.counts.items())[:CHIPS]
    chips = []
    for text, count in listed:
        weight = f" (weight {shown(weights[text])})" if weights[text] != 1 else None
        chips.append(tag("li", text, weight, " ", tag("span", shown(count)), class_=None if count else "unused"))
    rest = f"; the {CHIPS} most frequent are shown" if len(words.counts) > CHIPS else ""
    where = f"{len(words.sources)} sentences" if words.sources else "the SFT model's responses"
    counted = f" behind each, how often it stands in {where}, with its regular forms (-s, -ed, -ing){rest}."
    number = f"{len(words.counts)} forbidden {'word' if len(words.counts) == 1 else 'words'};"
    return join(paragraph(tag("b", number), counted), tag("ul", *chips, class_="chips"))


def _instead(words: ForbiddenWords, links: TokenLinks) -> list[Markup]:
    """The most frequent words, and by policy what stands there now."""
    if not words.sources:
        return [paragraph(NO_SOURCES, class_="note")]
    entries = [text for text, count in words.counts.items() if count][:WORDS]
    if not entries:
        return [paragraph("None of the forbidden words stands in the held-out sentences.", class_="empty")]
    head = [tag("th", title, scope="col") for title in ("forbidden", "times")]
    head += [tag("th", policy_name(policy), scope="col") for policy in words.policies]
    rows = []
    for text in entries:
        cells = [_instead_cell(words, policy, text, links) for policy in words.policies]
        times = tag("td", shown(words.counts[text]), class_="n")
        rows.append(tag("tr", tag("th", tag("mark", text), scope="row"), times, *cells))
    title = "What policies write instead"
    table = tag("table", tag("caption", title), tag("thead", tag("tr", *head)), tag("tbody", *rows))
    rule = (
        f"The {len(entries)} most frequent forbidden words, and the {INSTEAD} words that most often stand in the place "
        "of each. Sentence and response are aligned word by word; a word counts as rephrased where the passage around "
        "it became longer or shorter, so that which word stands for it is not known."
    )
    note = paragraph(rule, " ", _legend(rows), class_="note")
    return [tag("h3", title), scrolling(title, table, class_="instead"), note]


def _instead_cell(words: ForbiddenWords, policy: Policy, text: str, links: TokenLinks) -> Markup:
    own = [(row, outcome) for row, outcome in words.outcomes[policy.name] if outcome.entry.text == text]
    replaced = Counter(outcome.instead for _, outcome in own if outcome.what == "replaced")
    first = replaced.most_common(INSTEAD)
    named = []
    for instead, count in first:
        word = tag("mark" if words.table.find(instead) else "ins", instead)
        places = [(row, one.start) for row, one in own if one.what == "replaced" and one.instead == instead]
        linked = (links.link(policy, row, start, word) for row, start in places)
        named.append(tag("span", next((link for link in linked if link != word), word), f" {count}"))
    rest = Counter(outcome.what for _, outcome in own)
    rest["other words"] = replaced.total() - sum(count for _, count in first)
    others = ", ".join(f"{name} {rest[name]}" for name in ("other words", *OTHERWISE) if rest[name])
    rows = (
        tag("div", *named, class_="words") if named else None,
        tag("div", others, class_="rest") if others else None,
    )
    return tag("td", *rows)


def _meaning(words: ForbiddenWords, table: Table) -> list[Markup]:
    marks = {policy.name: policy_name(policy) for policy in words.policies}
    marks |= {name: swatch(name, "neutral") for row in table.rows if (name := as_text(row[0])) not in marks}
    compared = [
        paragraph(sentence, class_="compared") for sentence in reward_comparisons(words.policies, words.meaning)
    ]
    explained = MEANING if words.meaning else ""
    title = "How much of the meaning is left" if words.meaning else "How many forbidden words are left"
    return [tag("h3", title), table.as_html(marks), *compared, paragraph(explained, FAIR, class_="note")]


def _examples(words: ForbiddenWords, links: TokenLinks) -> list[Markup]:
    """The first sentences that have a forbidden word, each with what policies made of it."""
    sources = [source for source in words.sources if words.table.find(source)][:EXAMPLES]
    made = {policy.name: {words.source(row): row for row in reversed(policy.responses)} for policy in words.policies}
    articles = []
    for source in sources:
        lines = [_line("sentence", "neutral", _marked(words, source))]
        for policy in words.policies:
            if (row := made[policy.name].get(source)) is not None:
                link = partial(links.link, policy, row)
                text = _marked(words, row.response.strip(), words.rewrite(row).new, link)
                meaning = row.measured(words.meaning) if words.meaning else None
                lines.append(_line(policy.name, looks(policy.colour, policy.dash), text, meaning))
        articles.append(tag("article", *lines, class_="rewrite"))
    if not articles:
        return []
    rule = f"By rule, not by choice: the first {len(articles)} held-out sentences that have a forbidden word. "
    value = f" The number is {words.watched[words.meaning][1]}." if words.meaning else None
    return [tag("h3", "Sentence by sentence"), paragraph(rule, _legend(articles), value, class_="note"), *articles]


def _line(name: str, looked: str, text: Markup, meaning: float | None = None) -> Markup:
    value = None if meaning is None else tag("span", f"{meaning:.2f}", class_="value")
    return tag("div", tag("span", name, class_="who"), tag("span", text, class_="text"), value, class_=f"said {looked}")


def _marked(
    words: ForbiddenWords, text: str, new: Set[int] = frozenset(), link: Callable[[int, Markup], Markup] | None = None
) -> Markup:
    """A text with its forbidden words and those at the places ``new`` marked. link: what makes a link of a new word."""
    from wpr.report.replaced_words import marked_words  # wpr.rewards needs torch; reading a run does not

    if not text:
        return tag("em", "(empty)")
    parts: list[str] = []
    at = 0
    for start, end, forbidden, is_new in marked_words(text, words.table, new):
        if end > LONGEST:
            break
        word = tag("mark" if forbidden else "ins", text[start:end])
        parts += [text[at:start], link(start, word) if link is not None and is_new else word]
        at = end
    return join(*parts, text[at:LONGEST], "…" if len(text) > LONGEST else None)


def _legend(parts: Sequence[Markup]) -> Markup:
    """What the marks in these parts mean."""
    linked = any("data-study" in part for part in parts)
    more = " A word that is a link opens the token view at its first token." if linked else None
    return join(tag("mark", "Framed"), " words are forbidden, ", tag("ins", "underlined"), " ones are new.", more)
