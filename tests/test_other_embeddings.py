"""Embeddings of a model with another tokenizer: each token of the policy by its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.data import tokenizers_made_here
from tests.ppo import tiny
from wpr.commands.token_geometry import build_geometry, show_geometry
from wpr.config.recipe import ModelSettings
from wpr.errors import OptionError, UserError
from wpr.model_geometry import check_other_embeddings, regularizer_on, token_embeddings
from wpr.model_loading import load_causal
from wpr.other_embeddings import map_tokens, mean_rows, text_pieces, token_texts
from wpr.regularizers.spec import RegularizerSpec

BYTES = tokenizers_made_here.plain()


def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, words and their parts."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "sea", "hell", "##o", "the", "capital", "of", "cold", "?", "a", "##t"]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Llama's kind: a space before every text, bytes where there is no piece."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁big", "big", "▁a", "a", "<0x0A>", "<0xE2>", "b", "i", "g"]
    inner = Tokenizer(models.Unigram([(piece, -float(len(pieces) - i)) for i, piece in enumerate(pieces)], 0, True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model with a byte-level tokenizer, its matrix padded by three rows."""
    folder = tmp_path_factory.mktemp("policy")
    tiny.policy(vocab_size=len(BYTES) + 3).save_pretrained(folder)
    BYTES.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder with word pieces."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=14, **settings)).save_pretrained(folder)
    word_pieces().save_pretrained(folder)
    return str(folder)


def token_of(text: str) -> int:
    (token,) = BYTES(text, add_special_tokens=False)["input_ids"]
    return int(token)


def test_rows_are_means_of_pieces(policy: str, encoder: str) -> None:
    reference, said = load_causal(ModelSettings(policy)), []
    found = token_embeddings(reference, encoder, said.append)
    weight = BertModel.from_pretrained(encoder).get_input_embeddings().weight.detach()
    for text, pieces in ((" sea", [4]), (" the", [7]), (" cold", [10]), (" Hello", [5, 6]), ("?", [11])):
        torch.testing.assert_close(found.weight[token_of(text)], weight[pieces].mean(0))
    mapped = found.mapped
    assert mapped is not None
    fragment = BYTES.convert_tokens_to_ids("Ã")  # a byte that begins a character
    assert not mapped[[0, 1, 3, fragment, token_of("\n"), token_of("p"), -1, -2, -3]].any()
    assert found.weight[~mapped].abs().sum() == 0
    left = int((~mapped).sum())
    assert said[0].startswith(
        f"embeddings={encoder} has another tokenizer; tokens are mapped by their texts. {left} of"
    )
    assert f"of {len(mapped)} tokens ({left / len(mapped):.1%}) cannot be mapped and have no neighbours: " in said[0]


def test_texts_of_tokens() -> None:
    texts = token_texts(BYTES)
    assert len(texts) == len(BYTES)
    assert texts[:5] == [None] * 5  # special
    assert texts[token_of(" sea")] == " sea"
    assert texts[BYTES.convert_tokens_to_ids("Ã")] is None
    texts = token_texts(sentence_pieces())
    assert texts == [None, None, None, " ", " big", "big", " a", "a", "\n", None, "b", "i", "g"]
    texts = token_texts(word_pieces())
    assert texts[4:7] == [" sea", " hell", "o"]


def test_pieces_of_texts() -> None:
    """Without special and unknown ones; a tokenizer that puts a space before a text gets none twice."""
    texts = [" Hello", "zebra", "sea zebra", None, " ", "[CLS]", "hat"]
    assert text_pieces(texts, word_pieces()) == [[5, 6], [], [4], [], [], [], []]
    assert text_pieces([" big", "big", " "], sentence_pieces()) == [[4], [4], []]


def test_one_tokenizer_is_not_mapped(policy: str) -> None:
    assert map_tokens(policy, policy) is None


def test_ids_beyond_the_matrix() -> None:
    weight = torch.arange(6.0).reshape(3, 2)
    rows, mapped = mean_rows(weight, [[0, 2], [], [1]])
    assert rows.tolist() == [[2.0, 3.0], [0.0, 0.0], [2.0, 3.0]]
    assert mapped.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="its tokenizer has the id 3, but its matrix only 3 rows"):
        mean_rows(weight, [[3]])


def test_a_tokenizer_that_knows_nothing(policy: str, tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    spec = RegularizerSpec.from_settings(embeddings=str(tmp_path))
    message = r"has another tokenizer than .*, in which 0 of 400 tokens can be mapped by their texts: \d+ are no text"
    with pytest.raises(ValueError, match=f"embeddings=.*{message}.* it knows no piece; name a model for the same"):
        regularizer_on(load_causal(ModelSettings(policy)), spec)
    with pytest.raises(ValueError, match=message):
        check_other_embeddings(spec, policy)


def test_what_is_found_before_a_run(policy: str, encoder: str) -> None:
    spec = RegularizerSpec.from_settings(embeddings=encoder)
    check_other_embeddings(spec, policy)
    check_other_embeddings(RegularizerSpec.from_settings(embeddings="output"), policy)
    check_other_embeddings(RegularizerSpec.parse("rkl"), policy)
    with pytest.raises(
        ValueError, match=r"neighbours=300 exceeds the other tokens .* with embeddings\); set neighbours"
    ):
        check_other_embeddings(spec.changed(neighbours=300), policy)


def test_folders_that_are_no_models(policy: str, tmp_path: Path) -> None:
    reference = load_causal(ModelSettings(policy))

    def build() -> Any:
        return regularizer_on(reference, RegularizerSpec.from_settings(embeddings=str(tmp_path)))

    with pytest.raises(UserError, match="embeddings: .* holds no tokenizer that transformers can load"):
        build()
    word_pieces().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="embeddings: .* holds no model that transformers can load"):
        build()
    with pytest.raises(ValueError, match="the reference was loaded from nowhere; load it with from_pretrained"):
        regularizer_on(tiny.policy(), RegularizerSpec.from_settings(embeddings=str(tmp_path)))


def test_penalties_have_no_nan(policy: str, encoder: str) -> None:
    reference = load_causal(ModelSettings(policy))
    generator = torch.Generator().manual_seed(0)
    mine, theirs = torch.randn(2, 5, len(BYTES) + 3, generator=generator)
    for text in (
        "semantic",
        "paper",
        "semantic:power=2,metric=cosine",
        "semantic:transform=centre/unit,neighbours=all",
    ):
        made = regularizer_on(reference, RegularizerSpec.parse(text).changed(embeddings=encoder))
        out = made(mine, theirs, torch.arange(5))
        assert out.penalty.isfinite().all()


def test_command(policy: str, encoder: str, tmp_path: Path) -> None:
    path = tmp_path / "g"
    built = build_geometry(policy, path, "euclidean", None, "median-nn", embeddings=encoder)
    assert "cannot be mapped and have no neighbours" in built
    assert "\nwithout an embedding: " in built
    shown = show_geometry(policy, path, ["sea", "people"], encoder)
    assert shown.startswith(built.removesuffix(f"\nwritten to {path}"))
    assert "people (of " in shown
    assert shown.endswith(": has no embedding")
    with pytest.raises(ValueError, match="was made for other embeddings"):
        show_geometry(policy, path, [])
    with pytest.raises(OptionError, match="--neighbours=390 exceeds"):
        build_geometry(policy, path, "euclidean", "390", "median-nn", embeddings=encoder)
