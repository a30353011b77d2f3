"""Answers on disk: whole after any interruption, never overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wpr.evaluation.judging.answer_cache import AnswerCache, key_of
from wpr.evaluation.judging.questions import Reply

REPLIES = {f"key{i}": Reply(f"text {i} ü \u2028 \n \x00", 10, i, "stop") for i in range(3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three answers."""
    found = tmp_path / "folder" / "answers.jsonl"
    with AnswerCache(found).writing() as cache:
        for key, reply in REPLIES.items():
            cache.put(key, reply)
    return found


def test_what_was_put_is_there_again(path: Path) -> None:
    cache = AnswerCache.look(path)
    assert {key: cache.get(key) for key in REPLIES} == REPLIES
    assert cache.get("other") is None
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_cut_off_at_any_place_is_removed_and_the_next_answer_follows_whole(path: Path, cut: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: -1 - cut])
    assert len(AnswerCache.look(path)) == 2
    cache = AnswerCache(path)
    with cache.writing():
        assert "ended in the middle of a line" in cache.notes[0]
        assert len(cache) == 2
        cache.put("key2", REPLIES["key2"])
    kept = AnswerCache.look(path)
    assert kept.notes == []
    assert {key: kept.get(key) for key in REPLIES} == REPLIES
    assert path.read_bytes().startswith(b"".join(content.splitlines(True)[:2]))


def test_a_last_line_that_lacks_its_end_only_is_kept(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    cache = AnswerCache(path)
    with cache.writing():
        cache.put("more", Reply("A"))
    assert cache.notes == []
    assert len(AnswerCache.look(path)) == 4


def test_a_damaged_line_is_told_and_costs_no_other(path: Path) -> None:
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(lines[0] + b"\x00\xff garbage\n" + lines[2] + b'{"key": 1, "text": null}\n')
    cache = AnswerCache.look(path)
    assert len(cache) == 2
    assert "line 2 and 1 more cannot be read" in cache.notes[0]


def test_looking_changes_nothing_and_needs_no_file(tmp_path: Path, path: Path) -> None:
    assert len(AnswerCache.look(tmp_path / "none.jsonl")) == 0
    assert not (tmp_path / "none.jsonl").exists()
    path.write_bytes(path.read_bytes()[:-9])
    before = path.read_bytes()
    AnswerCache.look(path)
    assert path.read_bytes() == before


def test_an_answer_is_on_disk_when_put_returns(tmp_path: Path) -> None:
    """A process that dies at once afterwards has kept it."""
    path = tmp_path / "answers.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from wpr.evaluation.judging.answer_cache import AnswerCache\n"
        "from wpr.evaluation.judging.questions import Reply\n"
        "with AnswerCache(Path(sys.argv[1])).writing() as cache:\n"
        "    cache.put('k', Reply('A')); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], env=dict(os.environ))
    assert ended.returncode == -9
    assert AnswerCache.look(path).get("k") == Reply("A")
    with AnswerCache(path).writing():  # and its lock has gone with it
        pass


def test_it_is_written_only_when_open(path: Path) -> None:
    with pytest.raises(RuntimeError, match="not open for writing"):
        AnswerCache(path).put("k", Reply("A"))


def test_keys_tell_apart_what_differs() -> None:
    asked = [{"role": "user", "content": "x"}]
    same = key_of({"model": "m", "server": "s"}, asked)
    assert same == key_of({"server": "s", "model": "m"}, asked)
    assert same == key_of(json.loads(json.dumps({"server": "s", "model": "m"})), [dict(one) for one in asked])
    others = [key_of({"model": "n", "server": "s"}, asked), key_of({"model": "m", "server": "s"}, [*asked, *asked])]
    assert len({same, *others}) == 3
