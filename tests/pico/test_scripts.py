"""The scripts that made wpr-pico and measure it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

from tests.pico.test_pico import STORIES
from wpr import pico

SCRIPTS = Path(__file__).parents[2] / "scripts" / "pico"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """make_pico, measure and teacher; they are no package, and are run from where they lie."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import make_pico
    import measure
    import teacher

    return make_pico, measure, teacher


def test_a_model_made_here_loads_as_the_shipped_one(scripts: tuple[ModuleType, ...], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_pico = scripts[0]
    tokenizer = make_pico.train_tokenizer(STORIES)
    rows = make_pico.pack(tokenizer, STORIES * 4)
    model = make_pico.make_model(seed=0)
    log = make_pico.train(model, rows, rows[:1], steps=3, batch=2, rate=3e-3, device="cpu", seed=0)
    assert log[-1]["step"] == 3
    assert log[-1]["held_out"] < math.log(make_pico.VOCABULARY)
    trained = model.get_input_embeddings().weight.detach().clone()
    make_pico.save(model, tokenizer, tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.get_input_embeddings().weight, trained.bfloat16().float())
    shipped = AutoModelForCausalLM.from_pretrained(pico.path())
    assert loaded.config.to_diff_dict() == shipped.config.to_diff_dict()
    assert loaded.generation_config.to_diff_dict() == shipped.generation_config.to_diff_dict()
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.model_max_length == AutoTokenizer.from_pretrained(pico.path()).model_max_length
    assert again(STORIES[0])["input_ids"] == tokenizer(STORIES[0])["input_ids"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_packed_stories_begin_and_end(scripts: tuple[ModuleType, ...]) -> None:
    make_pico = scripts[0]
    rows = make_pico.pack(make_pico.train_tokenizer(STORIES), STORIES * 4)
    ids = rows.flatten().tolist()
    assert ids[0] == make_pico.BOS
    ends = [place for place, token in enumerate(ids[:-1]) if token == make_pico.EOS]
    assert ends
    assert all(ids[place + 1] == make_pico.BOS for place in ends)


def test_row_order_goes_over_all_rows_before_it_repeats(scripts: tuple[ModuleType, ...]) -> None:
    order = scripts[0].row_order(rows=5, wanted=12, seed=0).tolist()
    assert len(order) == 15
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))


def test_figures_replace_those_of_the_card(scripts: tuple[ModuleType, ...], tmp_path: Path) -> None:
    measure = scripts[1]
    card = tmp_path / "README.md"
    card.write_text(f"before\n{measure.BEGIN}\nold\n{measure.END}\nafter\n")
    measure.write(card, "new")
    measure.write(card, "newer")
    assert card.read_text() == f"before\n{measure.BEGIN}\nnewer\n{measure.END}\nafter\n"
    card.write_text("no marks")
    with pytest.raises(ValueError, match="must hold the lines"):
        measure.write(card, "new")


def test_the_card_holds_the_losses_of_the_run(scripts: tuple[ModuleType, ...]) -> None:
    measure = scripts[1]
    training = json.loads((SCRIPTS / "training.json").read_text())
    card = (pico.path() / "README.md").read_text()
    table = "\n".join(measure.losses(training))
    assert all(f"\n| {step} |" in table for step in measure.SHOWN_STEPS)
    assert table in card


def test_a_cut_off_teacher_is_refused(scripts: tuple[ModuleType, ...], tmp_path: Path) -> None:
    file = tmp_path / "llama2.data"
    file.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="100 bytes.*fetch it again"):
        scripts[2].load(file)
