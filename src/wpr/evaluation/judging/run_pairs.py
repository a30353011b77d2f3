"""The pairs of a whole run: each policy against each baseline, at every temperature that both answered at.

A baseline is a model of the run (``sft``, ``rkl``), or of another one (``runs/tldr-2b:rkl``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wpr.errors import OptionError, RunFolderError
from wpr.runs.drawn_responses import drawn_files
from wpr.runs.finished_run import REFERENCE
from wpr.runs.folder import RunFolder
from wpr.runs.jsonl_log import PARTIAL
from wpr.runs.responses import ResponseFile, drawn_at, read_responses


@dataclass(frozen=True)
class RunPair:
    """A policy and a baseline at one temperature. against: the baseline as it was named."""

    policy: str
    temperature: float
    against: str
    ours: ResponseFile
    theirs: ResponseFile

    @property
    def name(self) -> str:
        """For messages, and before the ids of its questions."""
        return f"{self.policy} against {self.against} at temperature {self.temperature:g}"


class _Run:
    """What is in a run's folder: names of its models, in the order of training, and files of their responses."""

    def __init__(self, path: Path) -> None:
        if not (path / "manifest.json").is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no manifest.json; name the folder that `wpr run` wrote, or two "
                "files of responses"
            )
        self.path = path
        stages = RunFolder(path, writes=False).manifest["stages"]
        self.finished = {
            name.removeprefix("ppo/"): record["status"] == "done"
            for name, record in stages.items()
            if name.startswith("ppo/")
        }
        self.files = drawn_files(path)
        self.models = list(dict.fromkeys([REFERENCE, *self.finished, *self.files]))

    def answered(self, name: str, option: str) -> dict[float, Path]:
        """A model's files by temperature. option: that named it, as ``--against rkl``."""
        if name not in self.models:
            close = difflib.get_close_matches(name, self.models, 1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(self.models)}"
            raise OptionError(f"{option}: {self.path} has no model {name}; {hint}")
        if name not in self.files:
            finish = "" if self.finished.get(name, True) else "finish it with `wpr run`, then "
            raise RunFolderError(
                f"{option}: {name} has no finished file of responses in {self.path / 'generations'}; {finish}draw them "
                f"with `{self.remedy(name, ())}`"
            )
        return self.files[name]

    def remedy(self, name: str | None, temperatures: Iterable[float]) -> str:
        """The command that draws what is missing."""
        options = "" if name in (None, REFERENCE) else f" -p {name}"
        return f"wpr generate {self.path}{options}" + "".join(f" -t {heat:g}" for heat in temperatures)


def pairs_of(
    run: Path, against: Sequence[str], policies: Sequence[str] = (), temperatures: Sequence[float] = ()
) -> tuple[list[RunPair], list[str]]:
    """The pairs to judge, and what is left out and why, in sentences.

    against: baselines. policies, temperatures: only these; all where none is named.
    """
    own = _Run(run)
    if not own.files:
        raise RunFolderError(
            f"{own.path / 'generations'} has no finished file of responses yet; draw them with "
            f"`{own.remedy(None, temperatures)}`"
        )
    if not against:
        raise OptionError(
            f"a whole run is judged against a model; name it with --against, as --against {REFERENCE} (it has "
            f"{', '.join(own.models)}), or name two files of responses"
        )
    baselines = {text: _baseline(own, text) for text in dict.fromkeys(against)}
    chosen = {name: own.answered(name, f"--policy {name}") for name in policies} or {
        name: own.files[name] for name in own.models if name in own.files and name != REFERENCE
    }
    heats = sorted(
        {heat for files in (*chosen.values(), *(found[2] for found in baselines.values())) for heat in files}
    )
    for heat in temperatures:
        if heat not in heats:
            drawn = ", ".join(f"{one:g}" for one in heats)
            raise OptionError(
                f"--temperature {heat:g}: no responses were drawn at it, only at {drawn}; draw them with "
                f"`{own.remedy(None, [heat])}`"
            )
    notes = [] if policies else _without_responses(own)
    reader = cache(_read)
    pairs = []
    for text, (other, name, theirs) in baselines.items():
        for policy, ours in chosen.items():
            if (other.path.resolve(), name) == (own.path.resolve(), policy):
                continue
            for heat in [one for one in heats if not temperatures or one in temperatures]:
                lacking = [
                    (model, folder.remedy(model, [heat]))
                    for model, folder, files in ((policy, own, ours), (name, other, theirs))
                    if heat not in files
                ]
                if not lacking:
                    pairs.append(RunPair(policy, heat, text, reader(ours[heat], heat), reader(theirs[heat], heat)))
                elif len(lacking) == 1:
                    model, remedy = lacking[0]
                    notes.append(
                        f"{policy} against {text} at temperature {heat:g} is skipped: {model} has no responses there "
                        f"(`{remedy}` draws them)"
                    )
    if not pairs:
        why = notes[-1] if notes else f"there is no policy beside {', '.join(baselines)}"
        raise RunFolderError(f"{run} has no two models to compare: {why}; nothing is judged")
    return pairs, notes


def _baseline(own: _Run, text: str) -> tuple[_Run, str, dict[float, Path]]:
    """The run that a baseline is of, its name there, and its files."""
    folder, colon, name = text.rpartition(":")
    found = _Run(Path(folder)) if colon else own
    return found, name, found.answered(name, f"--against {text}")


def _without_responses(run: _Run) -> list[str]:
    notes = []
    for name, done in run.finished.items():
        if name not in run.files:
            why = "has no finished file of responses" if done else "is not finished"
            remedy = f" (`{run.remedy(name, ())}` draws them)" if done else ""
            notes.append(f"policy {name} {why}, and is left out{remedy}")
    unfinished = sorted((run.path / "generations").glob(f"*.jsonl{PARTIAL}"))
    notes += [f"{path} is not finished, and left out; the same `wpr generate` goes on with it" for path in unfinished]
    return notes


def _read(path: Path, temperature: float) -> ResponseFile:
    file = read_responses(path)
    said = drawn_at(file.header)
    if said is not None and said != temperature:
        raise RunFolderError(
            f"{path} was drawn at temperature {said:g}, its name says {temperature:g}; rename it, or draw it again "
            "with `wpr generate --restart`"
        )
    return file
