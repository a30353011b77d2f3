"""`wpr analyze geometry`: whether settings can see meaning on a model, with or without a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wpr.commands.analyses import Found, noted
from wpr.errors import OptionError
from wpr.model_geometry import RegularizerFactory, parse_option

TEXTS = (
    "The best way to learn a new language is",
    "Once upon a time, there was a little",
    "She opened the door of the old house and",
    "In the morning we went to the market to buy",
    "The main difference between cats and dogs is that",
    "My brother works as a teacher at a",
    "It was raining all day, so the children",
    "To make a good soup you need",
)
"""What a model continues where no texts are given: everyday English that any model has met."""


def look_at(
    model: Any,
    prompts: Sequence[Any],
    name: str,
    settings: Sequence[str],
    changes: Mapping[str, Any],
    told: Mapping[str, Any],
) -> Found:
    """The finding on a model's vocabulary.

    prompts: token ids of texts that it continues. settings: as `RegularizerSpec.parse` reads them, with
    ``changes`` made in each of them.
    """
    from wpr.analysis.geometry_diagnostics import diagnose, geometry_finding
    from wpr.analysis.semantic_contrast import continuations

    factory = RegularizerFactory(model)
    made = {}
    for text in settings:
        if not parse_option(text).is_wasserstein:
            raise OptionError(f"--setting {text} has no geometry; name Wasserstein settings, as paper or semantic")
        given = {key: value for key, value in changes.items() if value is not None}
        label = ":".join(filter(None, [text, ",".join(f"{key}={value}" for key, value in given.items())]))
        made[label] = factory.make(parse_option(text, **given), label)
    logs = continuations(model, prompts, 24)
    diagnosed = {label: (wasserstein, diagnose(wasserstein, logs)) for label, wasserstein in made.items()}
    finding = geometry_finding(diagnosed, name, {"prompts": len(prompts), "positions": len(logs), **told})
    return noted(finding, *factory.notes(made)), _data(diagnosed)


def prompts_of(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Token ids of texts, as a user's turn where the tokenizer has a chat template."""
    from wpr.analysis.semantic_contrast import chat_prompts, plain_prompts

    given = list(texts or TEXTS)
    if getattr(tokenizer, "chat_template", None):
        return chat_prompts(tokenizer, given)
    return [ids for ids in plain_prompts(tokenizer, given) if len(ids)]


def _data(diagnosed: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for name, (_, seen) in diagnosed.items():
        for kind in ("neighbours", "random", "moves"):
            yield {
                "setting": name,
                "pairs": kind,
                "lam * cost": [float(f"{value:.5g}") for value in getattr(seen, kind).tolist()],
            }
        yield {
            "setting": name,
            "pairs": "moves",
            "weights": [float(f"{w:.5g}") for w in seen.weights.tolist()],
        }
