"""Responses that `wpr generate` drew from a run's models at one temperature, as tokens.

Their files are checked against what is asked: the temperature that they were drawn at, the weights that drew them, and
that one ``prompt_id`` is one prompt. Files from elsewhere, which tell less, are taken at their name's word.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wpr.data import DataError
from wpr.errors import RunFolderError
from wpr.runs.fingerprints import weights_fingerprint
from wpr.runs.finished_run import REFERENCE, FinishedRun
from wpr.runs.jsonl_log import PARTIAL
from wpr.runs.responses import Response, ResponseFile, drawn_at, read_responses

NAMED = re.compile(r"(.+)-t(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def drawn_files(run: Path) -> dict[str, dict[float, Path]]:
    """The files ``generations/MODEL-tT.jsonl`` that are whole, by model and temperature."""
    found: dict[str, dict[float, Path]] = {}
    for path in sorted((run / "generations").glob("*.jsonl")):
        if named := NAMED.fullmatch(path.name.removesuffix(".jsonl")):
            found.setdefault(named[1], {})[float(named[2])] = path
    return {name: dict(sorted(files.items())) for name, files in found.items()}


class DrawnResponses:
    """The files ``generations/MODEL-tT.jsonl`` of a run, each read and checked once."""

    def __init__(self, run: FinishedRun, temperature: float) -> None:
        self.run = run
        self.temperature = temperature
        self._files: dict[str, ResponseFile] = {}
        self._prompts: dict[str, tuple[Response, Path]] = {}

    def responses(self, name: str) -> list[Response]:
        """What a model, `REFERENCE` or a policy, answered. Responses of several models to one prompt have the same
        number: the prompt's place in the reference's file, where there is one.
        """
        file = self._file(name)
        for row in file.rows:
            first, path = self._prompts.setdefault(row.prompt_id, (row, file.path))
            if first.prompt != row.prompt:
                raise RunFolderError(
                    f"prompt_id {row.prompt_id!r} is another prompt in {file.path} than in {path}; draw responses to "
                    f"the same prompts with {self._remedy()}`"
                )
            self._numbers.setdefault(row.prompt_id, len(self._numbers))
        rows = file.with_tokens(self.run.encoder)
        return [replace(row, number=self._numbers[row.prompt_id]) for row in rows]

    def sampling(self) -> dict[str, Any]:
        """How the responses that were asked for were drawn, by model; None where the file does not say."""
        return {name: file.header.get("sampling") for name, file in self._files.items()}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Numbers of the prompts in the reference's file, which need not be fit for anything else."""
        try:
            return {row.prompt_id: number for number, row in enumerate(read_responses(self._path(REFERENCE)).rows)}
        except DataError:
            return {}

    def _path(self, name: str) -> Path:
        return self.run.path / "generations" / f"{name}-t{self.temperature:g}.jsonl"

    def _file(self, name: str) -> ResponseFile:
        if name not in self._files:
            path = self._path(name)
            if not path.exists() and not path.with_name(path.name + PARTIAL).exists():
                raise RunFolderError(
                    f"{path} does not exist: of {name} there are responses at temperature {self._others(name)}; draw "
                    f"these with {self._remedy()}`"
                )
            try:
                file = read_responses(path)
            except DataError as error:
                raise RunFolderError(str(error)) from None
            self._check(file, name)
            self._files[name] = file
        return self._files[name]

    def _check(self, file: ResponseFile, name: str) -> None:
        again = f"draw again with {self._remedy()} -p {name} --restart`"
        said = drawn_at(file.header)
        for heat in [row.temperature for row in file.rows] if said is None else [said]:
            if heat is not None and heat != self.temperature:
                raise RunFolderError(f"{file.path} was drawn at temperature {heat}, not {self.temperature}; {again}")
        prints = file.header.get("fingerprint")
        weights, model = prints.get("weights") if isinstance(prints, dict) else None, self.run.model(name)
        if weights is not None and weights != weights_fingerprint(model):
            raise RunFolderError(f"{file.path} was drawn from other weights than are in {model} now; {again}")

    def _others(self, name: str) -> str:
        return ", ".join(f"{heat:g}" for heat in drawn_files(self.run.path).get(name, {})) or "none"

    def _remedy(self) -> str:
        return f"`wpr generate {self.run.path} -t {self.temperature:g}"
