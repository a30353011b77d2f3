"""Rows of tokens for each stage, fed to TRL's trainers and to PPO's collator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.data.tokenizers_made_here import CHATML, opening, plain
from wpr.data import DataError, DataSettings, Encoder, LengthReport, Row, ppo_rows, reward_rows, sft_rows

ROWS = [
    Row("POST: the sea\n\nTL;DR:", "cold sea", "hot", {"level": 1}, "f:1"),
    Row("POST: the capital of France\n\nTL;DR:", "Paris", "The sea, and France", {"level": 2}, "f:2"),
    Row("POST: the sea\n\nTL;DR:", "the sea was cold", "cold", {"level": 3}, "f:3"),
    Row("POST: a day\n\nTL;DR:", "a day", "today", {"level": 4}, "f:4", demonstrated="a day at the sea"),
]


def encoder(tokenizer: Any = None, **settings: Any) -> Encoder:
    return Encoder(tokenizer or plain(), DataSettings("tldr", **settings))


def test_sft_rows() -> None:
    made = encoder()
    rows, report = sft_rows(ROWS, made)
    assert (report.rows, report.kept) == (4, 4)
    texts = [made.tokenizer.decode(row["input_ids"]) for row in rows]
    assert texts[0] == "POST: the sea\n\nTL;DR: cold sea<eos>"
    assert texts[3] == "POST: a day\n\nTL;DR: a day at the sea<eos>"
    for row in rows:
        learnt = [token for token, mask in zip(row["input_ids"], row["completion_mask"], strict=True) if mask]
        assert learnt == [label for label in row["labels"] if label != -100]
        assert made.tokenizer.decode(learnt).startswith(" ")
        assert learnt[-1] == made.end_id


def test_a_repeated_demonstration_is_learnt_once() -> None:
    again = [Row(row.prompt, "other", "another", demonstrated=row.chosen) for row in ROWS]
    _, report = sft_rows([*ROWS, *again], encoder())
    assert (report.kept, report.repeated) == (5, 3)


def test_every_demonstration_of_a_row_is_learnt() -> None:
    made = encoder()
    rows, report = sft_rows([Row("POST: x\n\nTL;DR:", "a", more=("b", "a", "c"))], made)
    assert [made.tokenizer.decode(row["input_ids"]).rpartition(":")[2] for row in rows] == [
        " a<eos>",
        " b<eos>",
        " c<eos>",
    ]
    assert (report.rows, report.kept, report.repeated) == (4, 3, 1)


def test_prompts_may_be_repeated_for_ppo() -> None:
    rows, report = ppo_rows(ROWS, encoder(), repeats=True)
    assert [row["level"] for row in rows] == [1, 2, 3, 4]
    assert (report.kept, report.repeated) == (4, 0)
    assert [row["level"] for row in ppo_rows(ROWS, encoder())[0]] == [1, 2, 4]


def test_reward_rows() -> None:
    made = encoder()
    tie = Row("POST: x\n\nTL;DR:", "same", "same ")
    rows, report = reward_rows([*ROWS, Row("prompt only"), tie, Row("a", "b", "b")], made)
    assert (report.rows, report.kept, report.no_completion, report.ties) == (7, 5, 1, 1)
    assert made.tokenizer.decode(rows[0]["chosen_ids"]) == "POST: the sea\n\nTL;DR: cold sea<eos>"
    assert made.tokenizer.decode(rows[0]["rejected_ids"]) == "POST: the sea\n\nTL;DR: hot<eos>"


def test_ppo_rows_and_their_collator() -> None:
    from wpr.ppo.prompts import PromptCollator

    made = encoder(plain(CHATML))
    rows, report = ppo_rows(ROWS, made)
    assert (report.rows, report.kept, report.repeated, report.completion_tokens) == (4, 3, 1, {})
    assert [row["level"] for row in rows] == [1, 2, 4]
    batch = PromptCollator(made.tokenizer, 512)(rows)
    assert batch["prompts"] == [[{"role": "user", "content": row.prompt}] for row in (ROWS[0], ROWS[1], ROWS[3])]
    assert batch["columns"] == {"level": [1, 2, 4]}
    assert [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ] == [row["input_ids"] for row in rows]


def numbered(prompt_words: int, completion_words: int) -> Row:
    return Row(" ".join(["the sea"] * prompt_words), " ".join(["cold"] * completion_words), "no")


def test_long_rows_are_dropped_and_reported() -> None:
    rows = [numbered(2, 2), numbered(40, 2), numbered(2, 40), numbered(40, 40), numbered(1, 1)]
    made = encoder(max_prompt_tokens=40, max_completion_tokens=20)
    kept, report = sft_rows(rows, made)
    lengths = sorted(len(made.prompt(row)) for row in rows)
    assert (report.rows, report.kept, report.long_prompts, report.long_completions) == (5, 2, 2, 2)
    assert report.prompt_tokens == {"50": lengths[2], "90": lengths[4], "99": lengths[4], "max": lengths[4]}
    assert [made.tokenizer.decode(row["input_ids"]) for row in kept] == [
        "the sea the sea cold cold<eos>",
        "the sea cold<eos>",
    ]
    assert report.as_dict()["long_prompts"] == 2
    assert len(ppo_rows(rows, made)[0]) == 2  # two prompts that fit, each of them once


def test_the_limit_itself_is_not_too_long() -> None:
    free = encoder()
    row = numbered(5, 5)
    exact = encoder(
        max_prompt_tokens=len(free.prompt(row)), max_completion_tokens=len(free.completion(row, str(row.chosen)))
    )
    assert sft_rows([row], exact)[1] == LengthReport(
        1, 1, 0, 0, *(dict.fromkeys(("50", "90", "99", "max"), n) for n in
              (exact.settings.max_prompt_tokens, exact.settings.max_completion_tokens))
    )  # fmt: skip
    less = encoder(max_completion_tokens=exact.settings.max_completion_tokens - 1, too_long="truncate")
    cut = sft_rows([row], less)[0][0]
    assert cut["labels"][-1] != less.end_id
    assert less.tokenizer.decode(cut["input_ids"]) == "the sea the sea the sea the sea the sea cold cold cold cold cold"


def test_truncation_keeps_the_end_of_a_prompt_and_its_first_token() -> None:
    made = encoder(opening(), max_prompt_tokens=10, too_long="truncate")
    prompt, rest = made.prompt(numbered(40, 1)), made.completion(numbered(40, 1), "cold")
    cut = sft_rows([numbered(40, 1)], made)[0][0]["input_ids"]
    assert cut == [prompt[0], *prompt[-9:], *rest]
    assert ppo_rows([numbered(40, 1)], made)[0][0]["input_ids"] == [prompt[0], *prompt[-9:]]
    bare = encoder(max_prompt_tokens=10, too_long="truncate")
    assert ppo_rows([numbered(40, 1)], bare)[0][0]["input_ids"] == bare.prompt(numbered(40, 1))[-10:]


def test_a_completion_that_spells_out_the_end() -> None:
    """The tokenizer reads the characters of the end token as the token."""
    made = encoder()
    _, report = sft_rows([Row("a", "one <eos> two"), Row("b", "one")], made)
    assert (report.kept, report.end_inside) == (1, 1)


def test_nothing_left_is_refused() -> None:
    with pytest.raises(
        DataError, match="none of the 4 rows is left: 4 prompts are longer than data.max_prompt_tokens=2"
    ):
        sft_rows(ROWS, encoder(max_prompt_tokens=2))
    with pytest.raises(DataError, match="none of the 1 rows has a chosen and a rejected completion"):
        reward_rows([Row("a", "b")], encoder())
    assert sft_rows([], encoder()) == ([], LengthReport(0, 0))


def tiny(kind: Any, tokenizer: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=2, eos_token_id=1, **changes,
    )  # fmt: skip
    return kind(config)


@pytest.mark.parametrize("completion_only_loss", [None, True])
def test_sft_trainer_learns_completions_only(tmp_path: Path, completion_only_loss: bool | None) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    made = encoder()
    rows, _ = sft_rows(ROWS, made)
    model = tiny(LlamaForCausalLM, made.tokenizer)
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=4, max_steps=1, max_length=None, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", completion_only_loss=completion_only_loss, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=made.tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    seen = sorted(
        (ids[mask.bool()].tolist(), labels[mask.bool()].tolist())
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    )
    assert seen == sorted((row["input_ids"], row["labels"]) for row in rows)
    assert (batch["labels"][~batch["attention_mask"].bool()] == -100).all()
    assert all(
        row["labels"][: row["completion_mask"].index(1)] == [-100] * row["completion_mask"].index(1) for row in rows
    )
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, model.lm_head.weight)


@pytest.mark.parametrize(("pad", "at_the_end"), [("own", True), ("end", False)])
def test_reward_trainer_scores_the_end_token(tmp_path: Path, pad: str, at_the_end: bool) -> None:
    """With a padding token of its own the score is the one at the end token; with a shared one, that before it."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    tokenizer = plain(CHATML, pad="<|im_end|>")  # as many instruction-tuned models come
    made = encoder(tokenizer)
    if pad == "own":
        tokenizer.pad_token_id = made.padding_id
    rows, _ = reward_rows(ROWS, made)
    model = tiny(LlamaForSequenceClassification, tokenizer, num_labels=1)
    args = RewardConfig(
        str(tmp_path), per_device_train_batch_size=2, max_steps=1, max_length=None, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    lengths = batch["attention_mask"].sum(-1)
    assert len(set(lengths.tolist())) > 1
    assert all(ids[length - 1] == made.end_id for ids, length in zip(batch["input_ids"], lengths, strict=True))
    model.eval()
    with torch.no_grad():
        trained = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        states = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        at_end = model.score(states[torch.arange(len(lengths)), lengths - 1])
    assert torch.allclose(trained, at_end, atol=1e-6) == at_the_end
    before = model.score.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, model.score.weight)
