"""`wpr pass-at-1` as users meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.evaluation.humaneval_like import write
from tests.pipeline.command import Here
from wpr.evaluation.response_file import Response
from wpr.findings import load

ANSWERS = {"Made/0": "    return sum(numbers)\n", "Made/1": "    return 5 * x\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes that knows nothing: what it writes is no program."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}
    inner = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters) + 2, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answer_with(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> list[int]:
    """Let the model's batches say these texts: no model of a test's size writes programs. The rest is as it is."""
    calls: list[int] = []

    def respond(speaker: Any, batch: Any, drawing: Any) -> list[Response]:
        calls.append(len(batch))
        return [Response(one.prompt_id, one.prompt, texts[one.prompt_id], 0.0, 9, True) for one in batch]

    monkeypatch.setattr("wpr.evaluation.generation.respond", respond)
    return calls


def test_from_a_model_to_a_table(here: Here, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = write(tmp_path)
    calls = answer_with(monkeypatch, ANSWERS)
    command = ["pass-at-1", "-m", f"m={model}", "--problems", str(problems), "-o", str(tmp_path / "out")]
    command += ["--max-new-tokens", "16", "--seconds", "20"]
    here.succeeds(*command)
    finding = load(tmp_path / "out")
    row = dict(zip(finding.columns, finding.rows[0], strict=True))
    assert (row["model"], row["difficulty"], row["problems"], row["pass_at_1"]) == ("m", "humaneval", 2, 0.5)
    assert [row[kind] for kind in ("passed", "wrong", "error", "timeout", "syntax")] == [1, 1, 0, 0, 0]
    assert finding.settings["isolated"] is True
    outcomes = [json.loads(line) for line in (tmp_path / "out/outcomes/m-t0.jsonl").read_text().splitlines()][1:]
    assert [one["kind"] for one in outcomes] == ["passed", "wrong"]
    here.succeeds(*command)
    assert calls == [2]
    finished = here(*command, "--seconds", "19")
    assert finished.code == 2
    assert "limits.wall_seconds: 20.0 -> 19.0" in finished.error
    here.succeeds(*command, "--seconds", "19", "--restart")
    assert calls == [2]


def test_a_model_that_knows_nothing(here: Here, model: Path, tmp_path: Path) -> None:
    """With the model's own responses, greedy."""
    out = tmp_path / "out"
    problems = write(tmp_path)
    here.succeeds("pass-at-1", "-m", str(model), "--problems", str(problems), "-o", str(out), "--max-new-tokens", "12")
    row = dict(zip(load(out).columns, load(out).rows[0], strict=True))
    assert row["pass_at_1"] == 0
    assert row["problems"] == sum(int(row[kind] or 0) for kind in ("wrong", "error", "timeout", "syntax")) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-m", "x"], "--model needs --problems"),
        (["-m", "x", "--problems", "y", "-o", "z", "--style", "frob"], "--style frob"),
        (["RUN"], "data.format hh, which has no tests to run"),
        (["-m", "MODEL", "--problems", "missing.jsonl", "-o", "z"], "missing.jsonl cannot be read"),
        (["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--style", "chat"], "no chat template"),
        (["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--workers", "0"], "workers=0"),
        (["-m", "MODEL", "--problems", "PROBLEMS", "-o", "z", "--seconds", "0"], "more than 0 seconds"),
    ],
)
def test_mistakes(here: Here, whole_run: Path, model: Path, tmp_path: Path, arguments: list[str], told: str) -> None:
    places = {"RUN": whole_run, "MODEL": model, "PROBLEMS": write(tmp_path), "z": tmp_path / "z"}
    finished = here("pass-at-1", *(str(places.get(one, one)) for one in arguments))
    assert finished.code in (1, 2)
    assert told in finished.error
    assert not (tmp_path / "z").exists()
