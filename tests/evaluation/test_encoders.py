"""Encoders by name, and WordLlama's vectors read from files of its layout; pooling is in `tests/analysis`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.ppo import tiny
from wpr import pico
from wpr.errors import OptionError
from wpr.evaluation.encoders import (
    PACKAGES,
    POOLING,
    SentenceEncoder,
    WordVectors,
    load_encoder,
    package_folder,
    pooling_file,
)


def test_word_vectors_are_means_of_tokens(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    for name in ("tokenizers", "weights"):
        (tmp_path / name).mkdir()
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    weight = torch.randn(tiny.TOKENS, 6, generator=torch.Generator().manual_seed(0)).half()
    save_file({"embedding.weight": weight}, tmp_path / "weights" / "l2_supercat_256.safetensors")
    found = WordVectors.from_package(tmp_path)(["w3 w4 w5", "", "w5 w3 w4"])
    ids = tokenizer("w3 w4 w5", add_special_tokens=False)["input_ids"]
    mean = weight[ids].float().mean(0)
    torch.testing.assert_close(found[0], mean / mean.norm())
    torch.testing.assert_close(found[2], found[0])
    assert not found[1].any()


def test_a_folder_is_a_sentence_encoder() -> None:
    encoder = load_encoder(str(pico.path()))
    assert isinstance(encoder, SentenceEncoder)
    torch.testing.assert_close(encoder(["She ran."]).norm(dim=-1), torch.ones(1))


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(
        OptionError, match=r"no_such_encoder is not installed; install it with `pip install x` \(1 MB\)"
    ):
        package_folder("no_such_encoder", "pip install x", "1 MB")
    assert package_folder("rich", "", "").name == "rich"
    assert all(command.startswith("pip install") for _, command, _ in PACKAGES.values())


def test_the_pooling_of_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the cache, as the hub's client keeps it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--some--encoder"
    path = cached / "snapshots" / ("0" * 40) / POOLING
    path.parent.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert pooling_file("some/encoder") is None
    assert "is not in the cache" in caplog.text
    path.write_text("{}")
    assert pooling_file("some/encoder") == path
