"""The shipped model: it loads as any other, writes English, and its embedding has meaning."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from wpr import TokenGeometry, pico

HELD_OUT = Path(__file__).parents[2] / "scripts" / "pico" / "held_out.txt"
STORIES = [
    "Once upon a time, there was a colorful bird. The bird liked to play and fly. The bird lived in a big tree.\nOne "
    "day, the bird saw a twisty branch. The bird wanted to sit on the twisty branch. The bird flew down and sat on the "
    "twisty branch. The bird was very happy.\nBut then, the bird began to fall. A kind girl saw the bird falling. She "
    "picked up the bird and took it home. The bird could stay on her twisty branch. The bird and the girl were very "
    "happy friends.",
    "Once upon a time, there was a boy named Timmy. Timmy had a pet lizard named Jack. Jack was green and had a long "
    "tail. Timmy loved to feed Jack a yummy cookie. One day, Timmy's mom said it was time to clean Jack. Timmy cleaned "
    "Jack with a soft cloth and water. Jack was happy to go to the bath and Timmy was happy to feed him. The end.",
    "Once upon a time, there was a jolly monkey who loved to play. He had a big sack of bananas that he would eat for "
    "lunch. One day, the monkey was very thirsty and went to look for a drink of water. He found a cozy hole in the "
    "ground and took a drink from it. It was yummy! The monkey was very happy and continued to play with his sack of "
    "bananas.",
]
"""Held-out stories: the short ones among the first of scripts/pico/held_out.txt."""


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pico.path()).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pico.path())


@pytest.fixture(scope="module")
def geometry(model: Any) -> TokenGeometry:
    return TokenGeometry.from_model(model, progress=False)


@pytest.fixture(scope="module")
def samples(model: Any, tokenizer: Any) -> torch.Tensor:
    """Eight stories as the model's own settings draw them, from nothing."""
    torch.manual_seed(0)
    start = torch.full((8, 1), tokenizer.bos_token_id)
    rows: torch.Tensor = model.generate(start, attention_mask=torch.ones_like(start))
    return rows


def test_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)  # it does not pass its records on
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = AutoModelForCausalLM.from_pretrained(pico.path())
            words = AutoTokenizer.from_pretrained(pico.path())
            inputs = words(["A dog", "The end. One"], return_tensors="pt", padding=True, padding_side="left")
            loaded.generate(**inputs, max_new_tokens=4)
    finally:
        library.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_shape_and_size(model: Any, tokenizer: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_576_096
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    folder = sum(file.stat().st_size for file in pico.path().iterdir() if file.is_file())
    assert folder < 10_000_000


def test_bf16_in_the_file_and_float32_in_memory(model: Any) -> None:
    """bf16 cannot be run on every CPU, and is no type to train in."""
    with safe_open(pico.path() / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert model.dtype == torch.float32


def test_special_tokens(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("Once upon a time")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.generation_config.bos_token_id == 1
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id == 0
    assert tokenizer.eos_token_id not in ids
    assert tokenizer("")["input_ids"] == [1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces , and a space before ' s n't .",
        "\n\n tab\t and \r\n\x00",
        "é ß 漢字 עברית 🐉👩‍👩‍👧",
        *STORIES,
    ],
)
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def perplexity(model: Any, tokenizer: Any, texts: list[str]) -> float:
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
        total, count = total + float(losses), count + ids.shape[1] - 1
    return math.exp(total / count)


def test_held_out_perplexity(model: Any, tokenizer: Any) -> None:
    assert set(STORIES) <= set(HELD_OUT.read_text().split("\n<|story|>\n"))
    assert perplexity(model, tokenizer, STORIES) < 4
    scrambled = [" ".join(sorted(story.split())) for story in STORIES]
    assert perplexity(model, tokenizer, scrambled) > 40


def known_share(texts: list[str]) -> float:
    """Share of words that the 500 held-out stories have too: most of the words of such stories, not all."""

    def words(text: str) -> list[str]:
        return re.findall(r"[^\W\d_]+", text.lower())

    known = set(words(HELD_OUT.read_text()))
    found = [word in known for text in texts for word in words(text)]
    return sum(found) / len(found)


def test_writes_english(samples: torch.Tensor, tokenizer: Any) -> None:
    texts = tokenizer.batch_decode(samples, skip_special_tokens=True)
    assert len(set(texts)) == 8
    assert known_share(texts) > 0.9
    noise = torch.randint(3, 4096, (8, 120), generator=torch.Generator().manual_seed(0))
    assert known_share(tokenizer.batch_decode(noise)) < 0.6


def test_stories_come_to_an_end(samples: torch.Tensor, tokenizer: Any) -> None:
    assert (samples == tokenizer.eos_token_id).any(-1).sum() >= 6


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dog", {"cat", "puppy"}),
        ("girl", {"boy"}),
        ("happy", {"glad"}),
        ("red", {"blue", "yellow", "green"}),
        ("said", {"replied", "asked"}),
        ("mom", {"mommy", "mother"}),
        ("eat", {"ate", "eating"}),
        ("cold", {"warm", "hot"}),
    ],
)
def test_neighbours_are_related_words(geometry: TokenGeometry, tokenizer: Any, word: str, expected: set[str]) -> None:
    (token,) = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    near = {tokenizer.decode([other]).strip() for other in geometry.nearest_tokens(token, 6)[0].tolist()}
    assert expected <= near


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pico, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors.*install it again"):
        pico.path()


def test_import_reads_nothing() -> None:
    code = (
        "import sys, wpr; print('wpr.pico' in sys.modules); from wpr import pico; print('transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
