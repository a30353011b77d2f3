"""Wording: the words that a reward forbids, what policies write instead, and how much of the meaning is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import partial

from wpr.findings import Cell
from wpr.report.charts import looks, policy_name, swatch
from wpr.report.comparisons import SFT, mean
from wpr.report.markup import Markup, join, paragraph, scrolling, shown, tag
from wpr.report.same_reward import reward_comparisons
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.report.token_view import TokenLinks
from wpr.report.word_lists import ForbiddenWords, has_word_list
from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy
from wpr.runs.values import as_text

CHIPS, WORDS, INSTEAD, EXAMPLES = 80, 12, 3, 10
"""Forbidden words that are listed; those whose replacements are, and replacements of each; sentences."""

OTHERWISE = ("rephrased", "left out", "kept")
"""What may become of a word that is not replaced."""

LONGEST, LONGEST_WORD = 600, 40
"""Characters of a sentence or response, and of an entry of the list; the rest is cut off."""

SENTENCES = "the sentences themselves"
FAIR = (
    "Compare meaning only at the same reward: a policy that leaves more forbidden words standing changes less, and "
    "keeps more meaning for that reason alone."
)
EXPLAINED = {
    "meaning": "Meaning is the cosine of an encoder's vectors of response and sentence, 1 for the same meaning.",
    "words-kept": "Words kept is the share of the sentence's words that are still there.",
    "copies": "Copies is the share of responses that are the sentence itself.",
}
UNSEEN = "No policy was trained on these."
NO_SOURCES = (
    "Responses have no sentence to be compared with, so what stands in a word's place is not known. Where they rewrite "
    "one, keep it with data.columns: {source: COLUMN}."
)


def wording_section(findings: ReportData) -> Section | None:
    """Of policies that were trained on a list of forbidden words; None where there are none."""
    if not any(has_word_list(policy) for policy in findings.policies):
        return None
    lists, parts, tables = findings.word_lists, [], []
    links = TokenLinks(findings.studies[0])
    for number, words in enumerate(lists, 1):
        several = len(lists) > 1
        heading = partial(tag, "h4" if several else "h3")
        if several:
            parts.append(tag("h3", f"The list of {', '.join(policy.name for policy in words.policies)}"))
        ending = f"-{number}" if several else ""
        table = numbers_table(words, findings, f"wording{ending}")
        parts += [_chips(words), *_meaning(words, table, heading)]
        parts += [*_instead(words, links, heading), *_examples(words, links, heading)]
        tables += [table, outcome_table(words, f"replaced_words{ending}")]
    left = "how much of the meaning is left" if any(words.meaning for words in lists) else "how many are left"
    lead = f"What the reward forbids, {left}, and what each policy writes in its place, on held-out prompts."
    body = join(*parts) if parts else paragraph("There is no list of forbidden words to read.", class_="empty")
    return Section("wording", "Wording", lead, body, [one for one in tables if one.rows])


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
    return Table(name, "Forbidden words and meaning" if words.meaning else "Forbidden words", columns, rows)


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
    chips = []
    for text, count in list(words.counts.items())[:CHIPS]:
        weight = f" (weight {shown(weights[text])})" if weights[text] != 1 else None
        chips.append(tag("li", _cut(text), weight, " ", tag("span", shown(count)), class_=None if count else "unused"))
    where = f"{len(words.sources)} sentences" if words.sources else "the SFT model's responses"
    inflected = any(entry.rule == "inflected" for entry in words.table.entries)
    forms = ", with its regular forms (-s, -ed, -ing)" if inflected else ""
    rest = f"; the {CHIPS} most frequent are shown" if len(words.counts) > CHIPS else ""
    number = f"{len(words.counts)} forbidden {'word' if len(words.counts) == 1 else 'words'};"
    said = paragraph(tag("b", number), f" after each, how often it occurs in {where}{forms}{rest}.")
    return join(said, tag("ul", *chips, class_="chips"))


def _cut(text: str) -> str:
    return f"{text[:LONGEST_WORD]}…" if len(text) > LONGEST_WORD else text


def _instead(words: ForbiddenWords, links: TokenLinks, heading: Callable[[str], Markup]) -> list[Markup]:
    """The most frequent words, and by policy what stands there now."""
    if not words.sources:
        return [paragraph(NO_SOURCES, class_="note")]
    entries = [text for text, count in words.counts.items() if count][:WORDS]
    if not entries:
        return []
    head = [tag("th", title, scope="col") for title in ("forbidden", "times")]
    head += [tag("th", policy_name(policy), scope="col") for policy in words.policies]
    rows = []
    for text in entries:
        cells = [_instead_cell(words, policy, text, links) for policy in words.policies]
        times = tag("td", shown(words.counts[text]), class_="n")
        rows.append(tag("tr", tag("th", tag("mark", _cut(text)), scope="row"), times, *cells))
    title = "What policies write instead"
    table = tag("table", tag("caption", title), tag("thead", tag("tr", *head)), tag("tbody", *rows))
    rule = (
        f"The most frequent forbidden words, up to {WORDS}, and the {INSTEAD} words that most often stand in the place "
        "of each. Sentence and response are aligned word by word; a word counts as rephrased where the passage around "
        "it became longer or shorter, so that which word stands for it is not known. Times is how often it occurs in "
        "the sentences, each counted once; percentages are of the times that a policy had it to rewrite."
    )
    note = paragraph(rule, " ", _legend(rows), class_="note")
    return [heading(title), scrolling(title, table, class_="instead"), note]


def _instead_cell(words: ForbiddenWords, policy: Policy, text: str, links: TokenLinks) -> Markup:
    own = [(row, outcome) for row, outcome in words.outcomes[policy.name] if outcome.entry.text == text]
    replaced = Counter(outcome.instead for _, outcome in own if outcome.what == "replaced")
    first = replaced.most_common(INSTEAD)
    named = []
    for instead, count in first:
        word = tag("mark" if words.table.find(instead) else "ins", instead)
        places = [(row, one.start) for row, one in own if one.what == "replaced" and one.instead == instead]
        linked = (links.link(policy, row, start, word) for row, start in places)
        named.append(tag("span", next((link for link in linked if link != word), word), f" {count / len(own):.0%}"))
    rest = Counter(outcome.what for _, outcome in own)
    rest["other words"] = replaced.total() - sum(count for _, count in first)
    others = ", ".join(f"{name} {rest[name] / len(own):.0%}" for name in ("other words", *OTHERWISE) if rest[name])
    rows = (
        tag("div", *named, class_="words") if named else None,
        tag("div", others, class_="rest") if others else None,
    )
    return tag("td", *rows)


def _meaning(words: ForbiddenWords, table: Table, heading: Callable[[str], Markup]) -> list[Markup]:
    marks = {policy.name: policy_name(policy) for policy in words.policies}
    marks |= {name: swatch(name, "neutral") for row in table.rows if (name := as_text(row[0])) not in marks}
    title = "How much of the meaning is left" if words.meaning else "How many forbidden words are left"
    shown_table = [heading(title), table.as_html(marks)]
    if not words.at_stake:
        none = "No forbidden word occurs in any of the held-out sentences, so there is nothing to compare policies by."
        return [*shown_table, paragraph(none, class_="empty")]
    compared = [
        paragraph(sentence, class_="compared") for sentence in reward_comparisons(words.policies, words.meaning)
    ]
    explained = [EXPLAINED[kind] for kind in dict.fromkeys(kind for kind, _ in words.watched.values())]
    explained += [UNSEEN] if explained else []
    explained += [FAIR] if words.meaning else []
    note = [paragraph(" ".join(explained), class_="note")] if explained else []
    return [*shown_table, *compared, *note]


def _examples(words: ForbiddenWords, links: TokenLinks, heading: Callable[[str], Markup]) -> list[Markup]:
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
    rule = f"By rule, not by choice: the first held-out sentences that have a forbidden word, up to {EXAMPLES}. "
    value = f" The number is {words.watched[words.meaning][1]}." if words.meaning else None
    return [heading("Sentence by sentence"), paragraph(rule, _legend(articles), value, class_="note"), *articles]


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
