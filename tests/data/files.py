"""Small files of every kind that the data layer reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HH = {
    "chosen": "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: How are you?\n\nAssistant: Fine, thanks.",
    "rejected": "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: How are you?\n\nAssistant: No.",
}
FULL_HH = {
    "prompt": "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: How are you?\n\nAssistant:",
    "response": " Fine, thanks.",
    "chosen": " Fine, thanks.",
    "rejected": " No.",
}
TLDR = {
    "info": {"id": "t3_1", "post": "I went to the sea. ", "title": "The sea", "subreddit": "tifu", "article": None},
    "summaries": [
        {"text": " went to sea", "policy": "ref", "note": None},
        {"text": " cold sea", "policy": "sup1", "note": None},
    ],
    "choice": 1,
    "worker": "x",
    "batch": "batch3",
    "split": "train",
    "extra": {"confidence": None},
}
NEWS = {
    **TLDR,
    "info": {"id": "n1", "post": None, "title": "News", "subreddit": None, "article": "Much happened."},
}
APPS = {
    "problem_id": 7,
    "question": "Read a number and print it.",
    "solutions": json.dumps(["print(input())", "import sys"]),
    "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]}),
    "difficulty": "interview",
    "url": "",
    "starter_code": "",
}
QUESTION = {"role": "user", "content": "Hello"}
ULTRA = {
    "prompt": "Hello",
    "prompt_id": "1",
    "chosen": [QUESTION, {"role": "assistant", "content": "Hi!"}],
    "rejected": [QUESTION, {"role": "assistant", "content": "Go away."}],
    "score_chosen": 8.0,
}


def json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write JSON Lines, compressed if the name says so."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    from pyarrow import parquet as files

    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)
