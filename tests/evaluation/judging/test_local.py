"""Judges in this process: a function, a reward model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.tokenizers_made_here import plain
from tests.ppo import tiny
from wpr.data import DataSettings, Encoder, Row
from wpr.evaluation.judging.answer_cache import AnswerCache
from wpr.evaluation.judging.asking import ask_all, pending
from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.local import FunctionJudge, RewardModelJudge
from wpr.evaluation.judging.pairwise import pair_up, questions_for
from wpr.evaluation.judging.questions import JudgingError, Question
from wpr.rewards import Completions, RewardModel
from wpr.runs.responses import Response, ResponseFile


def asked(count: int) -> list[Question]:
    """Comparisons of a longer with a shorter response."""
    rows = [Response(f"p{i}", f"prompt {i}", "long answer " * (i + 2)) for i in range(count)]
    other = [Response(row.prompt_id, row.prompt, "short") for row in rows]
    pairing = pair_up(ResponseFile(Path("a"), {}, tuple(rows)), ResponseFile(Path("b"), {}, tuple(other)))
    return list(questions_for(pairing, ComparisonPlan(None), None).values())


def imported(path: Path, text: str) -> Any:
    """A module of this text."""
    path.write_text(text)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


LONGER = (
    "def longer(prompt, response_a, response_b):\n"
    "    calls.append(prompt)\n"
    "    return 'A' if len(response_a) > len(response_b) else 'B'\n"
    "calls = []\n"
)


def test_a_function_is_called_once_a_comparison_and_anew_when_its_file_changes(tmp_path: Path) -> None:
    module = imported(tmp_path / "mine.py", LONGER)
    judge = FunctionJudge(module.longer, "mine:longer")
    questions = asked(8)
    first = ask_all(judge, questions, tmp_path / "a.jsonl")
    assert judge.name == "longer"
    assert first.count("read") == 8
    for question in questions:
        expected = "A" if question.fields["response_a"] != "short" else "B"
        assert first.answers[question.id].value == expected
    ask_all(judge, questions, tmp_path / "a.jsonl")
    assert len(module.calls) == 8
    # Of another length: a file of the same, written within the same second, is read from its compiled form.
    changed = imported(tmp_path / "mine.py", LONGER.replace(">", "<") + "# changed\n")
    other = FunctionJudge(changed.longer, "mine:longer")
    assert len(pending(other, questions, tmp_path / "a.jsonl")) == 8
    second = ask_all(other, questions, tmp_path / "a.jsonl")
    assert all(second.answers[name].value != answer.value for name, answer in first.answers.items())


@pytest.mark.parametrize("given", [None, "C", 1.5, ["A"]])
def test_what_a_function_returns_otherwise_is_counted(given: Any, tmp_path: Path) -> None:
    found = ask_all(FunctionJudge(lambda **fields: given, "mine:odd"), asked(2), tmp_path / "a.jsonl")
    assert found.count("unreadable") == 2


def test_a_function_that_fails_stops_and_keeps_what_was_there(tmp_path: Path) -> None:
    def fails(prompt: str, response_a: str, response_b: str) -> str:
        if prompt == "prompt 3":
            raise KeyError("weights")
        return "A"

    questions = asked(6)
    with pytest.raises(JudgingError, match="the judge mine:fails raised KeyError: 'weights' .*comparison 0/p3/"):
        ask_all(FunctionJudge(fails, "mine:fails"), questions, tmp_path / "a.jsonl")
    before = next(i for i, question in enumerate(questions) if question.fields["prompt"] == "prompt 3")
    assert len(AnswerCache.look(tmp_path / "a.jsonl")) == before


def test_a_function_gets_the_prompt_as_the_file_has_it(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    seen = []

    def judge(prompt: Any, response_a: str, response_b: str) -> str:
        seen.append(prompt)
        return "E"

    files = [ResponseFile(Path(name), {}, (Response("p", chat, name),)) for name in "ab"]
    questions = list(questions_for(pair_up(*files), ComparisonPlan(None), None).values())
    ask_all(FunctionJudge(judge, "m:judge"), questions, tmp_path / "a.jsonl")
    assert seen == [chat]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small reward model's folder."""
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = plain()
    model = tiny.critic(0, vocab_size=len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_prefers_the_higher_score(reward_model: Path, tmp_path: Path) -> None:
    judge = RewardModelJudge(str(reward_model), batch_size=3)
    questions = asked(7)
    found = ask_all(judge, questions, tmp_path / "a.jsonl")
    for question in questions:
        fields = question.fields
        pair = [(fields["prompt"], fields["response_a"]), (fields["prompt"], fields["response_b"])]
        alone = RewardModelJudge(str(reward_model), batch_size=1)
        alone._score(pair)
        one, other = alone._scores.values()
        assert found.answers[question.id].value == ("A" if one > other else "B")
        assert "scores" in found.answers[question.id].replies[0].text
    again = ask_all(RewardModelJudge(str(reward_model)), questions, tmp_path / "a.jsonl")
    assert again.accounts.requests == 0


def test_a_reward_model_reads_the_end_token_as_in_training(reward_model: Path) -> None:
    """It was trained on the score at that token; at the one before it the score may be anything."""
    judge = RewardModelJudge(str(reward_model))
    judge._score([("a prompt", " and a response"), ("a prompt", " short")])
    encoder = Encoder(plain(), DataSettings("prompts", template="text"))
    model = RewardModel.from_pretrained(str(reward_model))
    for (_, response), score in judge._scores.items():
        start, (completion,) = encoder.encode(Row("a prompt"), [response])
        assert completion[-1] == encoder.end_id
        ids = torch.tensor([[*start, *completion]])
        last = torch.tensor([ids.shape[1] - 1])
        alone = model(Completions(["a prompt"], [response], ids, torch.ones_like(ids), last))
        assert score == pytest.approx(float(alone), abs=1e-5)


def test_a_reward_model_without_a_chat_template_reads_a_transcript(reward_model: Path) -> None:
    judge = RewardModelJudge(str(reward_model))
    judge._score([([{"role": "user", "content": "hello"}], "hi"), ("\n\nHuman: hello\n\nAssistant:", "hi")])
    one, other = judge._scores.values()
    assert one == pytest.approx(other, abs=1e-5)


def test_equal_responses_are_a_tie_for_a_reward_model(reward_model: Path, tmp_path: Path) -> None:
    rows = tuple(Response(f"p{i}", f"prompt {i}", "the same " * i) for i in range(1, 9))
    files = [ResponseFile(Path(name), {}, rows) for name in "ab"]
    questions = list(questions_for(pair_up(*files), ComparisonPlan(None, both_orders=True), None).values())
    found = ask_all(RewardModelJudge(str(reward_model)), questions, tmp_path / "a.jsonl")
    assert {answer.value for answer in found.answers.values()} == {"E"}


def test_another_model_in_the_same_folder_is_another_judge(reward_model: Path) -> None:
    before = RewardModelJudge(str(reward_model)).identity
    assert RewardModelJudge(str(reward_model)).identity == before
    weights = reward_model / "model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-4] + b"\x00\x00\x80\x3f")
        assert RewardModelJudge(str(reward_model)).identity != before
    finally:
        weights.write_bytes(content)


def test_a_folder_without_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(JudgingError, match="cannot be loaded as a reward model"):
        RewardModelJudge(str(tmp_path))
