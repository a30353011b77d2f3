"""What was wrong with a run's files: said on the page, never the end of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


class ReportError(ValueError):
    """Nothing could be shown, or the page could not be written; the message says why and what to do."""

    exit_code = 2


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
