"""Problems in HumanEval's format that were made for tests, with responses of every kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PROBLEMS: list[dict[str, Any]] = [
    {
        "task_id": "Made/0",
        "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum."""\n',
        "entry_point": "total",
        "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    },
    {
        "task_id": "Made/1",
        "prompt": 'def double(x):\n    return 2 * x\n\n\ndef quadruple(x):\n    """Four times x, by double."""\n',
        "entry_point": "quadruple",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(3) == 12\n",
    },
]


def write(folder: Path) -> Path:
    path = folder / "problems.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in PROBLEMS)
    return path
