"""BERTScore against loops, and encoders: special tokens left out, batches without effect, long texts cut and told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from tests.ppo import tiny
from wpr import pico
from wpr.analysis.bert_score import bert_score
from wpr.evaluation.encoders import ContextualEncoder


def unit(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, 6, generator=generator), dim=-1)


def test_against_loops() -> None:
    x, y = unit(4, 0), unit(7, 1)
    precision = sum(max(float(a @ b) for b in y) for a in x) / 4
    recall = sum(max(float(a @ b) for a in x) for b in y) / 7
    found = bert_score(x, y)
    assert found is not None
    assert found.precision == pytest.approx(precision, abs=1e-6)
    assert found.recall == pytest.approx(recall, abs=1e-6)
    assert found.f1 == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-6)
    turned = bert_score(y, x)
    assert turned is not None
    assert (turned.precision, turned.recall) == pytest.approx((found.recall, found.precision))


def test_a_text_is_like_itself_and_nothing_is_like_nothing() -> None:
    x = unit(5, 2)
    found = bert_score(x, x[torch.randperm(5, generator=torch.Generator().manual_seed(0))])
    assert found is not None
    assert found.f1 == pytest.approx(1, abs=1e-6)
    assert bert_score(x, x[:0]) is None
    assert bert_score(x[:0], x) is None


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """A real encoder's folder; its tokenizer puts special tokens around a text, as encoders' do."""
    from tokenizers.processors import TemplateProcessing

    torch.manual_seed(0)
    made = tiny.tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    )
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    BertModel(BertConfig(vocab_size=tiny.TOKENS, max_position_embeddings=8, **size)).save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    return str(tmp_path)


def test_special_tokens_take_no_part(bert: str) -> None:
    vectors, cut = ContextualEncoder.from_pretrained(bert).embed(["w3 w4 w5", "w3"])
    assert [len(one) for one in vectors] == [3, 1]
    assert cut == 0
    assert torch.allclose(vectors[0].norm(dim=-1), torch.ones(3), atol=1e-5)


def test_batches_change_nothing(bert: str) -> None:
    encoder = ContextualEncoder.from_pretrained(bert)
    texts = ["w3 w4 w5 w6", "w7", "w8 w9", "", "w10 w11 w12"]
    for one, other in zip(encoder.embed(texts, batch_size=1)[0], encoder.embed(texts, batch_size=5)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(encoder.embed(texts)[0][3]) == 0


def test_long_texts_are_cut_and_counted(bert: str) -> None:
    vectors, cut = ContextualEncoder.from_pretrained(bert).embed(["w3 " * 20, "w3 " * 6, "w3 " * 7])
    assert [len(one) for one in vectors] == [6, 6, 6]
    assert cut == 2


def test_layers(bert: str) -> None:
    texts = ["w3 w4"]
    last, first = (ContextualEncoder.from_pretrained(bert, layer).embed(texts)[0][0] for layer in (-1, 0))
    assert not torch.allclose(last, first)
    torch.testing.assert_close(last, ContextualEncoder.from_pretrained(bert, 2).embed(texts)[0][0])
    with pytest.raises(ValueError, match=r"layer 3 is outside -3\.\.2"):
        ContextualEncoder.from_pretrained(bert, 3)


def test_a_causal_model_serves_too() -> None:
    encoder = ContextualEncoder.from_pretrained(str(pico.path()))
    same, other, far = encoder.embed(["The dog was happy.", "The dog was glad.", "Seven blue engines"])[0]
    near, unrelated = bert_score(same, other), bert_score(same, far)
    assert near is not None
    assert unrelated is not None
    assert near.f1 > unrelated.f1


def test_what_is_no_encoder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be loaded .* AutoModel"):
        ContextualEncoder.from_pretrained(str(tmp_path))
