"""Responses that `wpr generate` drew from a run's models at one temperature, as tokens.

Their files are checked against what is asked: the temperature that they were drawn at, and the weights that drew them.
Files from elsewhere, which tell neither, are taken at their name's word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wpr.analysis.answers import Answer
from wpr.data import DataError
from wpr.evaluation.fingerprints import weights_fingerprint
from wpr.evaluation.response_file import PARTIAL, ResponseFile, read_responses
from wpr.pipeline.errors import RunFolderError
from wpr.pipeline.finished_run import REFERENCE, FinishedRun


class DrawnResponses:
    """The files ``generations/MODEL-tT.jsonl`` of a run, each read once."""

    def __init__(self, run: FinishedRun, temperature: float) -> None:
        self.run = run
        self.temperature = temperature
        self._files: dict[str, ResponseFile] = {}
        self._numbers: dict[str, int] = {}

    def answers(self, name: str) -> list[Answer]:
        """What a model, `REFERENCE` or a policy, answered. Answers of several models to one prompt have the same
        number: the prompt's place in the reference's file, where there is one.
        """
        known = [REFERENCE] if self._path(REFERENCE).is_file() else []
        for model in [*known, name]:
            for row in self._file(model).rows:
                self._numbers.setdefault(row.prompt_id, len(self._numbers))
        return [self.run.answer_of(row, self._numbers[row.prompt_id]) for row in self._file(name).rows]

    def sampling(self) -> dict[str, Any]:
        """How the files that were read say that they were drawn, by model; None where one does not say."""
        return {name: file.header.get("sampling") for name, file in self._files.items()}

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
        sampling, prints = (file.header.get(key) for key in ("sampling", "fingerprint"))
        said = sampling.get("temperature") if isinstance(sampling, dict) else file.rows[0].temperature
        anew = f"draw anew with {self._remedy()} -p {name} --restart`"
        if said is not None and said != self.temperature:
            raise RunFolderError(f"{file.path} was drawn at temperature {said}, not {self.temperature}; {anew}")
        weights, model = prints.get("weights") if isinstance(prints, dict) else None, self.run.model(name)
        if weights is not None and weights != weights_fingerprint(model):
            raise RunFolderError(f"{file.path} was drawn from other weights than are in {model} now; {anew}")

    def _others(self, name: str) -> str:
        stem = f"{name}-t"
        found = [path.name.removesuffix(".jsonl") for path in self._path(name).parent.glob("*.jsonl")]
        return ", ".join(sorted(one.removeprefix(stem) for one in found if one.startswith(stem))) or "none"

    def _remedy(self) -> str:
        return f"`wpr generate {self.run.path} -t {self.temperature:g}"
