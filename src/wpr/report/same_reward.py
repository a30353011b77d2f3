"""Whether policies are at the same reward, in words, and who keeps more meaning then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from wpr.report.comparisons import FEWEST, MeanDifference, mean, mean_difference, mean_gain, same_start
from wpr.report.markup import Markup, join, shown, tag
from wpr.runs.tolerant import Policy

PAIRS = 3
"""Pairs of policies whose rewards are compared; of more, the nearest."""

SAME = 0.15
"""Rewards are the same if they differ by less than this share of what training gained. A convention: meaning that is
lost in step with the reward gained can differ by about as large a share for that reason alone.
"""

SEEDS = "(Intervals are over sentences; another seed of training may differ by more.)"


def reward_comparisons(policies: Sequence[Policy], meaning: str | None) -> Iterator[Markup]:
    """Whether policies are at the same reward, so that their meaning can be compared, and what is found then.

    meaning: the name of its score.
    """
    known = ((policy, mean(policy.responses, "score")) for policy in policies)
    scores = {policy.name: score for policy, score in known if score is not None}
    ranked = sorted((one for one in policies if one.name in scores), key=lambda one: -scores[one.name])
    # Policies of another run, or of an SFT model that was trained again, did not gain from the same start.
    pairs = [
        (ours, theirs)
        for ours, theirs in itertools.combinations(ranked, 2)
        if ours.run is theirs.run and same_start(ours, theirs)
    ]
    if len(pairs) > PAIRS:
        pairs.sort(key=lambda pair: scores[pair[0].name] - scores[pair[1].name])
        nearest: dict[str, tuple[Policy, Policy]] = {}
        for pair in pairs:
            for one in pair:
                nearest.setdefault(one.name, pair)
        pairs = list({id(pair): pair for pair in nearest.values()}.values())[:PAIRS]
        yield join(f"Of {len(ranked)} policies, those nearest in score are compared.")
    for ours, theirs in pairs:
        yield join(*_compared(ours, theirs, meaning))


def _compared(ours: Policy, theirs: Policy, measure: str | None) -> Iterator[str]:
    names = join(tag("b", ours.name), " and ", tag("b", theirs.name))
    score = mean_difference(ours, theirs, "score")
    if score is None:
        yield from ("Whether ", names, " are at the same reward cannot be told: ")
        yield f"they share fewer than {FEWEST} prompts."
        return
    gain = mean_gain(ours, theirs, "score")
    meaning = mean_difference(ours, theirs, measure) if measure else None
    differ = f"their mean scores differ by {_interval(score)}"
    if score.same:
        yield from (names, " are at the same reward: their scores are the same.")
        yield from _at_same_reward(ours, theirs, meaning)
    elif gain is None or gain <= 0:
        yield from ("Whether ", names, f" are at the same reward cannot be told: {differ}, and ")
        yield "what training gained is not known." if gain is None else f"training gained nothing ({shown(gain)})."
        yield from _at_unknown_reward(ours, theirs, meaning)
    elif -SAME * gain <= score.low and score.high <= SAME * gain:
        yield from (names, f" are at the same reward: {differ}, which is within {SAME:.0%} of the {shown(gain)} that ")
        yield "training gained."
        yield from _at_same_reward(ours, theirs, meaning)
    elif score.verdict:
        yield from (names, f" are not at the same reward: {differ}, of a gain of {shown(gain)}.")
        higher, lower = (ours, theirs) if score.verdict > 0 else (theirs, ours)
        yield from _at_another_reward(higher, lower, meaning if score.verdict > 0 or meaning is None else -meaning)
    else:
        yield from ("Whether ", names, f" are at the same reward cannot be told from {score.prompts} prompts: ")
        yield f"{differ}, of a gain of {shown(gain)}."
        yield from _at_unknown_reward(ours, theirs, meaning)


def _at_same_reward(ours: Policy, theirs: Policy, meaning: MeanDifference | None) -> Iterator[str]:
    if meaning is not None and meaning.verdict:
        yield from (" Their meaning can be compared: ", *_keeps_more(ours, theirs, meaning), f". {SEEDS}")
    elif meaning is not None:
        yield f" Their meaning can be compared, and no difference is seen: {_interval(meaning)}."


def _at_another_reward(higher: Policy, lower: Policy, meaning: MeanDifference | None) -> Iterator[str]:
    if meaning is not None and meaning.verdict > 0:
        yield from (" ", tag("b", higher.name), " has both, more reward and more meaning: ")
        yield f"it keeps {_interval(meaning)} more. {SEEDS}"
    elif meaning is not None:
        yield from (" ", tag("b", lower.name), ", with the lower reward, may keep more meaning for that reason alone, ")
        yield "so these numbers do not say who keeps more at the same reward."


def _at_unknown_reward(ours: Policy, theirs: Policy, meaning: MeanDifference | None) -> Iterator[str]:
    if meaning is not None and meaning.verdict:
        yield from (" ", *_keeps_more(ours, theirs, meaning), "; a difference of reward may account for it.")
    elif meaning is not None:
        yield f" No difference of meaning is seen, {_interval(meaning)}; a difference of reward may hide one."


def _keeps_more(ours: Policy, theirs: Policy, meaning: MeanDifference) -> Iterator[str]:
    yield tag("b", ours.name if meaning.verdict > 0 else theirs.name)
    yield f" keeps {_interval(meaning if meaning.verdict > 0 else -meaning)} more meaning"


def _interval(difference: MeanDifference) -> str:
    if difference.low == difference.high:
        return f"{shown(difference.mean)} on every prompt"
    return f"{shown(difference.mean)} (95% interval {shown(difference.low)} to {shown(difference.high)})"
