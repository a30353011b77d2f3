"""The recipe's data section."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from wpr.data import DataError, DataSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "tlrd"}, "data.format is 'tlrd'; did you mean 'tldr'? known are tldr, hh, full-hh"),
        ({"format": None}, "data.format is None; known are"),
        ({"template": "chatml"}, "did you mean 'chat'"),
        ({"too_long": "cut"}, "known are drop, truncate"),
        ({"bad_rows": "ignore"}, "known are stop, skip"),
        ({"limit": 0}, "data.limit is 0; it must be a whole number of at least 1"),
        ({"max_prompt_tokens": 1.5}, "data.max_prompt_tokens is 1.5"),
        ({"max_completion_tokens": True}, "data.max_completion_tokens is True"),
        ({"columns": {"chosne": "good"}}, "data.columns has 'chosne'; did you mean 'chosen'?"),
        ({"columns": {"input_ids": "good"}}, "which PPO's rows need for themselves"),
        ({"columns": {"chosen": ""}}, "both must be names"),
        ({"validation": "a.jsonl", "validation_files": ["b"]}, "are both set"),
        ({"source": []}, "data.source is empty"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        DataSettings(**{"format": "hh", **settings})
    assert message in str(caught.value)


def test_import_is_light() -> None:
    heavy = ["transformers", "datasets", "pyarrow", "huggingface_hub", "trl", "pandas"]
    code = f"import sys, wpr.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
