"""Answers of a megabyte that slow expressions and parsers down, and how long a reader takes over one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIZE = 1_000_000
LIMIT = 0.3
"""Seconds of the processor for an answer. None takes 0.1 on two cores of a server; others may be slower, and what this
guards against takes many seconds.
"""


def repeated(text: str) -> str:
    return (text * (SIZE // len(text) + 1))[:SIZE]


def within(start: str, text: str, end: str) -> str:
    """A text over and over, with a comma between, from a start to an end."""
    return start + ",".join([text] * (SIZE // (len(text) + 1))) + end


ANSWERS: dict[str, str] = {
    "nothing but spaces": " " * SIZE,
    "nothing but line ends": "\n" * SIZE,
    "an open fence and line ends": "```json" + "\n" * SIZE,
    "an open fence and spaces": "```" + repeated(" \n"),
    "a fence around white space": "```json" + repeated(" \n\t") + "```",
    "a fence around spaces and a letter": "```\n" + repeated("x ") + "\n```",
    "fences": repeated("```"),
    "fences on lines": repeated("```json\n"),
    "a backtick": repeated("`"),
    "opening brackets": "[" * SIZE,
    "opening braces": "{" * SIZE,
    "nested lists": "[" * (SIZE // 2) + "]" * (SIZE // 2),
    "many lists": within("[", "[]", "]"),
    "many deep lists": within("[", "[" * 500 + "]" * 500, "]"),
    "many objects": within("[", '{"a":{}}', "]"),
    "nested objects": '{"a":' * (SIZE // 5),
    "many keys": "{" + ",".join(f'"{number}":1' for number in range(SIZE // 10)) + "}",
    "one key many times": within("{", '"a":1', "}"),
    "two keys many times": "{" + ",".join(f'"{number // 2}":1' for number in range(SIZE // 10)) + "}",
    "a long whole number": "9" * SIZE,
    "many long whole numbers": within("[", "9" * 4300, "]"),
    "a long fraction": "0." + "1" * SIZE,
    "a long exponent": "1e" + "9" * SIZE,
    "many numbers": within("[", "1.5e300", "]"),
    "escapes": '"' + repeated("\\u0041") + '"',
    "backslashes": '"' + "\\" * SIZE,
    "quotes": '"' * SIZE,
    "percent signs": "%" * SIZE,
    "percent escapes": repeated("%25"),
    "an escape in an escape": "%" + repeated("25") + "73",
    "thoughts that begin": repeated("<think>"),
    "thoughts that end": "<think>" + repeated("</think>"),
    "spaces before thoughts": " " * SIZE + "<think>",
    "halves of thoughts": repeated("<think></think"),
    "a long choice": json.dumps({"comparison": "x", "choice": "x" * SIZE}),
    "a choice of many numbers": within('{"comparison":"x","choice":[', "1.1", "]}"),
    "a nested choice": '{"comparison":"x","choice":' + "[" * 900 + "]" * 900 + "}",
    "empty ratings": repeated("[[]]"),
    "ratings": repeated("[[7]]"),
    "different ratings": "".join(f"[[{number}]]" for number in range(SIZE // 10)),
    "an open rating and spaces": "[[" + " " * SIZE,
    "a rating half closed": "[[" + " " * SIZE + "]",
    "open ratings and spaces": repeated("[[ "),
    "a rating of spaces and letters": "[[" + repeated(" a") + "]]",
    "a long rating": "[[7." + "0" * SIZE + "]]",
    "a long rating that is too high": "[[99." + "9" * SIZE + "]]",
    "letters on lines": repeated("a\n"),
    "accents": repeated("é%"),
}


def seconds(read: Callable[[str], Any], text: str, accepted: type[Exception] = ValueError) -> float:
    """Of the processor, the best of three: a busy machine does not count. Stopped after a while, so that a reader that
    hangs fails. accepted: what the reader may raise.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGPROF, stop)
    taken = []
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_PROF, 20 * LIMIT)
            start = time.process_time()
            try:
                read(text)
            except accepted:
                pass
            finally:
                taken.append(time.process_time() - start)
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)
    return min(taken)
