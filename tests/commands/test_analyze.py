"""`wpr analyze` on a real run of the tiny recipe: every analysis, what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.command import SMALL, Here, environment, run
from wpr import pico
from wpr.analysis import penalties
from wpr.analysis.context import AnalysisContext
from wpr.analysis.statistics import fit_line
from wpr.commands.analyze import ANALYSES, app
from wpr.findings import found_in, load
from wpr.report import write_report
from wpr.runs.finished_run import REFERENCE, FinishedRun
from wpr.runs.responses import AFTER, BEFORE, response_of, with_tokens

POLICIES = ["rkl+beta=0.05", "rkl+beta=0.5", "semantic+beta=0.05", "semantic+beta=0.5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two penalties with two betas each, a few steps of training on one SFT and one reward model."""
    folder = tmp_path_factory.mktemp("analyze")
    small = [change for change in SMALL if not change.startswith(("train=", "sft."))]
    # SFT long enough for texts that are tokenized as they were drawn, and for tokens that the model is sure of.
    small += ["sft.max_steps=150", "sft.save_steps=150", "sft.learning_rate=0.01"]
    finished = run("sweep", "tiny", *small, "output=run", "--policy", "rkl", "--policy", "semantic",
                   "--grid", "ppo.beta=0.05,0.5", cwd=folder)  # fmt: skip
    assert finished.code == 0, finished.stderr
    _write_generations(folder / "run")
    return folder / "run"


def _write_generations(run_folder: Path) -> None:
    """Files as `wpr generate` wrote them before they had token ids, of responses that the models of this run gave."""
    made = {"sft": ("rkl+beta=0.05", BEFORE), "rkl": ("rkl+beta=0.05", AFTER), "semantic": ("semantic+beta=0.5", AFTER)}
    for name, (policy, file) in made.items():
        rows = [json.loads(line) for line in (run_folder / "ppo" / policy / file).read_text().splitlines()]
        for at in (0.5, 1.0):
            lines: list[dict[str, Any]] = [{"header": {"name": name, "sampling": {"temperature": at}}}]
            lines += [
                {"prompt_id": str(row["number"]), "prompt": row["prompt"], "response": row["response"],
                 "temperature": at, "tokens": row["length"], "stopped": row["finished"]}
                for row in rows
            ]  # fmt: skip
            path = run_folder / "generations" / f"{name}-t{at:g}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def owned(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


NO_OPTION = ("there is no folder", "cannot be a folder or file")
"""Errors that are the machine's rather than of the command line, as other commands have it."""

EVERY = [
    "geometry", "contrast", "penalties", "similarity", "coherence", "convergence", "case-study", "costs",
    "sensitivity", "temperature",
]  # fmt: skip


GPU = pytest.mark.needs("gpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_all_of_them(here: Here, owned: Path, tmp_path: Path, device: str) -> None:
    finished = here.succeeds("analyze", "all", str(owned), "--device", device)
    assert "left out" not in finished.stdout
    assert sorted(path.name for path in (owned / "analyses").iterdir()) == sorted(EVERY)
    for name in EVERY:
        folder = owned / "analyses" / name
        finding = load(folder)
        assert finding.name == name
        assert finding.rows
        assert finding.figures
        assert (folder / "table.csv").read_text().count("\n") >= 1 + len(finding.rows)
        for figure in finding.figures:
            assert ElementTree.parse(folder / f"{figure.name}.svg").getroot().tag.endswith("svg")
        data = [json.loads(line) for line in (folder / "data.jsonl").read_text().split("\n") if line]
        assert data
    problems = write_report([owned], tmp_path / "report.html")
    assert all("no stage yet for rkl, semantic" in problem for problem in problems), "the sweep trained others"
    page = (tmp_path / "report.html").read_text()
    assert all(finding.title in page.replace("&#x27;", "'") for finding in found_in(owned))


def test_what_is_missing_is_left_out_with_the_reason(here: Here, owned: Path) -> None:
    shutil.rmtree(owned / "generations")
    for policy in POLICIES:
        for file in (AFTER, BEFORE):
            (owned / "ppo" / policy / file).unlink()
    finished = here.succeeds("analyze", "all", str(owned))
    done = sorted(path.name for path in (owned / "analyses").iterdir())
    assert done == ["costs", "geometry", "sensitivity"]
    assert "left out: temperature: " in finished.stdout
    assert "left out: penalties: ppo/rkl+beta=0.05/responses.jsonl is missing" in finished.stdout


def test_penalties_are_those_that_training_recorded(trained: Path) -> None:
    """KL of each response, summed over its tokens, against what PPO measured on the tokens that it drew."""
    context = AnalysisContext(FinishedRun(trained, "cpu"))
    compared = 0
    for policy, (answers, found) in context.measured(["reverse-kl"]).items():
        recorded = {row["number"]: row for row in map(json.loads, (trained / "ppo" / policy / AFTER).open())}
        sums = found.means(found.divergence["reverse-kl"], len(answers))
        for index, answer in enumerate(answers):
            if len(answer.response_ids) == answer.length:  # else the text is tokenized otherwise than it was drawn
                expected = recorded[answer.number]["kl"]
                assert float(sums[index]) * answer.length == pytest.approx(expected, rel=1e-3, abs=1e-4)
                compared += 1
    assert compared >= 12


def test_measured_once(trained: Path) -> None:
    said: list[str] = []
    context = AnalysisContext(FinishedRun(trained, "cpu"), ["rkl+beta=0.5"], 3, say=said.append)
    first = context.measured(["reverse-kl"])["rkl+beta=0.5"][1].penalty["reverse-kl"]
    both = context.measured(["reverse-kl", "squared-hellinger"])["rkl+beta=0.5"][1]
    assert both.penalty["reverse-kl"] is first
    assert [text.rpartition(": ")[2] for text in said] == ["reverse-kl", "squared-hellinger"]


def test_two_penalties_of_ones_choice(here: Here, trained: Path, tmp_path: Path) -> None:
    here.succeeds("analyze", "penalties", str(trained), "--first", "fkl", "--second", "paper:lam=20,iterations=4",
                  "--beta", "0.5", "2", "-p", "rkl+beta=0.5", "-o", str(tmp_path / "x"))  # fmt: skip
    finding = load(tmp_path / "x")
    assert finding.settings["second"] == "paper:lam=20,iterations=4"
    assert finding.settings["betas"] == [0.5, 2.0]
    assert [row[0] for row in finding.rows] == ["rkl+beta=0.5"]


def test_similarity_by_an_encoder_of_ones_choice(here: Here, trained: Path, tmp_path: Path) -> None:
    here.succeeds("analyze", "similarity", str(trained), "-e", str(pico.path()), "-r", "reverse-kl", "-r",
                  "semantic:rho=2", "-o", str(tmp_path / "x"))  # fmt: skip
    finding = load(tmp_path / "x")
    assert str(pico.path().name) in finding.text[0]
    assert not any("independent encoder" in sentence for sentence in finding.text)
    pairs = [json.loads(line) for line in (tmp_path / "x" / "data.jsonl").read_text().splitlines()]
    assert len(pairs) == finding.rows[0][3] * len(POLICIES)  # type: ignore[operator]
    assert all(-1 <= pair["bert_score"]["f1"] <= 1.0001 for pair in pairs)


@pytest.fixture
def spoken(owned: Path, here: Here) -> Path:
    """With responses that `wpr generate` drew, instead of written ones."""
    shutil.rmtree(owned / "generations")
    for policy in ("rkl+beta=0.5", "semantic+beta=0.5"):
        here.succeeds("generate", str(owned), "-t", "0", "-t", "0.7", "--device", "cpu", "-p", policy, "-p", REFERENCE)
    return owned


def test_responses_drawn_at_another_temperature(here: Here, spoken: Path, tmp_path: Path) -> None:
    chosen = ("-p", "rkl+beta=0.5", "-p", "semantic+beta=0.5")
    for analysis in ("penalties", "similarity", "coherence", "convergence"):
        here.succeeds("analyze", analysis, str(spoken), "-t", "0.7", *chosen)
        finding = load(spoken / "analyses" / f"{analysis}-t0.7")
        assert finding.name == f"{analysis}-t0.7"
        assert finding.title.endswith("temperature 0.7")
        assert finding.settings["drawn"]["rkl+beta=0.5"]["temperature"] == 0.7
        assert "`wpr generate` draws at temperature 0.7" in finding.text[-1]
    here.succeeds("analyze", "similarity", str(spoken), *chosen)
    assert load(spoken / "analyses" / "similarity").rows != load(spoken / "analyses" / "similarity-t0.7").rows
    write_report([spoken], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Penalties and semantic similarity, temperature 0.7" in page


def test_responses_are_paired_by_prompt(spoken: Path) -> None:
    """A file in another order, and one response short, still meets its own prompts."""
    path = spoken / "generations" / "rkl+beta=0.5-t0.jsonl"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header.replace(f'"prompts": {len(lines)}', f'"prompts": {len(lines) - 1}'),
                               *reversed(lines[1:])]) + "\n")  # fmt: skip
    context = AnalysisContext(FinishedRun(spoken, "cpu"), ["rkl+beta=0.5"], temperature=0.0)
    answers = context.responses("rkl+beta=0.5")  # the policy's first: numbers are the reference's all the same
    reference = {answer.number: answer.prompt for answer in context.responses("rkl+beta=0.5", BEFORE)}
    assert list(reference) == list(range(len(lines)))
    assert len(answers) == len(lines) - 1 == len(reference) - 1
    assert all(reference[answer.number] == answer.prompt for answer in answers)
    assert {answer.number for answer in answers} == {*reference} - {0}


def test_what_a_file_of_responses_says_of_itself_is_checked(here: Here, spoken: Path) -> None:
    path = spoken / "generations" / "rkl+beta=0.5-t0.7.jsonl"
    whole, chosen = path.read_text(), ("-p", "rkl+beta=0.5")
    shutil.copy(path.with_name("rkl+beta=0.5-t0.jsonl"), path)
    error = here("analyze", "penalties", str(spoken), "-t", "0.7", *chosen).error
    assert "was drawn at temperature 0.0, not 0.7; draw again with" in error
    assert "-t 0.7 -p rkl+beta=0.5 --restart`" in error
    header, *lines = whole.splitlines()
    odd = json.loads(header)
    odd["header"] |= {"fingerprint": "x", "sampling": odd["header"]["sampling"] | {"top_k": 5}}
    path.write_text("\n".join([json.dumps(odd), *lines]) + "\n")
    assert "not all drawn alike" in here.succeeds("analyze", "similarity", str(spoken), "-t", "0.7", *chosen).stdout
    path.write_text("\n".join(lines) + "\n")  # from elsewhere: without a header
    said = here.succeeds("analyze", "similarity", str(spoken), "-t", "0.7", *chosen).stdout
    assert "How they were drawn is not told by the files of rkl+beta=0.5." in said
    path.write_text("\n".join(['{"header": {"temperature": 0.9}}', *lines]) + "\n")
    assert "was drawn at temperature 0.9" in here("analyze", "penalties", str(spoken), "-t", "0.7", *chosen).error
    path.unlink()
    path.with_name(path.name + ".partial").touch()
    assert "is not finished" in here("analyze", "penalties", str(spoken), "-t", "0.7", *chosen).error
    assert "must be a finite number" in here("analyze", "penalties", str(spoken), "-t", "inf").error


def test_one_number_for_two_prompts_is_refused(here: Here, spoken: Path) -> None:
    path = spoken / "generations" / "rkl+beta=0.5-t0.jsonl"
    header, *rows = map(json.loads, path.read_text().splitlines())
    names = [row["prompt_id"] for row in rows]
    for row, name in zip(rows, [*names[1:], names[0]], strict=True):
        row["prompt_id"] = name
    path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    error = here("analyze", "similarity", str(spoken), "-t", "0", "-p", "rkl+beta=0.5").error
    assert "is another prompt in" in error


def test_a_reference_that_is_not_looked_at_may_be_stale(here: Here, spoken: Path) -> None:
    path = spoken / "generations" / "sft-t0.jsonl"
    path.write_text(path.read_text().replace('"weights": "', '"weights": "other'))
    here.succeeds("analyze", "penalties", str(spoken), "-t", "0", "-p", "rkl+beta=0.5")
    assert list(load(spoken / "analyses" / "penalties-t0").settings["drawn"]) == ["rkl+beta=0.5"]
    assert "other weights" in here("analyze", "similarity", str(spoken), "-t", "0", "-p", "rkl+beta=0.5").error


def test_penalties_of_all_policies_have_intervals_over_prompts(trained: Path) -> None:
    context = AnalysisContext(FinishedRun(trained, "cpu"), limit=12)
    finding, _ = penalties.analyze(context, "reverse-kl", "squared-hellinger")
    found = context.measured(["reverse-kl", "squared-hellinger"]).values()
    x, y = (torch.cat([each.penalty[name] for _, each in found]) for name in ("reverse-kl", "squared-hellinger"))
    prompts = torch.cat([torch.tensor([answer.number for answer in answers])[each.answer] for answers, each in found])
    expected = fit_line(x, y, prompts)
    row = dict(zip(finding.columns, finding.rows[-1], strict=True))
    assert row["policy"] == "all"
    assert (row["slope low"], row["slope high"]) == pytest.approx((expected.slope.low, expected.slope.high))


def test_responses_without_a_token_are_refused(here: Here, spoken: Path) -> None:
    path = spoken / "generations" / "rkl+beta=0.5-t0.jsonl"
    header, *rows = map(json.loads, path.read_text().splitlines())
    empty = [row | {"response": "", "finished": False, "length": 0, "response_ids": []} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in [header, *empty]))
    error = here("analyze", "penalties", str(spoken), "-t", "0", "-p", "rkl+beta=0.5").error
    assert "all responses in generations/rkl+beta=0.5-t0.jsonl are empty" in error
    assert "ppo.min_new_tokens" in error


def test_responses_without_a_partner_are_counted(here: Here, spoken: Path) -> None:
    path = spoken / "generations" / "rkl+beta=0.5-t0.jsonl"
    changed = [json.loads(line) for line in path.read_text().splitlines()]
    for row in changed[1:5]:
        row["prompt_id"] += "-other"
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    said = here.succeeds("analyze", "similarity", str(spoken), "-t", "0", "-p", "rkl+beta=0.5").stdout
    assert "4 responses are to prompts that the reference did not answer" in said
    said = here.succeeds("analyze", "coherence", str(spoken), "-t", "0", "-p", "rkl+beta=0.5").stdout
    assert "Not all models answered the same prompts" in said


def test_responses_of_a_model_that_was_trained_anew_are_refused(here: Here, spoken: Path) -> None:
    shutil.rmtree(spoken / "ppo" / "rkl+beta=0.5" / "model")
    shutil.copytree(spoken / "ppo" / "rkl+beta=0.05" / "model", spoken / "ppo" / "rkl+beta=0.5" / "model")
    finished = here("analyze", "penalties", str(spoken), "-t", "0", "-p", "rkl+beta=0.5")
    assert finished.code == 2
    assert "rkl+beta=0.5-t0.jsonl was drawn from other weights than are in" in finished.error
    assert "-t 0 -p rkl+beta=0.5 --restart`" in finished.error


def test_a_prompt_of_ones_own(here: Here, trained: Path, tmp_path: Path) -> None:
    finished = here.succeeds("analyze", "case-study", str(trained), "--prompt", "Human: Where is my hat?",
                             "-p", "semantic+beta=0.5", "--tokens", "5", "-o", str(tmp_path / "x"))  # fmt: skip
    assert "Where is my hat?" in finished.stdout
    assert 1 <= len(load(tmp_path / "x").rows) <= 5


def test_temperature_against_another_model(here: Here, trained: Path, tmp_path: Path) -> None:
    here.succeeds("analyze", "temperature", str(trained), "--against", "rkl", "-o", str(tmp_path / "x"))
    finding = load(tmp_path / "x")
    assert {row[0] for row in finding.rows} == {"sft", "semantic"}
    # The reward model's score of the same tokens is what PPO recorded.
    scores = [json.loads(line) for line in (tmp_path / "x" / "data.jsonl").read_text().splitlines()]
    found = {row["prompt_id"]: row["score"] for row in scores if row["model"] == "rkl" and row["temperature"] == 0.5}
    run = FinishedRun(trained, "cpu")
    rows = [json.loads(line) for line in (trained / "ppo" / POLICIES[0] / AFTER).read_text().splitlines()]
    texts = [{name: value for name, value in row.items() if name != "response_ids"} for row in rows]
    again = [with_tokens(response_of(row, "here"), run.encoder) for row in texts]
    assert not any(answer.drawn for answer in again)
    as_drawn = [row for row, answer in zip(rows, again, strict=True) if answer.response_ids == row["response_ids"]]
    assert len(as_drawn) >= 3
    for row in as_drawn:
        assert found[str(row["number"])] == pytest.approx(row["score"], abs=1e-4)


def test_win_rates_over_several_models_stand_beside_each_other(here: Here, owned: Path) -> None:
    here.succeeds("analyze", "temperature", str(owned))
    here.succeeds("analyze", "temperature", str(owned), "--against", "rkl")
    found = {path.name: load(path) for path in (owned / "analyses").iterdir()}
    assert {name: finding.settings["against"] for name, finding in found.items()} == {
        "temperature": "sft", "temperature-over-rkl": "rkl",
    }  # fmt: skip
    assert all(finding.name == name for name, finding in found.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["penalties", "{run}", "-p", "nobody"], "has no finished policy nobody; finished are: rkl+beta=0.05"),
        (["penalties", "{run}", "--second", "wasserstien"], "'wasserstien'; did you mean 'wasserstein'?"),
        (["penalties", "{run}", "--second", "paper:lamb=3"], "'lamb=3' of 'paper:lamb=3' is no setting"),
        (["penalties", "{run}", "--second", "paper:lam=-3"], "lam=-3.0 must be a finite positive number"),
        (["penalties", "{run}", "--second", "paper:lam=x"], "lam='x' must be"),
        (["penalties", "{run}", "--second", "kl:lam=3"], "has no meaning"),
        (["penalties", "{run}", "--second", "reverse-kl"], "both regularizers are reverse-kl"),
        (["penalties", "{run}/sft"], "is not a run folder: it has no manifest.json"),
        (["similarity", "{run}", "-e", "{run}/sft"], "cannot be loaded"),
        (["similarity", "{run}", "-t", "0.5"], "of rkl+beta=0.05 there are responses at temperature none; draw these"),
        (["similarity", "{run}", "--layer", "99"], "layer 99 is outside"),
        (["coherence", "{run}", "--metric", "taxi"], "--metric taxi must be euclidean or cosine"),
        (["coherence", "{run}", "--top", "100000"], "--top 100000 exceeds the vocabulary"),
        (["convergence", "{run}", "-r", "reverse-kl"], "reverse-kl has no solver to iterate"),
        (["case-study", "{run}", "-r", "reverse-kl"], "reverse-kl moves no mass"),
        (["temperature", "{run}", "--against", "nobody"], "no model answered the same prompts as nobody"),
        (["temperature", "{run}", "--gold"], "has no gold scorer"),
        (["temperature", "{run}", "--gold", "--judged"], "--gold and --judged name two judges"),
        (["geometry", "{run}", "-s", "reverse-kl"], "has no geometry"),
        (["geometry", "{run}", "-s", "4*semantic"], "has no geometry by itself"),
        (["geometry", "{run}", "--metric", "taxi"], "metric='taxi' is unknown"),
        (["geometry", "{run}", "-s", "paper:k2=99999"], "k2=99999 exceeds the vocabulary"),
        (["geometry", "{run}", "--lam", "-1"], "lam=-1.0 must be a finite positive number"),
        (["sensitivity", "{run}", "--more", "{run}/sft"], "is not a run folder"),
        (["temperature", "{run}", "--judged"], "no finding of a judge compares a model with sft"),
        (["case-study", "{run}", "--prompt", ""], "the prompt has no tokens"),
        (["geometry", "{run}/nothing"], "there is no folder"),
        (["geometry", "{run}", "-e", "somewhere"], "--encoder and --texts go together"),
        (["substitution", "{run}", "-e", "{run}/sft"], "cannot be loaded"),
        (["substitution", "{run}", "-e", "x", "--reward", "0.5"], "--reward 0.5 must be between -1"),
        (["substitution", "{run}/sft/model", "-e", "x"], "give texts with --texts FILE"),
        (["substitution", "{run}", "-e", "x", "--texts", "{run}/manifest.json"], "has no text"),
        (["costs", "{run}", "-o", "{run}/manifest.json/x"], "cannot be a folder or file"),
        (["penalties", "{run}", "--device", "quantum"], "--device quantum cannot be used"),
    ],
)  # fmt: skip
def test_what_is_refused(here: Here, trained: Path, arguments: list[str], message: str) -> None:
    finished = here("analyze", *(part.format(run=trained) for part in arguments))
    assert finished.code == (1 if message in NO_OPTION else 2)
    assert message in finished.error


def test_damaged_responses_are_named(here: Here, owned: Path) -> None:
    path = owned / "ppo" / POLICIES[0] / AFTER
    path.write_text(path.read_text().split("\n")[0] + "\n{broken\n")
    error = here("analyze", "penalties", str(owned)).error
    assert f"{AFTER}:2 is damaged" in error


def test_a_byte_order_mark_before_the_responses(here: Here, owned: Path) -> None:
    path = owned / "ppo" / POLICIES[0] / AFTER
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    here.succeeds("analyze", "coherence", str(owned), "-p", POLICIES[0])


def test_an_empty_file_of_responses(here: Here, owned: Path) -> None:
    path = owned / "ppo" / POLICIES[0] / AFTER
    path.write_text("")
    error = here("analyze", "coherence", str(owned), "-p", POLICIES[0]).error
    assert f"{path} has no lines: all responses were left out for faults (see faults/), or the file was cut" in error
    path.write_bytes(b"\xff\xfe\n")
    assert f"{path}:1 is damaged (" in here("analyze", "coherence", str(owned), "-p", POLICIES[0]).error


GARBAGE = b'garbage\n3\n\xff\xfe{"x"\n{"loss": 1}\n{"loss": 0.1, "step": 1, "score": "high", "seconds_reward": []}\n'


def test_garbage_among_the_metrics_is_told(here: Here, owned: Path) -> None:
    path = owned / "ppo" / POLICIES[0] / "metrics.jsonl"
    rows = here.succeeds("analyze", "costs", str(owned)).stdout
    path.write_bytes(path.read_bytes() + GARBAGE)
    finished = here.succeeds("analyze", "costs", str(owned))
    assert f"Note: {path}: 4 of " in finished.stderr
    assert "lines could not be used (line " in finished.stderr
    assert POLICIES[0] in rows


def test_an_unfinished_run(here: Here, owned: Path) -> None:
    manifest = json.loads((owned / "manifest.json").read_text())
    for name, record in manifest["stages"].items():
        record["status"] = "running" if name.startswith("ppo/") else record["status"]
    (owned / "manifest.json").write_text(json.dumps(manifest))
    assert "has no finished policy; let `wpr run` finish one" in here("analyze", "penalties", str(owned)).error
    assert "sees meaning" in here.succeeds("analyze", "geometry", str(owned), "-s", "semantic").stdout.lower()


def test_the_run_s_folder_may_have_been_moved(owned: Path) -> None:
    moved = owned.rename(owned.with_name("elsewhere"))
    loaded = FinishedRun(moved, "cpu")
    assert loaded.sft_model == str(moved / "sft" / "model")
    assert loaded.load(REFERENCE).device.type == "cpu"
    assert loaded.responses(POLICIES[0])


def test_needs_neither_trl_nor_plotting_nor_datasets(trained: Path, tmp_path: Path) -> None:
    """On a machine that has torch and transformers alone; a module that is None cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('trl', 'datasets', 'matplotlib', 'scipy', 'peft'): sys.modules[name] = None\n"
        f"sys.argv = ['wpr', 'analyze', 'similarity', {str(trained)!r}, '-o', {str(tmp_path / 'x')!r}]\n"
        "from wpr.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "x").rows


def test_every_command_has_an_example_that_it_understands(here: Here) -> None:
    names = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    assert sorted(names) == sorted([*EVERY, "substitution", "all"])  # one needs an encoder, and texts or a run
    assert ["geometry", *ANALYSES] == EVERY, "the order in which `wpr analyze all` does them"
    for name in names:
        message = here.succeeds("analyze", name, "--help").stdout
        assert f"wpr analyze {name}" in " ".join(message.split()), name
