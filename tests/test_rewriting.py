"""The study of rewriting on results whose answer is known, and its recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import rewriting, seeds
from wpr.config.recipe_file import load_recipe
from wpr.evaluation.encoders import load_encoder
from wpr.rewards.words import WordTable, read_entries


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two seeds, two betas: under semantic more meaning is left at the same score, by 0.01 and by 0.03."""
    for seed in (0, 1):
        for policy in ("rkl", "semantic"):
            stages = {}
            folder = tmp_path / f"seed-{seed}-{policy}"
            for beta, score in ((0.2, -1.0), (0.1, -0.5)):
                more = (0.01, 0.03)[seed] if policy == "semantic" else 0.0
                after = {"score": score, "gold": 0.8 - 0.1 * score + more, "wordllama": 0.7, "fluency": -2.0}
                name = f"ppo/{policy}+beta={beta}"
                stages[name] = {"status": "done", "results": {"before": {"score": -1.5}, "after": after}}
                (folder / name).mkdir(parents=True)
                rows = ({"response": f"{policy} {beta} {n}", "columns": {"source": f"sentence {n}"}} for n in range(12))
                (folder / name / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "manifest.json").write_text(json.dumps({"stages": stages}))
    return tmp_path


def test_differences_are_shown_seed_by_seed(out: Path) -> None:
    found = seeds.by_policy(seeds.results(out))
    console = Console(width=200, record=True)
    console.print(rewriting.by_seed_table(found, [("semantic", "rkl"), ("sum", "rkl")]))
    shown = console.export_text()
    assert [text for text in ("+0.0100", "+0.0300", "sum - rkl") if text in shown] == ["+0.0100", "+0.0300"]


def test_examples_are_the_first_ten_at_scores_alike(out: Path) -> None:
    text = rewriting.examples(out, seeds.by_policy(seeds.results(out)))
    assert text.startswith("seed 0, at a score near -0.75:")
    assert "10. sentence 9" in text
    assert "sentence 10" not in text
    lines = text[text.index("1. sentence 0") :].splitlines()[1:3]
    assert [line.split()[0] for line in lines] == ["rkl", "semantic"]
    assert all(line.endswith(" 0") for line in lines)


def test_the_tables_are_printed(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds.table(seeds.by_policy(seeds.results(out)), [("semantic", "rkl")], rewriting.COLUMNS)
    printed = capsys.readouterr().out
    assert "meaning" in printed
    assert "semantic - rkl" in printed


def test_words_are_told_apart_by_what_became_of_them() -> None:
    """A better word, the same other words; then the same word, and fewer other words."""
    forbidden, encoder = WordTable(read_entries(["good"])), load_encoder("wordllama")

    def found(response: str) -> tuple[float, float]:
        rows = [{"response": response, "columns": {"source": "This is a good idea, I think."}}]
        values = rewriting.word_by_word(rows, forbidden, encoder)
        return values["after.one_word"], values["after.others_kept"]

    great, every = found("This is a great idea, I think.")
    banana, other = found("This is a banana idea, I think.")
    assert every == other == 1.0
    assert great > banana
    assert found("This is a great house, I hope.") == (pytest.approx(great, abs=1e-6), pytest.approx(4 / 6))
    left_out, every = found("This is a idea, I think.")
    assert math.isnan(left_out)
    assert every == 1.0


def test_words_are_added_where_a_list_is_known(out: Path) -> None:
    found = seeds.by_policy(seeds.results(out))
    (out / "seed-0-rkl/ppo/rkl+beta=0.1/words.txt").write_text("sentence\n")
    rewriting.add_words(out, found, load_encoder("wordllama"))
    assert {key for key, rows in found.items() if "after.others_kept" in rows[0]} == {("rkl", 0.1)}
    assert found["rkl", 0.1][0]["after.others_kept"] == pytest.approx(1.0)  # the number after the word


@pytest.mark.parametrize("name", ["rewriting.yaml", "rewriting_cpu.yaml", "rewriting_smollm2_cpu.yaml"])
def test_the_study_s_recipe_has_a_grid_for_every_policy(name: str) -> None:
    recipe = load_recipe(str(Path(rewriting.RECIPE).with_name(name)))
    swept = {policy for sweep in recipe.sweeps.values() for policy in sweep.policies}
    assert swept == set(recipe.policy_names)
    if name == "rewriting_smollm2_cpu.yaml":
        assert swept == {"rkl", "semantic", "shuffled", "hellinger"}
    else:
        assert {policy for pair in rewriting.PAIRS for policy in pair.split(":")} <= swept
    shuffled, semantic = (recipe.policy(name).regularizer.resolved() for name in ("shuffled", "semantic"))
    assert {key for key in semantic if semantic[key] != shuffled[key]} == {"transform"}
    watched = {f"after.{name}" for name in recipe.evaluation.watched}
    assert watched <= set(rewriting.COLUMNS)
