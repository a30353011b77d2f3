"""The summary: the result in words, a table of the policies, and what was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wpr.findings import Cell
from wpr.report.charts import policy_name, swatch
from wpr.report.comparisons import MEASURES, SCORES, against_sft
from wpr.report.markup import DASH, details, duration, join, paragraph, percent, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.report.verdict import sentences
from wpr.runs.tolerant import RunRecord
from wpr.runs.values import as_text, finite, mapping

COLUMNS = {
    "score": "score",
    "gold": "gold",
    "kl": "KL",
    "divergence_semantic": "semantic divergence",
    "entropy": "entropy",
    "response_length": "tokens",
    "distinct_2": "distinct-2",
    "self_bleu": "self-BLEU",
    "embedding_spread": "spread",
}
"""Means on held-out prompts that the headline table shows, as far as any policy has them."""

ROUNDING = 1e-6
PACKAGES = ("wpr", "python", "torch", "transformers", "trl")


def summary_section(findings: ReportData) -> Section:
    """What came out, and of what."""
    said = sentences(findings)
    table = headline(findings)
    marks = {policy.name: policy_name(policy) for policy in findings.policies}
    marks |= {name: swatch(name, "neutral") for name, _ in findings.starts()}
    runs = run_facts(findings)
    body = join(
        tag("div", *(paragraph(sentence) for sentence in said), class_="verdict"),
        table.as_html(marks),
        paragraph(
            f"Score is {_score(findings)}; gold, where there is one, the hidden scorer's; "
            "other scores that were watched stand beside it. "
            "KL, divergence and entropy are means per token. Three measures of diversity: distinct-2, different pairs "
            "of words over all; self-BLEU, how alike the responses are (lower is more diverse); spread, the mean "
            "distance between their embeddings.",
            class_="note",
        ),
        details("What was run", runs.as_html(class_="facts-table")),
    )
    lead = (
        "The result in words, then one row per policy on held-out prompts, beside the SFT model that all started from."
    )
    return Section("summary", "Summary", lead, body, [table, runs])


def headline(findings: ReportData) -> Table:
    """One row per policy, and one for the SFT model of each run."""
    wins = {
        (measure, comparison.ours.name): comparison.result
        for measure in ("gold", "score")
        for comparison in against_sft(findings.policies, measure)
    }
    rows: list[dict[str, Cell]] = []
    shown = {name: COLUMNS[name] for name in ("score", "gold")} | {name: name for name in findings.monitors} | COLUMNS
    for policy in findings.policies:
        row: dict[str, Cell] = {"policy": policy.name}
        for measure in ("gold", "score"):
            if (result := wins.get((measure, policy.name))) is not None:
                ends = f"{100 * result.low:.1f}{DASH}{100 * result.high:.1f}"
                row[f"{measure} win rate over SFT (95%)"] = f"{percent(result.rate)} ({ends})"
        rows.append(row | _chosen(findings.after[policy.name], shown))
    rows += [{"policy": name, **_chosen(before, shown)} for name, before in findings.starts()]
    wanted = ["policy", "gold win rate over SFT (95%)", "score win rate over SFT (95%)", *shown.values()]
    columns = [name for name in wanted if any(name in row for row in rows)] or ["policy"]
    return Table(
        "policies", "Policies on held-out prompts", columns, [[row.get(name) for name in columns] for row in rows]
    )


def run_facts(findings: ReportData) -> Table:
    """What was run: facts down, runs across."""
    runs = findings.runs
    entries = {id(one.run): len(words.table.entries) for words in findings.word_lists for one in words.policies}
    facts = [_facts(run, entries.get(id(run))) for run in runs]
    names = list(dict.fromkeys(name for found in facts for name in found))
    rows = [[name, *(found.get(name) for found in facts)] for name in names]
    return Table("runs", "What was run", ["run", *(run.name for run in runs)], rows)


def _chosen(measured: Mapping[str, float], shown: Mapping[str, str]) -> dict[str, Cell]:
    # The SFT model's divergence from itself is zero but for rounding, which would only puzzle.
    return {
        title: 0.0 if abs(measured[name]) < ROUNDING and name.startswith(("kl", "divergence")) else measured[name]
        for name, title in shown.items()
        if name in measured
    }


def _facts(run: RunRecord, entries: int | None) -> dict[str, Cell]:
    """entries: of its list of forbidden words, if that can be read."""
    recipe, stages = run.recipe, [mapping(record) for record in run.stages.values()]
    model, data = mapping(recipe.get("model")), mapping(recipe.get("data"))
    versions, split = mapping(run.manifest.get("versions")), mapping(mapping(run.manifest.get("data")).get("split"))
    started = [as_text(record.get("started")) for record in stages if record.get("started")]
    finished = [as_text(record.get("finished")) for record in stages if record.get("finished")]
    seconds = [value for record in stages if (value := finite(record.get("seconds"))) is not None]
    prepare = mapping(recipe.get("prepare")).get("function")
    statuses = {name: as_text(mapping(record).get("status")) or "unknown" for name, record in run.stages.items()}
    unfinished = [f"{name}: {status}" for name, status in statuses.items() if status != "done"]
    facts: dict[str, str | None] = {
        "recipe": as_text(recipe.get("name") or run.manifest.get("name")),
        "description": as_text(recipe.get("description")),
        "model": _made(as_text(model.get("name")), prepare),
        "data": _made(as_text(data.get("source")), prepare) + _rows(mapping(run.manifest.get("data"))),
        "prompts": ", ".join(f"{as_text(count)} {name}" for name, count in mapping(split.get("prompts")).items()),
        "scorer": _scorer(mapping(recipe.get("scorer")), entries),
        "seed": as_text(recipe.get("seed", run.manifest.get("seed"))),
        "versions": ", ".join(f"{name} {as_text(versions[name])}" for name in PACKAGES if name in versions),
        "hardware": _hardware(mapping(run.manifest.get("hardware"))),
        "begun": _moment(min(started)) if started else None,
        "ended": _moment(max(finished)) if finished else None,
        "time in stages": duration(sum(seconds)) if seconds else None,
        "stages": ("all done" if not unfinished else ", ".join(unfinished)) if statuses else "not known",
        "folder": str(run.path),
    }
    return {name: value for name, value in facts.items() if value}


def _made(name: str, prepare: object) -> str:
    """A model or data source; one that the run made itself, as it does where none is named, is shown as that."""
    return f"made by {as_text(prepare)}" if prepare and (not name or name.startswith("{prepare}")) else name


def _rows(data: Mapping[str, Any]) -> str:
    return f" ({as_text(data['rows'])} rows)" if finite(data.get("rows")) is not None else ""


def _score(findings: ReportData) -> str:
    """What the column of scores is."""
    title = findings.measures["score"]
    if title == MEASURES["score"]:
        return "the reward model's mean over held-out responses"
    rule = ", minus the weights of a response's forbidden words and plus those of preferred ones"
    return f"the {title}{rule if title == SCORES['words'] else ''}, as a mean over held-out responses"


def _scorer(scorer: Mapping[str, Any], entries: int | None) -> str:
    kind = as_text(scorer.get("kind"))
    settings = ("function", "name", "words", "preferred", "grade", "spelling")
    named = as_text(next((scorer[name] for name in settings if scorer.get(name) is not None), None))
    if kind == "words" and named.startswith("{prepare}"):
        named = "the recipe's own list" + (f" ({entries} entries)" if entries else "")
    return f"{kind}: {named}" if kind and named else {"model": "the run's reward model"}.get(kind, kind)


def _hardware(hardware: Mapping[str, Any]) -> str:
    gpus = hardware.get("gpus")
    names = [as_text(mapping(gpu).get("name")) for gpu in gpus] if isinstance(gpus, list) else []
    cores, memory = finite(hardware.get("cores")), finite(hardware.get("memory"))
    parts = [", ".join(names) or ("no GPU" if hardware else "")]
    parts += [f"{cores:.0f} CPU cores"] if cores is not None else []
    parts += [f"{memory / 1e9:.0f} GB memory"] if memory else []
    return "; ".join(part for part in [*parts, as_text(hardware.get("system"))] if part)


def _moment(text: str) -> str:
    """``2026-11-15T12:47:54+0000`` to read."""
    return text[:19].replace("T", " ") + (" UTC" if text.endswith("+0000") else f" {text[19:]}" if text[19:] else "")
