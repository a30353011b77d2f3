"""The run's folder: a manifest that is whole or as it was, and one writer at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from wpr.atomic_io import write_atomically
from wpr.errors import RunFolderError
from wpr.runs.folder import FORMAT, RunFolder, StageRecord


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    for text in ("one", "zwölf ✓"):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(path.parent) == ["file.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "after \ud800")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_replacement_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):  # noqa: PT011 - which one is the system's choice
        write_atomically(tmp_path / "folder", "text")
    assert os.listdir(tmp_path) == ["folder"]


def test_records_survive(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.record("sft") is None
    record = StageRecord({"lr": 1e-5, "none": None}, "done", "then", "now", 2.5, 0.3, {"loss": 1.0, "name": "é"})
    folder.write("sft", record, seed=3)
    again = RunFolder(tmp_path / "run")
    assert again.record("sft") == record
    assert (again.manifest["seed"], again.manifest["format"]) == (3, FORMAT)
    assert again.record("reward") is None


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", writes=False)
    folder.write("sft", StageRecord({}), seed=1)
    assert folder.record("sft") == StageRecord({})
    assert folder.set_aside("sft") is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ('{"format": 1', "is damaged"),
        ("[]", "is damaged"),
        ('{"stages": {}}', "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "stages": {"sft": {"status": "done"}}}', "is damaged"),
        ('{"format": 1, "stages": {"sft": {"inputs": {}, "colour": 1}}}', "is damaged"),
        ('{"format": 1, "stages": {"sft": null}}', "is damaged"),
        ('{"format": 1, "stages": []}', "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"format": 1, "stages": {"ppo/../../escaped/x": {"inputs": {}}}}', "names the stage 'ppo/../../escaped/x'"),
        ('{"format": 1, "stages": {"ppo/..": {"inputs": {}}}}', "names the stage 'ppo/..'"),
        ('{"format": 1, "stages": {"ppo/": {"inputs": {}}}}', "names the stage 'ppo/'"),
        ('{"format": 1, "stages": {"/etc": {"inputs": {}}}}', "names the stage '/etc'"),
        ('{"format": 2, "stages": {}}', "has format 2, this release writes format 1; use another folder"),
    ],
)
def test_a_damaged_manifest(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunFolderError, match=message) as caught:
        RunFolder(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_a_manifest_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As some editors save it; the report reads it too."""
    (tmp_path / "manifest.json").write_text('{"format": 1, "stages": {}}', encoding="utf-8-sig")
    assert RunFolder(tmp_path).manifest == {"format": FORMAT, "stages": {}}


@pytest.mark.parametrize(
    "name", ["prepare", "sft", "reward", "ppo/rkl", "ppo/semantic+beta=0.1+lam=1e-05", "ppo/größe"]
)
def test_names_that_runs_give_their_stages(name: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).write(name, StageRecord({}))
    assert RunFolder(tmp_path).record(name) == StageRecord({})


def test_folders_that_are_no_run_s(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(
        RunFolderError, match=r"holds files but no manifest\.json: it is not a run folder; choose another"
    ):
        RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match=r"thesis\.tex is a file; choose another folder with output="):
        RunFolder(tmp_path / "thesis.tex")


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).manifest == {"format": FORMAT, "stages": {}}
    (tmp_path / ".lock").touch()  # of a run that ended before it wrote anything
    assert RunFolder(tmp_path).manifest == {"format": FORMAT, "stages": {}}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """The lock is of the open file, so that two openings within one process exclude each other too."""
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.lock():
        with pytest.raises(RunFolderError, match="another process is writing to .*run; wait for it"), second.lock():
            pass
        first.write(seed=5)
    with second.lock():
        assert second.manifest["seed"] == 5  # what the other one wrote meanwhile


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), folder.lock():
        raise KeyboardInterrupt
    with folder.lock():
        pass


def test_stages_are_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("first", "second"):  # within one second: the names must differ
        write_atomically(folder.stage("ppo/rkl") / "model" / "weights", text)
        folder.write("ppo/rkl", StageRecord({}, "done"))
        moved = folder.set_aside("ppo/rkl")
        assert moved is not None
        assert (moved / "model" / "weights").read_text() == text
        assert not folder.stage("ppo/rkl").exists()
        assert RunFolder(tmp_path).record("ppo/rkl") is None
    assert len(list((tmp_path / "old").iterdir())) == 2


def test_a_stage_without_a_folder_is_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("sft", StageRecord({}))
    assert folder.set_aside("sft") is None
    assert folder.record("sft") is None
