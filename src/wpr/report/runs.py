"""A run's folder as the page needs it: stages, policies, their training logs and responses, whatever of it is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wpr.runs.read_problems import Problems
from wpr.runs.tolerant import LARGEST, Row, as_number, as_text, finite, mapping, read_lines, read_object, read_text
from wpr.stage_names import is_stage

FORMAT = 1
LONGEST_ERROR = 400


@dataclass
class Response:
    """One answer to a held-out prompt. gold: by the scorer that training never sees. sums: over its tokens."""

    number: int
    prompt: str
    text: str
    score: float | None
    gold: float | None
    length: float | None
    sums: dict[str, float]


@dataclass
class Policy:
    """One policy of one run.

    name: on the page; the run is put before it where names collide. own_name: in its run. colour: by own_name, so that
    the same policy of several runs has one colour; dash: by run. lines: training logs in the order of their steps.
    before: what the SFT model answered to the same prompts. studies: of tokens.json, unchecked.
    """

    own_name: str
    run: Run
    status: str
    results: Mapping[str, Any]
    seconds: float | None = None
    memory: float | None = None
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
class Run:
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


def drawable(value: float) -> float:
    """The value, but what is too large to be drawn on any axis as infinity, and what is next to nothing as zero."""
    if abs(value) > LARGEST:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < 1 / LARGEST else value


def read_runs(paths: Sequence[Path], problems: Problems) -> list[Run]:
    """Read every folder that is one, give runs and policies their names and colours."""
    runs = []
    seen = set()
    for path in paths:
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        run = _read_run(path, problems)
        if run is not None:
            runs.append(run)
    _name(runs)
    return runs


def prompt_text(prompt: object) -> str:
    """A prompt to read: text as it is, chat turns as ``role: content`` paragraphs."""
    if isinstance(prompt, list):
        turns = (mapping(turn) for turn in prompt)
        return "\n\n".join(f"{as_text(turn.get('role')) or 'turn'}: {as_text(turn.get('content'))}" for turn in turns)
    return as_text(prompt)


def _read_run(path: Path, problems: Problems) -> Run | None:
    if not path.is_dir():
        what = "is a file, not a run's folder" if path.exists() else "does not exist"
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
    run = Run(path, path.resolve().name or str(path), manifest, None)
    for name in mapping(manifest.get("stages")).keys() - run.stages.keys():
        problems.add(manifest_path, f"names the stage {name!r}, which no run can have", "it is left out")
    run.recipe_text = read_text(path / "recipe.yaml", problems, "the recipe cannot be shown")
    for name in _policy_names(run):
        run.policies.append(_read_policy(run, name, problems))
    _note_stages(run, problems)
    return run


def _policy_names(run: Run) -> list[str]:
    """Policies of the manifest; of the folder, where the manifest tells of none."""
    names = [stage.removeprefix("ppo/") for stage in run.stages if stage.startswith("ppo/")]
    if not run.stages and (run.path / "ppo").is_dir():
        names = sorted(entry.name for entry in (run.path / "ppo").iterdir() if entry.is_dir())
    return names


def _read_policy(run: Run, name: str, problems: Problems) -> Policy:
    record = mapping(run.stages.get(f"ppo/{name}"))
    policy = Policy(
        own_name=name,
        run=run,
        status=as_text(record.get("status")) or "unknown",
        results=mapping(record.get("results")),
        seconds=finite(record.get("seconds")),
        memory=finite(record.get("peak_memory_gb")),
    )
    finished = policy.status in ("done", "unknown")
    # A stage that has not come so far has no such file yet: what is said of the stage says it all.
    quiet = problems if finished else Problems()
    lines = read_lines(policy.folder / "metrics.jsonl", quiet, _wrong_line, "its curves are left out")
    policy.lines = _training_lines(lines)
    path = policy.folder / "responses.jsonl"
    policy.responses = _responses(read_lines(path, quiet, _wrong_response, "its win rates and responses are left out"))
    path = policy.folder / "responses-before.jsonl"
    policy.before = _responses(read_lines(path, quiet, _wrong_response, "it is not compared with the SFT model"))
    if (path := policy.folder / "tokens.json").exists():
        policy.tokens = read_object(path, problems, "its token view is left out")
    return policy


def _wrong_line(row: Row) -> str | None:
    return None if finite(row.get("step")) is not None else "no number called step"


def _wrong_response(row: Row) -> str | None:
    number = row.get("number")
    if isinstance(number, bool) or not isinstance(number, int):
        return "no whole number called number"
    return None if isinstance(row.get("response"), str) else "no text called response"


def _training_lines(rows: list[Row]) -> list[Row]:
    """Logs of rollouts in the order of their steps; of a step that was taken twice, after an interruption, the last."""
    by_step = {as_number(row["step"]): row for row in rows if "loss" in row}
    return [by_step[step] for step in sorted(by_step, key=lambda step: step or 0.0)]


def _responses(rows: list[Row]) -> list[Response]:
    """One a number, in their order."""
    found = {}
    for row in rows:
        measured = {"kl": row.get("kl"), "divergence": row.get("divergence"), "penalty": row.get("penalty")}
        measured |= {f"divergence_{name}": value for name, value in mapping(row.get("divergences")).items()}
        sums = {name: value for name, given in measured.items() if (value := finite(given)) is not None}
        found[row["number"]] = Response(
            number=row["number"],
            prompt=prompt_text(row.get("prompt")),
            text=row["response"],
            score=finite(row.get("score")),
            gold=finite(row.get("gold")),
            length=finite(row.get("length")),
            sums=sums,
        )
    return [found[number] for number in sorted(found)]


def _note_stages(run: Run, problems: Problems) -> None:
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


def _name(runs: list[Run]) -> None:
    """Names that tell runs and policies apart, colours by policy, dashes by run."""
    folders = [run.name for run in runs]
    for run in runs:
        if folders.count(run.name) > 1:
            run.name = str(run.path)
    policies = [policy for run in runs for policy in run.policies]
    own_names = [policy.own_name for policy in policies]
    colours = {name: index for index, name in enumerate(dict.fromkeys(own_names))}
    for policy in policies:
        collides = own_names.count(policy.own_name) > 1
        policy.name = f"{policy.run.name}: {policy.own_name}" if collides else policy.own_name
        policy.colour = colours[policy.own_name]
        policy.dash = runs.index(policy.run)


def same_prompts(ours: Sequence[Response], theirs: Sequence[Response]) -> list[tuple[Response, Response]]:
    """Responses to the same prompt, by number; a number that stands for another prompt elsewhere makes no pair."""
    others = {(row.number, row.prompt): row for row in theirs}
    return [(row, others[row.number, row.prompt]) for row in ours if (row.number, row.prompt) in others]
