"""Every command that the pages show is one: the real command line parses it, recipes and settings resolve, and what is
cheap runs.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.docs.pages import PAGES, ROOT, Block, all_blocks, name_of, prose
from tests.pipeline.command import Here
from wpr.cli import app
from wpr.regularizers.spec import RegularizerSpec

NOT_RUN = {
    "accelerate launch --config_file configs/accelerate/fsdp2.yaml --num_processes 8 train.py": "the reader's script",
    "export OPENAI_API_KEY=...": "a secret of the reader's",
    "export WANDB_MODE=offline": "for a tracker that is not installed here",
    "trackio show --project huggingface": "a server of a package that is not installed here",
    "transformers serve": "a server that does not end",
    "vllm serve path/to/sft --generation-config vllm --dtype bfloat16": "a server, and a package of its own",
    "hf download openai/summarize_from_feedback --repo-type dataset --revision refs/convert/parquet "
    "--include 'comparisons/train/*.parquet' --include 'comparisons/validation/*.parquet'": "needs the hub",
    "export VERL_USE_EXTERNAL_MODULES=wpr.verl": "part of the next",
    "python -m verl.trainer.main_ppo": "tests/test_verl.py holds its settings against verl's",
}
"""Commands that are neither run nor parsed, by how they begin, and why."""

PLACEHOLDERS = {"RECIPE": "tiny"}
RUNNABLE = ("wpr recipes", "wpr doctor", "wpr report", "wpr analyze costs")
"""Commands that are cheap enough to run as they are; those with --dry-run are run with it."""


def commands_of(code: str) -> list[list[str]]:
    """The simple commands of a block, as words: without comments, redirections and variables."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
        lexer.whitespace_split = True
        words: list[str] = []
        tokens = list(lexer)
        for word in [*tokens, ";"]:
            if set(word) <= set("&|;"):
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
    return [_plain(words) for words in found]


def _plain(words: list[str]) -> list[str]:
    if ">" in words:
        words = words[: words.index(">")]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return [part for word in words for part in _expanded(word)]


def _expanded(word: str) -> list[str]:
    """As a shell does {a,b}."""
    braces = re.fullmatch(r"(.*)\{([\w,-]+)\}(.*)", word)
    return [f"{braces[1]}{one}{braces[3]}" for one in braces[2].split(",")] if braces and "," in braces[2] else [word]


SHOWN = [(block, words) for block in all_blocks("bash") for words in commands_of(block.code)]


def is_not_run(words: list[str]) -> str | None:
    return next((start for start in NOT_RUN if words[: len(shlex.split(start))] == shlex.split(start)), None)


def find_command(words: list[str]) -> tuple[Any, list[str], str]:
    """The command that words of the command line lead to, what is left of them, and its name."""
    command: Any = typer.main.get_command(app)
    name = "wpr"
    while hasattr(command, "commands"):
        assert words, f"{name} needs a command"
        assert words[0] in command.commands, f"{name} has no command {words[0]}"
        command, name, words = command.commands[words[0]], f"{name} {words[0]}", words[1:]
    return command, words, name


@pytest.fixture
def folder(tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader may be: with data of their own, and a finished run."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Question {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(8)]
    for name in ("pairs.jsonl", "my-pairs.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("my.txt", "my-words.txt", "avoid.txt"):
        (tmp_path / name).write_text("thing\n")
    shutil.copytree(whole_run, tmp_path / "runs" / "tiny")
    shutil.copytree(whole_run, tmp_path / "RUN")
    return tmp_path


def check_wpr(words: list[str], here: Here | None) -> None:
    """Parse one, and run it if that is cheap and there is a way to."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    command, rest, name = find_command(words)
    given = command.make_context(name, list(rest)).params
    for option in ("regularizer", "regularizers", "setting", "settings", "first", "second"):
        value = given.get(option)
        for text in [value] if isinstance(value, str) else value or []:
            RegularizerSpec.parse(text)
    if here is None:
        return
    if "dry_run" in given and name.split()[1] in ("run", "quickstart", "sft", "reward", "ppo", "sweep"):
        here.succeeds(*words, "--dry-run")
    elif name in RUNNABLE and not any(word.startswith("runs/") and not Path(word).exists() for word in rest):
        here.succeeds(*words)


def check_other(words: list[str]) -> None:
    """Commands of others, as far as they name something of ours."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words[1]
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file(), words[1]
    elif words[:2] == ["pip", "install"]:
        project = (ROOT / "pyproject.toml").read_text()
        extras = tomllib.loads(project)["project"]["optional-dependencies"]
        for word in (word for word in words[2:] if word != "--no-deps"):
            name, *own = re.findall(r"[\w-]+", word)
            assert set(own) <= extras.keys() if name == "wpr" else name in project + (ROOT / "Makefile").read_text(), (
                word
            )
    elif words[:2] == ["accelerate", "launch"]:
        before, after = words[: words.index("-m")], words[words.index("-m") + 1 :]
        if "--config_file" in before:
            assert (ROOT / before[before.index("--config_file") + 1]).is_file()
        assert after[0] == "wpr"
        check_wpr(after[1:], None)
    elif words[:2] == ["python", "-m"] and words[2] == "pytest":
        assert all((ROOT / path).exists() for path in words[3:] if not path.startswith("-"))
    elif words[:2] == ["python", "-m"]:
        source = (ROOT / (words[2].replace(".", "/") + ".py")).read_text()
        for option in words[3:]:
            assert not option.startswith("--") or f'"{option}"' in source, option
    else:
        pytest.fail(f"{shlex.join(words)}: check it here, or give the reason in NOT_RUN")


def recipe_above(block: Block) -> str:
    """The reader's my.yaml: what the page shows above a block, on top of a shipped recipe."""
    shown = [one.code for one in all_blocks("yaml") if one.page == block.page and one.line < block.line]
    base = "extends: hh-gemma-2b\n"
    return base if not shown or shown[-1].startswith("extends:") else base + shown[-1]


def test_commands(folder: Path, here: Here) -> None:
    """In one test, since the copy of the run is theirs together."""
    seen: list[list[str]] = []
    faults = []
    for block, words in SHOWN:
        if is_not_run(words) or words in seen:
            continue
        seen.append(words)
        (folder / "my.yaml").write_text(recipe_above(block))
        try:
            check_wpr(words[1:], here) if words[0] == "wpr" else check_other(words)
        except (Exception, pytest.fail.Exception) as error:
            faults.append(f"{block}: {shlex.join(words)}: {error}")
    assert not faults, "\n".join(faults)


def test_every_exception_is_needed() -> None:
    assert {is_not_run(words) for _, words in SHOWN} - {None} == NOT_RUN.keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_within_sentences(page: Path) -> None:
    """`wpr judge --both-orders`: there is such a command, and it has these options."""
    for span in re.findall(r"`(wpr [^`]+)`", prose(page)):
        words = shlex.split(" ".join(span.split()))[1:]
        if words[0].startswith("-") or words[0].isupper():
            continue
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands") and not words[0].isupper() and words[0] != "...":
            assert words[0] in command.commands, span
            command, words = command.commands[words[0]], words[1:]
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for option in (word for word in words if re.match(r"-\w|--\w", word)):
            assert option in known | {"--help", "--debug"}, span


def test_a_wrong_command_is_found() -> None:
    for line in ("wpr frob", "wpr run tiny --frob", "wpr analyze contrast runs/tiny -r no-such"):
        with pytest.raises(Exception, match="frob|no-such"):
            check_wpr(shlex.split(line)[1:], None)
    assert commands_of("wpr run a && wpr b x{1,2}.y > f  # c\nA=1 vllm serve &\n") == [
        ["wpr", "run", "a"], ["wpr", "b", "x1.y", "x2.y"], ["vllm", "serve"],
    ]  # fmt: skip
