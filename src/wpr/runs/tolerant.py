"""What can be read of a run whose files may be missing, cut off or of another shape.

Reports show what is there. What is wrong with the files is noted as a problem, and stops nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wpr.runs.folder import FORMAT
from wpr.runs.responses import AFTER, BEFORE, OPTIONAL, Response
from wpr.runs.values import as_number, as_text, drawable, finite, mapping
from wpr.stage_names import is_stage

Row = dict[str, Any]
LONGEST_ERROR = 400


@dataclass(frozen=True)
class ReadProblem:
    """One fault. file: where. what: what is wrong there. remedy: what the reader can do about it."""

    file: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.remedy}"


@dataclass
class Problems:
    """The faults found so far, each once."""

    found: list[ReadProblem] = field(default_factory=list)

    def add(self, file: Path | str, what: str, remedy: str) -> None:
        """Note a fault."""
        problem = ReadProblem(str(file), what, remedy)
        if problem not in self.found:
            self.found.append(problem)

    def of(self, name: str) -> list[ReadProblem]:
        """Those of files of this name."""
        return [problem for problem in self.found if Path(problem.file).name == name]


@dataclass
class Policy:
    """One policy of one run.

    own_name: in its run. results: that the manifest recorded. lines: training logs in the order of their steps.
    responses: to held-out prompts. before: what the SFT model answered to the same prompts. tokens: of tokens.json,
    unchecked.
    name, colour, dash: how a page shows it, see `wpr.report.runs`.
    """

    own_name: str
    run: RunRecord
    results: Mapping[str, Any]
    lines: list[Row] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    before: list[Response] = field(default_factory=list)
    tokens: Row | None = None
    name: str = ""
    colour: int = 0
    dash: int = 0

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.run.path / "ppo" / self.own_name

    def series(self, metric: str) -> list[tuple[float, float]]:
        """``(step, value)`` of a metric over training, values that are not finite included."""
        found = ((float(line["step"]), as_number(line.get(metric))) for line in self.lines)
        return [(step, drawable(value)) for step, value in found if value is not None]


@dataclass
class RunRecord:
    """One run's folder. name: of the folder, or its path where two are called alike."""

    path: Path
    name: str
    manifest: Mapping[str, Any]
    recipe_text: str | None
    policies: list[Policy] = field(default_factory=list)

    @property
    def stages(self) -> Mapping[str, Any]:
        """The manifest's records, by stage; names that no stage has are left out, since they are folders' names too."""
        found = mapping(self.manifest.get("stages"))
        return {name: record for name, record in found.items() if is_stage(name)}

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The settings that the manifest recorded."""
        return mapping(self.manifest.get("recipe"))

    @property
    def monitors(self) -> list[str]:
        """Names of the scores that are watched beside gold."""
        return list(mapping(mapping(self.recipe.get("evaluation")).get("monitors")))


def read_run(path: Path, problems: Problems) -> RunRecord | None:
    """What the folder has; None where it is not a run folder."""
    if not path.is_dir():
        what = "is a file, not a run folder" if path.exists() else "does not exist"
        problems.add(path, what, "give the folder that `wpr run` wrote (its `output`)")
        return None
    manifest_path = path / "manifest.json"
    if not manifest_path.exists() and not (path / "ppo").is_dir():
        problems.add(path, "holds neither manifest.json nor ppo/", "give the folder that `wpr run` wrote")
        return None
    lost = "versions, durations and the recipe's name are not known; curves and responses are read from the files"
    manifest = read_object(manifest_path, problems, lost) or {}
    if manifest and manifest.get("format") != FORMAT:
        problems.add(
            manifest_path,
            f"has format {manifest.get('format')!r}, this release knows format {FORMAT}",
            "what is understood of it is shown; a newer release may show more",
        )
    if manifest and not isinstance(manifest.get("stages"), dict):
        problems.add(manifest_path, "has no stages", lost)
    run = RunRecord(path, path.resolve().name or str(path), manifest, None)
    for name in mapping(manifest.get("stages")).keys() - run.stages.keys():
        problems.add(manifest_path, f"names the stage {name!r}, which no run can have", "it is left out")
    run.recipe_text = read_text(path / "recipe.yaml", problems, "the recipe cannot be shown")
    for name in _policy_names(run):
        run.policies.append(_read_policy(run, name, problems))
    _note_stages(run, problems)
    _leave_out_mixed(run, problems)
    return run


def _policy_names(run: RunRecord) -> list[str]:
    """Policies of the manifest; of the folder, where the manifest tells of none."""
    names = [stage.removeprefix("ppo/") for stage in run.stages if stage.startswith("ppo/")]
    if not run.stages and (run.path / "ppo").is_dir():
        names = sorted(entry.name for entry in (run.path / "ppo").iterdir() if entry.is_dir())
    return names


def _read_policy(run: RunRecord, name: str, problems: Problems) -> Policy:
    record = mapping(run.stages.get(f"ppo/{name}"))
    policy = Policy(name, run, mapping(record.get("results")))
    # A stage that has not come so far has no such file yet: what is said of the stage says it all.
    quiet = problems if record.get("status") in ("done", "unknown", "", None) else Problems()
    lines = read_lines(policy.folder / "metrics.jsonl", quiet, _wrong_line, "its curves are left out")
    policy.lines = _training_lines(lines)
    policy.responses = _responses(policy.folder / AFTER, quiet, "its win rates and responses are left out")
    policy.before = _responses(policy.folder / BEFORE, quiet, "it is not compared with the SFT model")
    if (path := policy.folder / "tokens.json").exists():
        policy.tokens = read_object(path, problems, "its token view is left out")
    return policy


def _wrong_line(row: Row) -> str | None:
    return None if finite(row.get("step")) is not None else "no number called step"


def _wrong_response(row: Row) -> str | None:
    fits, _ = OPTIONAL["number"]
    if not fits(row.get("number")):
        return "no whole number called number"
    return None if isinstance(row.get("response"), str) else "no text called response"


def _training_lines(rows: list[Row]) -> list[Row]:
    """Logs of rollouts in the order of their steps; of a step that was taken twice, after an interruption, the last."""
    by_step = {as_number(row["step"]): row for row in rows if "loss" in row}
    return [by_step[step] for step in sorted(by_step, key=lambda step: step or 0.0)]


def _responses(path: Path, problems: Problems, remedy: str) -> list[Response]:
    """One per number, in their order. What is of the wrong kind counts as unknown."""
    found = {}
    for row in read_lines(path, problems, _wrong_response, remedy):
        known = {name: value for name, value in row.items() if name not in OPTIONAL or OPTIONAL[name][0](value)}
        named = {"prompt_id": as_text(row.get("prompt_id")), "prompt": row.get("prompt") or ""}
        found[row["number"]] = Response.from_values(known | named)
    return [found[number] for number in sorted(found)]


def _leave_out_mixed(run: RunRecord, problems: Problems) -> None:
    """Forget scores that policies of the run watched under one name and other settings: nothing compares them."""
    settings: dict[str, dict[str, list[str]]] = {}
    for policy in run.policies:
        for name, own in mapping(policy.results.get("watched")).items():
            settings.setdefault(name, {}).setdefault(json.dumps(own, sort_keys=True), []).append(policy.own_name)
    for name, users in settings.items():
        if len(users) < 2:
            continue
        told = "; ".join(f"{', '.join(policies)} by {own}" for own, policies in users.items())
        problems.add(
            run.path / "manifest.json",
            f"{name} is not the same score in all policies ({told}), so it is left out of tables and comparisons",
            f"train them with one evaluation.{'' if name == 'gold' else 'monitors.'}{name}, in a folder of their own",
        )
        names = {name, f"{name}_win_rate_before", f"{name}_win_rate_before_interval"}
        for policy in run.policies:
            policy.results = _without(policy.results, names) | {
                moment: _without(mapping(policy.results[moment]), names)
                for moment in ("before", "after")
                if moment in policy.results
            }
            policy.lines = [_without(line, names) for line in policy.lines]
            policy.responses, policy.before = (
                [replace(row, measures=_without(row.measures, names)) for row in rows]
                for rows in (policy.responses, policy.before)
            )


def _without(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _note_stages(run: RunRecord, problems: Problems) -> None:
    """Say which stages are not done, or were never begun."""
    manifest_path = run.path / "manifest.json"
    again = "run the same command again to go on from the last checkpoint"
    commands = run.manifest.get("commands")
    if isinstance(commands, list) and commands:
        command = as_text(mapping(commands[-1]).get("command"))
        again = f"`{command}` goes on from the last checkpoint" if command else again
    for name, record in run.stages.items():
        status = as_text(mapping(record).get("status")) or "unknown"
        if status == "done":
            continue
        error = as_text(mapping(record).get("error"))
        said = f" ({' '.join(error.split())[:LONGEST_ERROR]})" if error else ""
        what = {"running": "is not finished, or was killed", "failed": "failed", "interrupted": "was interrupted"}
        problems.add(manifest_path, f"stage {name} {what.get(status, f'has status {status!r}')}{said}", again)
    planned = run.recipe.get("train") or list(mapping(run.recipe.get("policies")))
    begun = {policy.own_name for policy in run.policies}
    named = [as_text(name) for name in planned] if isinstance(planned, list) else []
    missing = [name for name in named if name not in begun]
    if run.stages and missing:
        options = " ".join(f"--policy {name}" for name in missing)
        problems.add(manifest_path, f"no stage yet for {', '.join(missing)}", f"`wpr run RECIPE {options}` trains them")


def read_text(path: Path, problems: Problems, remedy: str) -> str | None:
    """A file's text without a byte order mark; bytes that are no UTF-8 show as a replacement sign."""
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        problems.add(path, "is missing", remedy)
    except OSError as error:
        problems.add(path, f"cannot be read ({error.strerror})", "check that it is a file that you may read")
    return None


def read_object(path: Path, problems: Problems, remedy: str) -> Row | None:
    """A file that holds one JSON object; ``remedy`` is said where that cannot be had."""
    text = read_text(path, problems, remedy)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.add(path, f"is not valid JSON ({_short(error)})", remedy)
        return None
    if not isinstance(found, dict):
        problems.add(path, f"holds a {type(found).__name__}, not an object", remedy)
        return None
    return found


def read_lines(path: Path, problems: Problems, check: Callable[[Row], str | None], remedy: str) -> list[Row]:
    """The lines of a JSONL file that are objects and pass ``check``, which says what is wrong with a line, or None."""
    text = read_text(path, problems, remedy)
    rows, bad, first = [], 0, ""
    lines = [(number, line) for number, line in enumerate((text or "").split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
            wrong = check(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
        except (ValueError, RecursionError) as error:
            wrong = f"not valid JSON ({_short(error)})"
        if wrong is None:
            rows.append(row)
        else:
            bad += 1
            first = first or f"line {number}: {wrong}"
    if bad:
        rest = "the other lines are shown" if rows else remedy
        problems.add(path, f"{bad} of {len(lines)} lines could not be used ({first})", rest)
    elif text is not None and not lines:
        problems.add(path, "is empty", remedy)
    return rows


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split("\n")[0][:120]
