"""What goes wrong for users, through the command: one paragraph each, an exit code, and nothing of theirs touched."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.pipeline.command import SMALL, Here, content, manifest, results, run, statuses
from tests.ppo import tiny
from wpr.atomic_io import write_atomically
from wpr.errors import COMMAND_EXTRAS, EXTRAS, explain

ROOT = Path(__file__).parent.parent


@pytest.fixture
def owned(whole_run: Path, tmp_path: Path) -> Path:
    """A user's finished run, ``runs/tiny`` in a folder of its own."""
    shutil.copytree(whole_run, tmp_path / "runs" / "tiny")
    return tmp_path


def pairs(count: int = 40) -> list[str]:
    rows = []
    for number in range(count):
        asked = f"\n\nHuman: Where is boat {number}?\n\nAssistant: "
        rows.append(json.dumps({"chosen": f"{asked}Here it is.", "rejected": f"{asked}No."}))
    return rows


# A recipe that cannot be read, and settings that make no sense. Through a process: one; the others within this one.


def test_broken_recipe(owned: Path) -> None:
    (owned / "mine.yaml").write_text("extends: tiny\nname: tiny\nppo: {beta: 0.1\nseed: 3\n")
    before = content(owned)
    finished = run("run", "mine.yaml", *SMALL, cwd=owned)
    assert finished.code == 2
    assert finished.stdout == ""
    assert finished.error.startswith("Error: mine.yaml, line 4, column 5 is not valid YAML")
    assert "fix the line" in finished.error
    assert content(owned) == before


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("ppo: {bta: 1}", "mine.yaml, line 3: unknown setting ppo.bta; did you mean ppo.beta?"),
        ("ppo: {beta: much}", "mine.yaml, line 3: ppo.beta='much' must be a number"),
        ("name: twice", "mine.yaml, line 3: name stands here for the second time (first in line 2)"),
        ("sft: {output_dir: x}", "the run folder holds it; set `output`"),
        ("ppo: {reward_weights: [1, 2]}", "ppo.reward_weights cannot be set: a recipe has one `scorer`"),
        ("reward: null", "there is no reward: train one"),
        ("policies: [a, b]", "mine.yaml, line 3: policies=['a', 'b'] must be settings"),
        ("seed: -1", "mine.yaml, line 3: seed=-1 is outside 0 to 4294967295"),
        ("regularizer: {name: chi-squared, lam: 3}", "lam=3.0 has no meaning for chi-squared; leave it out"),
    ],
)
def test_recipes_that_say_nonsense(here: Here, tmp_path: Path, written: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: tiny\nname: mine\n{written}\n")
    finished = here("run", str(path), f"output={tmp_path / 'run'}")
    assert finished.code == 2
    assert message in finished.error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tinny"], "unknown recipe tinny; did you mean tiny?"),
        (["run", "no/such.yaml"], "there is no recipe file no/such.yaml"),
        (["run", "tiny", "beta"], "'beta' is no setting; write key=value"),
        (["run", "tiny", "ppo.bet=1"], "command line (ppo.bet=1): unknown setting ppo.bet; did you mean ppo.beta?"),
        (["run", "tiny", "--policy", "rk"], "unknown policy rk; did you mean rkl?"),
        (["run", "tiny", "--on-change", "no"], "--on-change no must be refuse, restart or keep"),
        (["sweep", "tiny", "betas"], "unknown sweep betas; there are none"),
        (["sweep", "tiny", "--grid", "ppo.bet=1,2"], "the sweep's grid: unknown setting ppo.bet"),
        (
            ["sweep", "tiny", "--grid", "seed=1,2"],
            "the sweep's grid: a grid changes regularizer, trainer, ppo, grpo, rloo and their settings; seed",
        ),
        (["sft", "tiny", "sft=null"], "recipe tiny has no sft stage"),
    ],
)
def test_arguments_that_make_no_sense(here: Here, arguments: list[str], message: str) -> None:
    finished = here(*arguments)
    assert finished.code == 2
    assert message in finished.error


# Data. The user has a run of other data, which stays as it is.


def write_missing_column(path: Path) -> None:
    path.write_text("\n".join(json.dumps({"chosen": "a", "reject": "b"}) for _ in range(3)))


def write_truncated_gzip(path: Path) -> None:
    whole = gzip.compress("\n".join(pairs()).encode())
    path.write_bytes(whole[: len(whole) // 2])


def write_not_utf8(path: Path) -> None:
    rows = [row.encode() for row in pairs()]
    rows[6] = rows[6].replace(b"Here", b"H\xe9re")
    path.write_bytes(b"\n".join(rows))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        (
            "columns.jsonl",
            write_missing_column,
            ("columns.jsonl:1", "no column 'rejected' (there are 'chosen', 'reject')", "data.columns: {rejected:"),
        ),
        (
            "cut.jsonl.gz",
            write_truncated_gzip,
            ("cut.jsonl.gz is a truncated gzip file", "after line", "copy it again"),
        ),
        (
            "latin.jsonl",
            write_not_utf8,
            ("1 of 40 rows", "latin.jsonl:7: byte", "0xe9, is not UTF-8", "data.bad_rows: skip"),
        ),
    ],
)
def test_data_that_cannot_be_read(
    here: Here, owned: Path, name: str, write: Callable[[Path], None], message: tuple[str, ...]
) -> None:
    write(owned / name)
    before = content(owned)
    here.monkeypatch.chdir(owned)
    finished = here("run", "tiny", *SMALL, f"data.source={name}", "--on-change", "restart")
    assert finished.code == 2
    for part in message:
        assert part in finished.error
    assert content(owned) == before
    assert "Traceback" not in (owned / "runs" / "tiny" / "run.log").read_text()


def test_bad_rows_are_counted_when_they_are_skipped(here: Here, tmp_path: Path) -> None:
    write_not_utf8(tmp_path / "latin.jsonl")
    finished = here.succeeds(
        "sft", "tiny", *SMALL, f"output={tmp_path / 'run'}", f"data.source={tmp_path / 'latin.jsonl'}",
        "data.bad_rows=skip", "sft.max_steps=1",
    )  # fmt: skip
    assert "1 malformed rows were left out (data.bad_rows=skip)" in finished.stderr
    assert manifest(tmp_path / "run")["data"]["skipped"] == 1


def test_garbage_among_the_metrics_of_a_run_that_is_done(here: Here, owned: Path) -> None:
    """The curves are drawn from the other lines."""
    output = owned / "runs" / "tiny"
    path, curves = output / "ppo" / "rkl" / "metrics.jsonl", (output / "curves.svg").read_text()
    path.write_bytes(path.read_bytes() + b'garbage\n3\n\xff\n{"loss": 1, "score": null}\n')
    finished = here.succeeds("run", "tiny", *SMALL, f"output={output}")
    assert f"Note: {path}: 4 of " in finished.stdout
    assert (output / "curves.svg").read_text() == curves


# Folders and disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which a test may make as small as it likes."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    # Lazily: a trainer that broke off within this process may still hold a file of its own open.
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def resize(path: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)


def used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_full_disk(here: Here, whole_run: Path, small_disk: Path) -> None:
    """Full in SFT, then in PPO; each time the same command goes on when there is space, to the same results."""
    output = small_disk / "run"
    command = ("run", "tiny", *SMALL, f"output={output}")
    first = used_by(whole_run, "prepare") + used_by(whole_run, "sft") // 2
    for size, stage in ((first, "sft"), (used_by(whole_run, "") - used_by(whole_run, "ppo") // 2, "ppo/rkl")):
        resize(small_disk, size)
        finished = run(*command, cwd=small_disk) if stage == "sft" else here(*command)
        assert finished.code == 1
        assert f"The disk is full: nothing more could be written to {output}" in finished.error
        assert "MB left" in finished.error
        assert "Free some space, or lower save_total_limit" in finished.error
        assert statuses(output)[stage] in ("running", "failed")  # the latter if there was space left to write it
        assert all(status == "done" for name, status in statuses(output).items() if name != stage)
    resize(small_disk, 64 << 20)
    finished = here.succeeds(*command)
    assert "sft: done before" in finished.stderr
    assert results(output) == results(whole_run)
    for weights in whole_run.glob("**/model/model.safetensors"):
        assert (output / weights.relative_to(whole_run)).read_bytes() == weights.read_bytes()


@pytest.mark.parametrize("free", [0, 20 << 10, 196 << 10])
@pytest.mark.parametrize(
    "save",
    [
        lambda path: torch.save({"a": torch.zeros(50_000), "b": torch.zeros(9)}, path),
        lambda path: torch.save({f"{i}": torch.zeros(64) for i in range(500)}, path),
        lambda path: save_file({"a": torch.zeros(51_000)}, path),
        lambda path: write_atomically(path, bytes(201_000)),
    ],
    ids=["torch", "torch, many", "safetensors", "bytes"],
)
def test_every_writer_s_full_disk_is_known(small_disk: Path, save: Callable[[Path], None], free: int) -> None:
    """Each in its own words, which depend on where in the file the space ends."""
    (small_disk / "filler").write_bytes(bytes((256 << 10) - free))
    resize(small_disk, 256 << 10)
    with pytest.raises((OSError, RuntimeError, SafetensorError)) as caught:
        save(small_disk / "file")
    message = explain(caught.value, small_disk)
    assert message is not None
    assert message.startswith(f"The disk is full: nothing more could be written to {small_disk} (")


def used_by(folder: Path, stage: str) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in (folder / stage).rglob("*") if path.is_file())


def read_only(path: Path) -> tuple[str, ...]:
    """A wrapper under which ``path`` is on a read-only file system: root may write wherever permissions forbid it."""
    return ("bwrap", "--dev-bind", "/", "/", "--ro-bind", str(path), str(path), "--chdir", str(path))


@pytest.mark.needs("bubblewrap")
def test_unwritable_folder(owned: Path) -> None:
    before = content(owned)
    finished = run("run", "tiny", *SMALL, "output=runs/new", cwd=owned, before=read_only(owned))
    assert finished.code == 1
    assert "runs/new cannot be written or read (Read-only file system)" in finished.error
    assert "Choose another folder with output=..." in finished.error
    assert content(owned) == before


def test_folders_that_are_no_run_s(here: Here, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("text")
    for output, message in (
        ("file", "is a file; choose another folder"),
        ("file/run", "cannot be a folder or file (Not a directory). Choose another folder"),
        ("full", "holds files but no manifest.json"),
    ):
        finished = here("run", "tiny", f"output={tmp_path / output}")
        assert finished.code in (1, 2)
        assert message in finished.error
    assert (tmp_path / "full" / "thesis.tex").read_text() == "text"


# Found before anything starts, not when the stage's turn comes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["reward=null", "scorer.kind=function", "scorer.function=no_such:reward"], "No module named 'no_such'"),
        (["reward=null", "scorer.kind=function", "scorer.function=builtins:len"], "'len' has the parameters (obj, /)"),
        (["reward=null", "scorer.name=no/such-model"], "scorer.name: the model no/such-model is neither a folder"),
        (["critic=no/such-critic"], "critic: the model no/such-critic is neither a folder"),
        (["ppo.gamma=7"], "gamma"),
        (["reward.save_strategy=sometimes"], "sometimes"),
    ],
)
def test_faults_of_late_stages_are_found_first(here: Here, tmp_path: Path, changes: list[str], message: str) -> None:
    finished = here("run", "tiny", *SMALL, f"output={tmp_path / 'run'}", *changes)
    assert finished.code in (1, 2)
    assert message in finished.error
    assert "starting" not in finished.stderr
    # What is fixed can be run in the same folder.
    assert here("sft", "tiny", *SMALL, f"output={tmp_path / 'run'}", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("policy", "written", "message"),
    [
        ("semantic", "{k2: 4000}", "regularizer.k2=4000 exceeds the vocabulary ("),
        ("semantic", "{neighbours: 4000}", "regularizer.neighbours=4000 exceeds the other tokens of the vocabulary ("),
    ],
)
def test_a_vocabulary_that_is_too_small(here: Here, tmp_path: Path, policy: str, written: str, message: str) -> None:
    """Of a model that the prepare stage makes: the first that can be known is when it is made."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: tiny\nname: mine\npolicies:\n  {policy}:\n    regularizer: {written}\n")
    finished = here("run", str(path), *SMALL[:-1], f"train=[{policy}]", f"output={tmp_path / 'run'}")
    assert finished.code == 2
    assert f"{path}, line 5: policy {policy}: {message}" in finished.error
    assert " or less" in finished.error
    assert "sft: starting" not in finished.stderr


def test_a_vocabulary_that_is_too_small_for_a_model_that_is_here(here: Here, whole_run: Path, tmp_path: Path) -> None:
    """Nothing starts, and `wpr doctor` says the same; so it does of what policies are only measured by."""
    own = ("prepare=null", f"model.name={whole_run / 'sft' / 'model'}", f"data.source={tmp_path / 'pairs.jsonl'}")
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs()))
    changes = ("evaluation.eval_regularizers.s.preset=semantic", "evaluation.eval_regularizers.s.k2=999")
    message = "evaluation.eval_regularizers.s.k2=999 exceeds the vocabulary ("
    for command in (["run", "tiny", *SMALL[3:], f"output={tmp_path / 'run'}"], ["doctor", "tiny", *SMALL[3:]]):
        finished = here(*command, *own, *changes)
        assert finished.code == 2
        assert message in finished.error
        assert "starting" not in finished.stderr
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_embeddings_that_no_token_has_are_found_first(here: Here, tmp_path: Path) -> None:
    """Of a tokenizer that knows none of the policy's texts."""
    tiny.policy().save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    changes = ("train=[semantic]", f"policies.semantic.regularizer.embeddings={tmp_path / 'other'}")
    finished = here("run", "tiny", *SMALL[:-1], f"output={tmp_path / 'run'}", *changes)
    assert "has another tokenizer than" in finished.error
    assert "tokens can be mapped by their texts" in finished.error
    assert "sft: starting" not in finished.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    finished = run("run", "no/such.yaml", "--debug", cwd=tmp_path)
    assert finished.code == 1
    assert "Traceback" in finished.stderr
    assert "RecipeError: there is no recipe file no/such.yaml" in finished.stderr


# Packages that are not installed.

BARE = """
import contextlib, io, json, sys
for name in ("transformers", "tokenizers", "huggingface_hub", "accelerate", "trl", "datasets", "peft"):
    sys.modules[name] = None  # as if not installed
from wpr.cli import main
said = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["wpr", *command.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.modules["wpr.cli"].err.file = error = io.StringIO()
        try:
            main()
        except SystemExit as end:
            said[command] = [end.code, error.getvalue()]
import wpr
try:
    wpr.PPOTrainer
except ImportError as error:
    said["wpr.PPOTrainer"] = [0, str(error)]
print(json.dumps(said))
"""


def test_wpr_alone(tmp_path: Path) -> None:
    """`pip install wpr` and nothing else: what needs more says how to get it, and the rest works."""
    extras = {
        "run tiny": "train", "quickstart --quick": "quickstart", "doctor tiny": "train", "geometry show any": "models",
        "analyze geometry any": "models",
    }  # fmt: skip
    commands = [*extras, "run quikstart", "recipes", "doctor", "--version"]
    finished = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(commands)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout)
    for command, extra in extras.items():
        code, message = said[command]
        assert code == 1, command
        name = command.split()[0]
        assert message == (
            f"Error: `wpr {name}` needs transformers, which is not installed; install it with `pip install "
            f"'wpr[{extra}]'`\n"
        )
    assert "did you mean quickstart?" in said["run quikstart"][1]
    for command in ("recipes", "doctor", "--version"):
        assert said[command] == [0, ""]
    assert "`pip install 'wpr[ppo]'`" in said["wpr.PPOTrainer"][1]
    assert list(tmp_path.iterdir()) == []


def test_extras_bring_what_they_are_said_to() -> None:
    """By `pyproject.toml`, with the extras that an extra includes."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def brings(extra: str) -> str:
        included = [name for part in declared[extra] for name in re.findall(r"wpr\[(.*)\]", part)]
        parts = [brings(name) for names in included for name in names.split(",")]
        return " ".join([*declared[extra], *parts]).lower().replace("-", "_")

    for package, extra in EXTRAS.items():
        # transformers needs these two itself
        assert ("transformers" if package in ("tokenizers", "huggingface_hub") else package.lower()) in brings(extra)
    assert set(COMMAND_EXTRAS.values()) <= set(declared)
