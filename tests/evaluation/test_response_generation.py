"""Responses: drawn from the right distribution, the same in any batch, gone on with after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.ppo.tiny import EOS, policy, prompts, tokenizer
from wpr.data.rows import DataError
from wpr.evaluation.response_generation import (
    EncodedPrompt,
    LoadedModel,
    SamplingParams,
    batches,
    continuation,
    generate_file,
    header_of,
    respond,
    set_aside,
    settings_differ,
)
from wpr.runs.responses import read_responses


@pytest.fixture(scope="module")
def speaker() -> LoadedModel:
    return LoadedModel(policy(), tokenizer(), "tiny", "0" * 64, (EOS,), "text")


def asked(count: int) -> list[EncodedPrompt]:
    words = tokenizer()
    return [
        EncodedPrompt(f"p{i}", row["prompt"], words(row["prompt"])["input_ids"]) for i, row in enumerate(prompts(count))
    ]


def texts(speaker: LoadedModel, given: list[EncodedPrompt], size: int, **changes: Any) -> dict[str, str]:
    drawing = SamplingParams(**({"temperature": 1.0, "max_new_tokens": 12} | changes))
    return {row.prompt_id: row.response for batch in batches(given, size) for row in respond(speaker, batch, drawing)}


def test_no_response_depends_on_its_batch(speaker: LoadedModel) -> None:
    given = asked(24)
    alone = texts(speaker, given, 1)
    assert texts(speaker, given, 5) == texts(speaker, given, 24) == alone
    assert texts(speaker, given[7:11], 2) == {one.prompt_id: alone[one.prompt_id] for one in given[7:11]}
    assert len(set(alone.values())) > 20
    other = texts(speaker, given, 24, seed=1)
    assert sum(other[name] == alone[name] for name in alone) < 4


def test_greedy_is_transformers_greedy(speaker: LoadedModel) -> None:
    given = asked(6)
    found = texts(speaker, given, 6, temperature=0.0)
    for one in given:
        ids = torch.tensor([one.input_ids])
        best = speaker.model.generate(ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids))
        assert found[one.prompt_id].strip() == speaker.tokenizer.decode(
            best[0, ids.shape[1] :], skip_special_tokens=True
        )


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.5, 0, 1.0), (1.0, 5, 1.0), (1.5, 0, 0.6)])
def test_tokens_come_with_their_probability(speaker: LoadedModel, temperature: float, top_k: int, top_p: float) -> None:
    """4,000 first tokens after one prompt; each token's share lies within five standard errors of its probability."""
    count = 4000
    given = [EncodedPrompt(f"p{i}", "w5", [5]) for i in range(count)]
    drawing = SamplingParams(temperature, top_k, top_p, 1)
    drawn = [row.response.strip() for batch in batches(given, 1000) for row in respond(speaker, batch, drawing)]
    with torch.no_grad():
        expected = (speaker.model(torch.tensor([[5]])).logits[0, -1] / temperature).softmax(-1)
    order = expected.argsort(descending=True)
    before = expected[order].cumsum(0) - expected[order]
    keep = before < top_p if top_p < 1 else torch.arange(len(order)) < (top_k or len(order))
    kept = torch.zeros_like(expected).scatter(0, order[keep], expected[order[keep]])
    kept = kept / kept.sum()
    for token, share in enumerate(kept.tolist()):
        if token in (0, 1, 2):  # special ones have no text
            continue
        word = speaker.tokenizer.convert_ids_to_tokens(token)
        error = (share * (1 - share) / count) ** 0.5
        assert abs(drawn.count(word) / count - share) <= 5 * error + 1e-9, word


def test_lengths_and_ends(speaker: LoadedModel) -> None:
    given = asked(40)
    rows = respond(speaker, given, SamplingParams(1.0, max_new_tokens=30))
    assert {row.finished for row in rows} == {True, False}
    for row in rows:
        assert row.length is not None
        specials = row.length - len(row.response.split())  # the end, and padding and beginning, which are no end
        assert specials >= int(row.finished or False)
        assert row.finished or row.length == 30


def test_each_prompt_may_have_its_own_temperature(speaker: LoadedModel) -> None:
    given = [EncodedPrompt(f"p{i}", "w5", [5], temperature=0.0 if i % 2 else 1.0) for i in range(20)]
    parts = list(batches(given, 4))
    assert all(len({one.temperature for one in part}) == 1 for part in parts)
    rows = {
        row.prompt_id: row for part in parts for row in respond(speaker, part, SamplingParams(0.3, max_new_tokens=8))
    }
    assert {row.temperature for row in rows.values()} == {0.0, 1.0}
    assert len({rows[f"p{i}"].response for i in range(1, 20, 2)}) == 1
    assert len({rows[f"p{i}"].response for i in range(0, 20, 2)}) > 5


class StopError(Exception):
    pass


def test_an_interruption_loses_one_batch_at_most(speaker: LoadedModel, tmp_path: Path) -> None:
    given, drawing = asked(20), SamplingParams(1.0, max_new_tokens=8)
    header = header_of(speaker, given, drawing)
    whole = generate_file(tmp_path / "whole.jsonl", speaker, given, drawing, header, 6, "")
    assert [row.prompt_id for row in whole.rows] == [one.prompt_id for one in given]
    path = tmp_path / "cut.jsonl"
    done: list[int] = []

    def stop(count: int) -> None:
        done.append(count)
        if sum(done) >= 8:
            raise StopError

    with pytest.raises(StopError):
        generate_file(path, speaker, given, drawing, header, 4, "", stop)
    assert not path.exists()
    again: list[int] = []
    generate_file(path, speaker, given, drawing, header, 4, "", again.append)
    assert again == [8, 4, 4, 4]
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    again.clear()
    generate_file(path, speaker, given, drawing, header, 4, "", again.append)
    assert again == [20]


def test_other_settings_are_refused_and_old_files_kept(speaker: LoadedModel, tmp_path: Path) -> None:
    given, path = asked(3), tmp_path / "x.jsonl"
    drawing, hotter = SamplingParams(0.5, max_new_tokens=4), SamplingParams(0.7, max_new_tokens=4)
    generate_file(path, speaker, given, drawing, header_of(speaker, given, drawing), 3, "")
    with pytest.raises(DataError, match=r"sampling\.temperature: 0\.5 -> 0\.7.*; do this"):
        generate_file(path, speaker, given, hotter, header_of(speaker, given, hotter), 3, "do this")
    with pytest.raises(DataError, match="prompts: 3 -> 2"):
        generate_file(path, speaker, given[:2], drawing, header_of(speaker, given[:2], drawing), 3, "")
    assert not settings_differ(path, header_of(speaker, given, drawing))
    assert settings_differ(path, header_of(speaker, given, hotter))
    old = path.read_bytes()
    assert set_aside(path) == tmp_path / "x.jsonl.old"
    generate_file(path, speaker, given, hotter, header_of(speaker, given, hotter), 3, "")
    assert set_aside(path) == tmp_path / "x.jsonl.old2"
    assert (tmp_path / "x.jsonl.old").read_bytes() == old
    assert read_responses(tmp_path / "x.jsonl.old2").rows[0].temperature == 0.7


def test_what_cannot_be_answered_is_refused(speaker: LoadedModel, tmp_path: Path) -> None:
    drawing = SamplingParams(max_new_tokens=64)
    long = [EncodedPrompt("a", "", [5]), EncodedPrompt("long", "", [5] * 70)]
    with pytest.raises(DataError, match=r"prompt long has 70 tokens.*the 128 positions of tiny"):
        generate_file(tmp_path / "x", speaker, long, drawing, {}, 1, "")
    with pytest.raises(DataError, match="no prompts"):
        generate_file(tmp_path / "x", speaker, [], drawing, {}, 1, "")
    with pytest.raises(DataError, match="two prompts have the prompt_id 'a'"):
        generate_file(
            tmp_path / "x", speaker, [EncodedPrompt("a", "", [5]), EncodedPrompt("a", "", [6])], drawing, {}, 1, ""
        )
    with pytest.raises(DataError, match="batch-size is 0"):
        generate_file(tmp_path / "x", speaker, asked(1), drawing, {}, 0, "")
    assert not any(tmp_path.iterdir())
    for changes in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}, {"seed": -1}):
        with pytest.raises(DataError, match="must be"):
            SamplingParams(**changes)  # type: ignore[arg-type]


def test_broken_weights_are_told() -> None:
    model = policy()
    model.lm_head.weight.data.fill_(float("nan"))
    broken = LoadedModel(model, tokenizer(), "tiny", "", (EOS,), "text")
    with pytest.raises(DataError, match="tiny gives no probabilities for token 0 of its response to prompt p0"):
        respond(broken, asked(2), SamplingParams(max_new_tokens=3))


def test_a_response_keeps_the_space_that_it_begins_with() -> None:
    """Tokenizers in SentencePiece's manner leave out the first space of all that they decode."""
    inner = Tokenizer(models.WordLevel({"▁a": 0, "▁": 1, "▁return": 2, "x": 3}, unk_token="x"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert words.decode([1, 1, 2]) == "  return"
    assert continuation(words, [0], [1, 1, 2]) == "   return"
    assert continuation(words, [], [2, 3]) == "returnx"
