"""Questions, responses and files of responses for the tests of judges."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.evaluation.judging.misbehaving import Behaviour, ChatServer, Request, reply
from wpr.evaluation.judging.asking import JudgeResults, ask_all
from wpr.evaluation.judging.questions import Question, RequestLimits, UnreadableError
from wpr.evaluation.judging.server import ServerJudge
from wpr.evaluation.judging.verdicts import LETTER, read_letter

KEY = "sk-test-4f9c1b7e0d2a8c3f/5+6=7"
"""A key with characters that JSON and URLs write differently,"""

AWKWARD = 'sk?>4f~"9c\\1b7e/0d+2a=8c3f??>>'
"""and one that the two alphabets of base64 write differently, too, and JSON even more."""

QUICK = RequestLimits(first_wait=0.01, timeout=10)
"""Everything as by default, but for shorter waits."""


def questions(count: int, text: str = "question") -> list[Question]:
    """Questions that are answered with a letter."""
    return [
        Question(f"q{i}", ({"role": "user", "content": f"{text} {i}"},), {"number": i}, read_letter, LETTER)
        for i in range(count)
    ]


def response_files(folder: Path, count: int, better: float = 0.7, seed: int = 0) -> tuple[Path, Path]:
    """Two files that answer the same prompts, each response with a quality that a test's judge can see; the first has
    the higher one at a share of ``better``.
    """
    generator = random.Random(seed)
    lines: tuple[list[str], list[str]] = ([], [])
    for i in range(count):
        high, low = f"answer {i} quality 9", f"answer {i} quality 1"
        pair = (high, low) if generator.random() < better else (low, high)
        for side, response in zip(lines, pair, strict=True):
            side.append(json.dumps({"prompt_id": f"p{i:04}", "prompt": f"prompt {i}?", "response": response}))
    paths = folder / "ours-t0.5.jsonl", folder / "theirs-t0.5.jsonl"
    for path, side in zip(paths, lines, strict=True):
        path.write_text("\n".join(side) + "\n")
    return paths


def better_response(request: Request) -> Behaviour:
    """A good judge, for either rubric: the higher quality wins."""
    return reply(written(choice_by_quality(request.body["messages"][0]["content"]), request))


def choice_by_quality(text: str) -> str:
    first, second = (int(part.split()[0]) for part in text.split("quality ")[1:3])
    return "A" if first > second else "B" if second > first else "E"


def written(choice: str, request: Request) -> str:
    """The choice in the form that the rubric asks for."""
    if "JSON" not in request.body["messages"][0]["content"]:
        return choice
    return json.dumps({"comparison": "One is better.", "choice": choice})


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(read: Callable[[str], Any], text: str) -> Any:
    """What is read, or why it is not."""
    try:
        return read(text)
    except UnreadableError as error:
        return str(error)


def ask(server: ChatServer, count: int, cache: Path, limits: RequestLimits = QUICK) -> JudgeResults:
    """So many questions, answered by the server."""
    return ask_all(ServerJudge("test", server.address), questions(count), cache, limits)
