"""The result in plain sentences, made from the numbers, and no more certain than they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wpr.report.comparisons import SFT, PolicyComparison, against_each_other, against_sft, mean
from wpr.report.markup import Content, Markup, join, percent, shown, tag
from wpr.report.section import ReportData
from wpr.report.word_lists import ForbiddenWords
from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy
from wpr.runs.values import mapping

NAMED = 6
"""Policies that are named one by one; of more, the best and the worst."""


def sentences(findings: ReportData) -> list[Markup]:
    """What came out, one paragraph per fact."""
    measure = "gold" if findings.gold else "score"
    against = against_sft(findings.policies, measure)
    worded = [sentence for words in findings.word_lists for sentence in _wording(words)]
    listed = [policy for words in findings.word_lists if words.meaning for policy in words.policies]
    if worded and len(listed) == len(findings.policies):
        # Who keeps more meaning says nothing by itself where rewards differ, as SFT's does from every policy's.
        return worded
    if not against:
        nothing = "No policy has held-out responses with scores, so nothing can be said about who is better."
        return [*worded, join(nothing)]
    gold = (
        "gold, how much of its source's meaning a response has, which"
        if _is_meaning(findings)
        else "the gold score, which"
    )
    judge = f"{gold} no policy saw in training" if measure == "gold" else f"the {findings.measures['score']}"
    ranked = sorted(against, key=lambda comparison: -comparison.result.rate)
    named = ranked if len(ranked) <= NAMED else [ranked[0], ranked[-1]]
    found = [join(f"Judged by {judge}: ", *_listed([_against_sft(comparison) for comparison in named]), ".")]
    if len(named) < len(ranked):
        found.append(join(f"The other {len(ranked) - 2} policies lie between these two."))
    if measure == "score":
        found.append(
            join(
                "That is the score which training pushes up, so a high rate shows that training worked, not that "
                "responses are better."
            )
        )
    if len(ranked) > 1:
        found.append(_best_two(findings, ranked[0], ranked[1], measure))
    return worded + found + _fooled(findings)


def _wording(words: ForbiddenWords) -> Iterator[Markup]:
    """Forbidden words and meaning before and after training."""
    policies = [policy for policy in words.policies if policy.responses]
    if not policies:
        return
    if not words.at_stake:
        yield join(
            "No forbidden word occurs in any held-out sentence, so policies cannot be compared by what they did."
        )
        return
    if len(policies) > NAMED:
        policies.sort(key=lambda policy: _per_text(words, policy.responses))
        yield join(f"Of {len(policies)} policies, those with the fewest and the most forbidden words are named.")
        policies = [policies[0], policies[-1]]
    start = [row for _, rows in words.starts for row in rows]
    models = [(join(SFT), start, " before training")] if start else []
    models += [(_name(policy), policy.responses, "") for policy in policies]
    counted = [join(name, f" {shown(_per_text(words, rows))}{when}") for name, rows, when in models]
    said: list[str] = [f"Forbidden words per {words.unit}: ", *_listed(counted), "."]
    if words.meaning is not None:
        kept = [join(name, f" {shown(mean(rows, words.meaning))}{when}") for name, rows, when in models]
        title = words.watched[words.meaning][1].replace("meaning", "Meaning kept", 1)
        said += [f" {title}: ", *_listed(kept), "."]
        if len(policies) > 1:
            where = tag("a", "Wording", href="#wording")
            said += [
                " Meaning can be compared only at the same reward; whether policies are is told under ",
                where,
                ".",
            ]
    yield join(*said)


def _per_text(words: ForbiddenWords, rows: Sequence[Response]) -> float:
    return words.per_text([row.response for row in rows]) or 0.0


def interval(comparison: PolicyComparison) -> str:
    """A win rate with its interval, to read."""
    result = comparison.result
    return f"{percent(result.rate)} (95% interval {100 * result.low:.1f} to {percent(result.high)})"


def _against_sft(comparison: PolicyComparison) -> Markup:
    sure = comparison.confirmed
    said = {
        1: "beats" if sure else "seems to beat",
        0: "cannot be told apart from",
        -1: "loses to" if sure else "seems to lose to",
    }[comparison.verdict]
    text = f" {said} the SFT model, winning {interval(comparison)} of {comparison.result.comparisons} comparisons"
    if comparison.verdict and not sure:
        text += f" (sign test: p = {shown(comparison.result.p_value)})"
    return join(_name(comparison.ours), text)


def _best_two(findings: ReportData, best: PolicyComparison, second: PolicyComparison, measure: str) -> Markup:
    """The two that do best against SFT, compared directly."""
    ours, theirs = _name(best.ours), _name(second.ours)
    overlap = "overlap" if best.result.low <= second.result.high else "do not overlap"
    start = join("The intervals of ", ours, " and ", theirs, f" {overlap}. ")
    direct = against_each_other([best.ours, second.ours], measure)
    if not direct:
        return join(start, "They did not answer the same prompts, so they are not compared directly.")
    comparison = direct[0]
    if comparison.verdict == 0:
        said = "that interval holds 50%, so these numbers do not say which of both is better."
    elif not comparison.confirmed:
        p_value = shown(comparison.result.p_value)
        said = f"that interval leaves out 50%, but the sign test does not confirm it (p = {p_value}): weak evidence."
    else:
        said = "that is better" if comparison.verdict > 0 else "that is worse, though it does better against SFT"
        said += ". (Intervals are over prompts; another seed of training may differ by more.)"
    text: list[Content] = ["Compared directly on the same prompts, ", ours, f" wins {interval(comparison)}: {said}"]
    distances = [findings.after[one.ours.name].get("kl") for one in (best, second)]
    if None not in distances:
        text += [f" Their KL from the SFT model, per token, is {shown(distances[0])} for ", ours]
        text += [f" and {shown(distances[1])} for ", theirs, "; judge penalties at equal divergence."]
    return join(start, *text)


def _fooled(findings: ReportData) -> list[Markup]:
    """Policies whose score rose while gold fell."""
    found = []
    for policy in findings.policies:
        before, after = findings.before[policy.name], findings.after[policy.name]
        if not {"score", "gold"} <= before.keys() & after.keys():
            continue
        if after["score"] > before["score"] and after["gold"] < before["gold"]:
            rose = f"its score rose from {shown(before['score'])} to {shown(after['score'])}"
            fell = f"gold fell from {shown(before['gold'])} to {shown(after['gold'])}"
            # A score that other words satisfy costs some meaning; that the reward is fooled does not follow.
            said = "paid with meaning" if _is_meaning(findings) else "is over-optimised"
            found.append(join(_name(policy), f" {said}: {rose} while {fell}."))
    return found[:NAMED]


def _is_meaning(findings: ReportData) -> bool:
    """Whether gold is the similarity of responses and their sources, in all runs."""
    given = [mapping(mapping(run.recipe.get("evaluation")).get("gold")) for run in findings.runs]
    return all(gold.get("kind") == "meaning" for gold in given)


def _listed(parts: Sequence[Markup]) -> list[str]:
    """Parts with semicolons between them."""
    return [piece for part in parts for piece in ("; ", part)][1:]


def _name(policy: Policy) -> Markup:
    return tag("b", policy.name)
