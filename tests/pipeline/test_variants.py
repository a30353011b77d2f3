"""Ways to use a recipe: adapters, stages left out, other rewards, other data, chat templates."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.pipeline.command import SMALL, Here, manifest, results
from wpr.recipes.tiny import prepare

IDS = torch.arange(3, 40).unsqueeze(0)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model of a user's own."""
    folder = tmp_path_factory.mktemp("model")
    prepare(folder, pairs=60, hidden=16, layers=1)
    return str(folder / "model")


# Adapters.


def test_lora_in_all_stages(here: Here, tmp_path: Path) -> None:
    """What is saved is an ordinary model, equal to the one below it with the adapter that is kept beside it."""
    from peft import PeftModel

    output = tmp_path / "run"
    here.succeeds("run", "tiny", *SMALL, f"output={output}", "model.lora.r=4", "sft.learning_rate=0.05")
    below = {
        "sft": output / "prepare" / "model",
        "reward": output / "sft" / "model",
        "ppo/rkl": output / "sft" / "model",
    }
    for stage, base in below.items():
        auto = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
        options: dict[str, Any] = {"num_labels": 1} if stage == "reward" else {}
        folder = output / stage / "model"
        merged = auto.from_pretrained(folder)
        assert not any("lora" in name for name, _ in merged.named_parameters())
        start = auto.from_pretrained(base, **options)
        start.config.pad_token_id = merged.config.pad_token_id
        adapted = PeftModel.from_pretrained(start, folder / "adapter")
        with torch.no_grad():
            found, wanted = merged.eval()(IDS).logits, adapted.eval()(IDS).logits
            with adapted.disable_adapter():
                untrained = adapted(IDS).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert (found - untrained).abs().max() > 1e-5, f"{stage}: the adapter has learned nothing"
        assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None


# Stages left out.


def test_without_sft(here: Here, tmp_path: Path) -> None:
    output = tmp_path / "run"
    here.succeeds("run", "tiny", *SMALL, f"output={output}", "sft=null")
    assert list(results(output)) == ["prepare", "reward", "ppo/rkl"]
    assert manifest(output)["stages"]["reward"]["inputs"]["needs"].keys() == {"prepare"}


def test_a_function_beside_the_recipe_then_a_trained_reward_model(here: Here, tmp_path: Path) -> None:
    """The function lies where the command is run; without a reward model the critic starts from the SFT model."""
    (tmp_path / "shortness.py").write_text(
        "def shortness(prompts, responses, **columns):\n    return [-float(len(response)) for response in responses]\n"
    )
    here.monkeypatch.chdir(tmp_path)
    given = ("reward=null", "scorer.kind=function", "scorer.function=shortness:shortness")
    here.succeeds("run", "tiny", *SMALL, "output=function", *given)
    found = results(tmp_path / "function")
    assert list(found) == ["prepare", "sft", "ppo/rkl"]
    rows = [json.loads(line) for line in (tmp_path / "function/ppo/rkl/responses.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert all(row["score"] == -len(row["response"]) for row in rows)
    assert found["ppo/rkl"]["after"]["score"] == pytest.approx(sum(row["score"] for row in rows) / 6)

    here.succeeds("reward", "tiny", *SMALL, "output=function")  # a stage more, in the same folder
    named = ("reward=null", "scorer.name=function/reward/model")
    finished = here("run", "tiny", *SMALL, "output=function", *named)
    assert finished.code == 2
    assert "scorer.kind: 'function' -> 'model'" in finished.error
    here.succeeds("run", "tiny", *SMALL, "output=named", *named)
    assert list(results(tmp_path / "named")) == ["prepare", "sft", "ppo/rkl"]
    assert results(tmp_path / "named")["ppo/rkl"]["after"]["score"] != found["ppo/rkl"]["after"]["score"]


# Data.


@pytest.mark.needs("bubblewrap")
def test_programs_rewarded_by_their_tests(here: Here, model: str, tmp_path: Path) -> None:
    """APPS's format from a file, programs run in the sandbox, pass@1 by difficulty."""
    rows = []
    for number in range(60):
        tests = {"inputs": [f"{number}\n"], "outputs": [f"{number}\n"]}
        rows.append(
            {
                "problem_id": number,
                "question": f"Print the number {number}.",
                "solutions": json.dumps([f"print({number})"]),
                "input_output": json.dumps(tests),
                "difficulty": ("introductory", "interview")[number % 2],
                "starter_code": "",
            }
        )
    (tmp_path / "apps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "run"
    here.succeeds(
        "run", "tiny", *SMALL, f"output={output}", "prepare=null", f"model.name={model}", "data.format=apps",
        f"data.source={tmp_path / 'apps.jsonl'}", "reward=null", "split={sft: 0.5, reward: 0, ppo: 0.5, held_out: 0.2}",
        "scorer.kind=code", "scorer.workers=1", "ppo.max_steps=1", "ppo.batch_size=4", "evaluation.prompts=8",
    )  # fmt: skip
    after = results(output)["ppo/rkl"]["after"]
    assert {name for name in after if name.startswith("pass_at_1")} == {
        "pass_at_1_all", "pass_at_1_introductory", "pass_at_1_interview",
    }  # fmt: skip
    assert after["pass_at_1_all"] == 0  # a model of random weights
    assert -1 <= after["score"] < 1
    table = list(csv.DictReader((output / "policies.csv").open()))
    assert [row["pass_at_1_all"] for row in table] == ["0.0"]


def test_own_columns_and_a_chat_template(here: Here, model: str, tmp_path: Path) -> None:
    """The same pairs as CSV and as Parquet give the same run; prompts go through the tokenizer's template."""
    import pandas

    table = pandas.DataFrame(
        [(f"Where is boat {n}?", f"Here is boat {n}, my friend.", f"No {n}.", f"topic {n % 3}") for n in range(120)],
        columns=["question", "good", "bad", "subject"],
    )
    table.to_csv(tmp_path / "pairs.csv", index=False)
    table.to_parquet(tmp_path / "pairs.parquet")
    chat = tmp_path / "chat"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(chat)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(chat)
    found = []
    for name in ("pairs.csv", "pairs.parquet"):
        output = tmp_path / name.replace(".", "-")
        here.succeeds(
            "run", "tiny", *SMALL, f"output={output}", "prepare=null", f"model.name={chat}", "data.format=preference",
            f"data.source={tmp_path / name}", "data.columns={prompt: question, chosen: good, rejected: bad, topic: "
            "subject}",
        )  # fmt: skip
        found.append(results(output))
    assert found[0] == found[1]
    line = (output / "ppo" / "rkl" / "responses.jsonl").read_text().splitlines()[0]
    row = json.loads(line)
    assert row["columns"]["topic"].startswith("topic ")
    assert row["prompt"][0]["role"] == "user"
    assert AutoTokenizer.from_pretrained(output / "ppo" / "rkl" / "model").chat_template == TEMPLATE
