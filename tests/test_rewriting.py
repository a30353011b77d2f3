"""The study of rewriting on results whose answer is known, and its recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import replaced_words, rewriting, seeds
from wpr.config.recipe_file import load_recipe
from wpr.data import DataSettings, Encoder
from wpr.evaluation.encoders import load_encoder
from wpr.recipes.stories_gold import load_pico
from wpr.rewards.words import WordTable, read_entries
from wpr.runs.responses import Response


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


@pytest.fixture(scope="module")
def vectors() -> replaced_words.Vectors:
    return replaced_words.remembered(load_encoder("wordllama"))


def response(text: str, source: str = "This is a good idea, I think.") -> Response:
    return Response("", f"{source}\n", text, columns={"source": source})


def test_words_are_told_apart_by_what_became_of_them(vectors: replaced_words.Vectors) -> None:
    """A better word, the same other words; then the same word, and fewer other words."""
    forbidden = WordTable(read_entries(["good"]))

    def found(text: str) -> tuple[float, float]:
        values = replaced_words.written_words([response(text)], forbidden, vectors)
        assert values["replaced"] == 1.0
        return values["one_word"], values["others_kept"]

    great, every = found("This is a great idea, I think.")
    banana, other = found("This is a banana idea, I think.")
    assert every == other == 1.0
    assert great > banana
    assert found("This is a great house, I hope.") == (pytest.approx(great, abs=1e-6), pytest.approx(4 / 6))
    # Left out, kept, and another form of it: nothing that may stand there does.
    for text in ("This is a idea, I think.", "This is a good idea, I think.", "This is a goods idea, I think."):
        values = replaced_words.written_words([response(text), response(text)], forbidden, vectors)
        assert {name: values[name] for name in ("replaced", "others_kept")} == {"replaced": 0.0, "others_kept": 1.0}
        assert "one_word" not in values
        assert values["all_words"] == pytest.approx(1.0, abs=1e-6)
    rows = [response("This is a great idea, I think."), response("This is a idea, I think.")]
    assert replaced_words.written_words(rows, forbidden, vectors)["replaced"] == 0.5


def test_what_is_lost_is_that_of_the_words_and_that_of_the_rest(vectors: replaced_words.Vectors) -> None:
    """Two words replaced by longer ones and another changed: against the two texts made by hand."""
    forbidden = WordTable(read_entries(["good", "big"]))
    source, text = "The big dog had a good day.", "The enormous dog had a wonderful week."
    original, exchanged, written = vectors([source, "The enormous dog had a wonderful day.", text])
    values = replaced_words.written_words([response(text, source)], forbidden, vectors)
    assert values["all_words"] == pytest.approx(float(original @ exchanged), abs=1e-6)
    assert values["rest"] == pytest.approx(float(original @ written) - float(original @ exchanged), abs=1e-6)
    assert values["rest"] < 0


def test_of_a_phrase_and_its_words_the_phrase_is_replaced(vectors: replaced_words.Vectors) -> None:
    forbidden = WordTable(read_entries(["in order to", "order"]))
    source = "We met in order to talk now."
    original, exchanged = vectors([source, "We met so as for talk now."])
    values = replaced_words.written_words([response("We met so as for talk now.", source)], forbidden, vectors)
    assert values["all_words"] == pytest.approx(float(original @ exchanged), abs=1e-6)
    assert values["rest"] == pytest.approx(0.0, abs=1e-6)


def test_expected_words_by_hand(vectors: replaced_words.Vectors) -> None:
    """Of wpr-pico, against the probabilities of its own forward pass, word by word, at places of different length."""
    model, tokenizer = load_pico()
    encoder = Encoder(tokenizer, DataSettings("demonstrations", "none", template="text"))
    forbidden = WordTable(read_entries(["good", "big"]))
    sources = {"The dog had a good day.": "The dog had a", "He and the cat saw a big red ball.": "He and the cat saw a"}
    wanted: dict[str, list[float]] = {"forbidden": [], "later": [], "covered": [], "expected": []}
    for source, start in sources.items():
        before = tokenizer(f"{source}\n", add_special_tokens=False)["input_ids"]
        before += tokenizer(start, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            shares = model(input_ids=torch.tensor([[*encoder.opening, *before]])).logits[0, -1].softmax(-1)
        length = len(tokenizer.decode(before))
        words = {token: tokenizer.decode([*before, token])[length:] for token in range(len(shares))}
        later = [f" {word}" for word in source[len(start) :].rstrip(".").split()[1:]]
        barred = [token for token, word in words.items() if word.lower() in (" good", " goods", " big", " bigs")]
        left_out = [token for token, word in words.items() if word.lower() in later]
        free = [token for token, word in words.items() if re.fullmatch(" [A-Za-z]+", word)]
        free = [token for token in free if token not in barred and token not in left_out]
        best = sorted(free, key=lambda token: -float(shares[token]))[: replaced_words.LIKELIEST]
        place = source[len(start) :].split()[0]
        original, *others = vectors([source, *(source.replace(f" {place}", words[one]) for one in best)])
        weighted = sum(float(shares[one]) * float(other @ original) for one, other in zip(best, others, strict=True))
        wanted["forbidden"].append(float(shares[barred].sum()))
        wanted["later"].append(float(shares[left_out].sum()))
        wanted["covered"].append(float(shares[best].sum()))
        wanted["expected"].append(weighted / float(shares[best].sum()))
    rows = [response("", source) for source in sources]
    values = replaced_words.expected_words(model, encoder, rows, forbidden, vectors)
    assert values == {name: pytest.approx(sum(pair) / 2, rel=1e-4) for name, pair in wanted.items()}


def test_places_are_those_that_tokens_begin_at() -> None:
    """Single words after a space; a word of several tokens, where its first one stands."""
    _, tokenizer = load_pico()
    encoder = Encoder(tokenizer, DataSettings("demonstrations", "none", template="text"))
    texts = [
        "Good dogs met a hippopotamus.",
        "They had no more.",
        "(Good dogs had a do-good man.",
        "It is good good luck.",
    ]
    entries = WordTable(read_entries(["good", "hippopotamus", "good luck"]))
    places = replaced_words.find_places(encoder, [response("", text) for text in texts], entries)
    shown = {(replaced_words.with_words(place.source, [(place.span, "cat")]), len(place.later)) for place in places}
    assert shown == {("Good dogs met a cat.", 0), ("It is cat good luck.", 2), ("It is good cat luck.", 1)}
    met = next(place for place in places if "dogs" in place.source)
    assert tokenizer.decode(met.before[1:]) == "Good dogs met a hippopotamus.\nGood dogs met a"


def test_no_place_no_number(vectors: replaced_words.Vectors) -> None:
    model, tokenizer = load_pico()
    encoder = Encoder(tokenizer, DataSettings("demonstrations", "none", template="text"))
    forbidden = WordTable(read_entries(["sea"]))
    assert not replaced_words.expected_words(model, encoder, [response("")], forbidden, vectors)
    values = replaced_words.written_words([response("")], forbidden, vectors)
    assert set(values) == {"others_kept", "all_words", "rest"}
    assert values["others_kept"] == 0.0


def test_words_of_an_earlier_release_are_measured_again(tmp_path: Path) -> None:
    assert not rewriting._words_known(tmp_path)
    (tmp_path / rewriting.WORDS).write_text('{"after.expected": 0.9}')
    assert not rewriting._words_known(tmp_path)
    (tmp_path / rewriting.WORDS).write_text('{"after.expected": 0.9, "after.wordllama_rest": -0.1}')
    assert rewriting._words_known(tmp_path)


def test_what_was_measured_of_words_is_added(out: Path) -> None:
    (out / "seed-0-rkl/ppo/rkl+beta=0.1" / rewriting.WORDS).write_text('{"after.expected": 0.9}')
    found = seeds.by_policy(seeds.results(out))
    rewriting.add_words(out, found)
    assert {key for key, rows in found.items() if "after.expected" in rows[0]} == {("rkl", 0.1)}
    assert found["rkl", 0.1][0]["after.expected"] == 0.9
    console = Console(width=200, record=True)
    console.print(rewriting.by_seed_table(found, [("semantic", "rkl")]))
    assert "expected word" not in console.export_text()  # of one policy alone


def test_logs_beside_the_folders_are_no_runs(out: Path) -> None:
    (out / "seed-0-rkl.log").write_text("")
    (out / "seed-2-rkl").mkdir()
    assert [folder.name for folder in seeds.folders(out)] == [
        f"seed-{seed}-{policy}" for seed in (0, 1) for policy in ("rkl", "semantic")
    ]


@pytest.mark.parametrize("name", ["rewriting.yaml", "rewriting_cpu.yaml", "rewriting_smollm2.yaml"])
def test_the_study_s_recipe_has_a_grid_for_every_policy(name: str) -> None:
    recipe = load_recipe(str(Path(rewriting.RECIPE).with_name(name)))
    swept = {policy for sweep in recipe.sweeps.values() for policy in sweep.policies}
    assert swept == set(recipe.policy_names)
    assert {policy for pair in rewriting.PAIRS for policy in pair.split(":")} <= swept
    shuffled, semantic = (recipe.policy(name).regularizer.resolved() for name in ("shuffled", "semantic"))
    assert {key for key in semantic if semantic[key] != shuffled[key]} == {"transform"}
    watched = {f"after.{name}" for name in recipe.evaluation.watched}
    assert watched <= set(rewriting.COLUMNS)
