"""Whose embeddings a spec's costs are of: the reference's own, input or output, or another model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.ppo import tiny
from tests.regularizers.test_spec import TOKENS, from_settings, logits
from wpr.config.recipe import ModelSettings
from wpr.errors import UserError
from wpr.model_geometry import regularizer_on
from wpr.model_loading import load_causal
from wpr.regularizers import Wasserstein
from wpr.transport.geometry import TokenGeometry, input_embeddings


@pytest.mark.parametrize("tied", [False, True])
def test_output_embeddings_of_the_reference(tied: bool) -> None:
    """Where they are tied it is the same matrix, and that is said."""
    reference, said = tiny.policy(tie_word_embeddings=tied), []
    spec = from_settings("unbalanced", neighbours=8, k2=4, embeddings="output")
    built = regularizer_on(reference, spec, say=said.append)
    assert built.geometry.embeddings.data_ptr() == reference.lm_head.weight.data_ptr()
    assert said == (["embeddings=output are the input embeddings: the model ties them."] if tied else [])
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        regularizer_on(reference.model, spec)


def saved(folder: Path, tokenizer: Any = None, **changes: Any) -> str:
    """A model's folder, with its tokenizer."""
    tiny.policy(**changes).save_pretrained(folder)
    (tokenizer or tiny.tokenizer()).save_pretrained(folder)
    return str(folder)


def with_swapped_tokens(first: str, second: str) -> Any:
    """The tests' tokenizer, but two tokens have each other's id."""
    inner = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    ids = inner["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(inner)), eos_token="</s>")


@pytest.mark.parametrize("rows", [tiny.TOKENS, tiny.TOKENS + 24])
def test_costs_of_another_model(tmp_path: Path, rows: int) -> None:
    """Of the same tokenizer, from another file; its matrix may be padded further."""
    other = saved(tmp_path / "other", seed=5, vocab_size=rows)
    reference = load_causal(ModelSettings(saved(tmp_path / "own")))
    settings = from_settings("unbalanced", neighbours=8, k2=4, embeddings=other)
    own = from_settings("unbalanced", neighbours=8, k2=4)
    found = regularizer_on(reference, settings)(logits(0), logits(1), TOKENS).penalty
    weight = input_embeddings(load_causal(ModelSettings(other)))[: tiny.TOKENS]
    expected = Wasserstein(TokenGeometry.from_embeddings(weight, neighbours=8), "unbalanced", k2=4)
    assert torch.equal(found, expected(logits(0), logits(1), TOKENS).penalty)
    assert not torch.equal(found, regularizer_on(reference, own)(logits(0), logits(1), TOKENS).penalty)


def test_costs_of_another_vocabulary(tmp_path: Path) -> None:
    """Two tokenizers of one size are told apart by their tokens; costs follow the tokens' texts."""
    other = saved(tmp_path / "other", with_swapped_tokens("w3", "w7"), seed=5)
    reference, said = load_causal(ModelSettings(saved(tmp_path / "own"))), []
    spec = from_settings("unbalanced", neighbours=8, k2=4, embeddings=other)
    built = regularizer_on(reference, spec, say=said.append)
    weight = input_embeddings(load_causal(ModelSettings(other)))
    ids = tiny.tokenizer().get_vocab()
    order = torch.arange(tiny.TOKENS)
    order[[ids["w3"], ids["w7"]]] = order[[ids["w7"], ids["w3"]]]
    assert torch.equal(built.geometry.embeddings[3:], weight[order][3:])
    assert (~built.geometry.mapped).nonzero().flatten().tolist() == [tiny.PAD, tiny.EOS, tiny.BOS]
    assert said == [
        f"embeddings={other} has another tokenizer; tokens are mapped by their texts. 3 of 40 tokens (7.5%) cannot be "
        "mapped and have no neighbours: 3 are no text by themselves, of 0 its tokenizer knows no piece."
    ]
    for preset in ("unbalanced", "paper"):
        made = Wasserstein(built.geometry, preset, k2=tiny.TOKENS)
        assert made(logits(0), logits(1), torch.arange(6)).penalty.isfinite().all()


def test_a_token_that_only_one_of_them_has(tmp_path: Path) -> None:
    """Rows that pad the policy's matrix are no tokens."""
    larger = tiny.tokenizer()
    larger.add_tokens(["<new>"])
    rows = tiny.TOKENS + 8
    other = saved(tmp_path / "other", larger, vocab_size=rows)
    reference = load_causal(ModelSettings(saved(tmp_path / "own", vocab_size=rows)))
    geometry = regularizer_on(reference, from_settings(k2=4, embeddings=other)).geometry
    assert geometry.mapped.nonzero().flatten().tolist() == list(range(3, tiny.TOKENS))
    assert geometry.neighbours == 36  # k1 is lowered to the tokens that there are
    message = (
        r"neighbours=37 exceeds the other tokens of the vocabulary \(36 with embeddings\); set neighbours to 36 or"
    )
    with pytest.raises(ValueError, match=message):
        regularizer_on(reference, from_settings(k2=4, neighbours=37, embeddings=other))


def test_a_matrix_that_is_padded_less(tmp_path: Path) -> None:
    other = saved(tmp_path / "other")
    reference = load_causal(ModelSettings(saved(tmp_path / "own", vocab_size=tiny.TOKENS + 1)))
    with pytest.raises(
        ValueError, match="other has embeddings of 40 tokens and the policy of 41: the tokenizer is the"
    ):
        regularizer_on(reference, from_settings(neighbours=8, k2=4, embeddings=other))


def test_a_model_without_a_tokenizer_gives_no_costs(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "other")
    reference = load_causal(ModelSettings(saved(tmp_path / "own")))
    settings = from_settings(neighbours=8, k2=4, embeddings=str(tmp_path / "other"))
    with pytest.raises(UserError, match="embeddings: .*other holds no tokenizer that transformers can load"):
        regularizer_on(reference, settings)
