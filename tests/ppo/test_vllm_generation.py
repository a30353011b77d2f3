"""vLLM's client against a server with its endpoints: weights, seeds, log-probabilities, and all that can go wrong."""

from __future__ import annotations

import copy
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from tests.ppo.vllm_server import VLLMServer, change_weights, served
from wpr.language_models import pad
from wpr.ppo.generation import EngineError, GenerationError, Sampling, TransformersGeneration, generate_in_parts
from wpr.ppo.rollout import Prompts
from wpr.ppo.vllm_engines import ServerEngine
from wpr.ppo.vllm_generation import LARGEST_SEED, VLLMGeneration

ROWS = [[5, 6, 7, 8], [9], [11, 12]]
SEEDS = [3, 2**64 - 5, 8]


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_new_tokens": 0, "max_new_tokens": 6,
                       "eos": (tiny.EOS,)} | changes)  # fmt: skip


def prompts() -> Prompts:
    return Prompts(*pad(ROWS, left=True))


@pytest.fixture
def server() -> Iterator[VLLMServer]:
    with served(tiny.policy(0)) as running:
        yield running


@pytest.fixture
def generation(server: VLLMServer, tmp_path: Path) -> VLLMGeneration:
    return VLLMGeneration(ServerEngine(server.url, tmp_path, patience=2.0), say=pytest.fail)


def test_responses_of_the_policy_s_weights(server: VLLMServer, generation: VLLMGeneration, tmp_path: Path) -> None:
    policy = tiny.policy(7)
    found = generation.generate(policy, prompts(), sampling(), SEEDS)
    own = TransformersGeneration().generate(policy, prompts(), sampling(), [seed & LARGEST_SEED for seed in SEEDS])
    assert [row[real].tolist() for row, real in zip(found.tokens, found.mask, strict=True)] == [
        row[real].tolist() for row, real in zip(own.tokens, own.mask, strict=True)
    ]
    assert found.finished.tolist() == own.finished.tolist()
    assert found.log_probs is not None
    assert bool((found.log_probs[found.mask] < 0).all())
    assert not list(tmp_path.iterdir()), "weights are left behind"
    assert {tuple(one["prompt"]): one["seed"] for one in server.asked} == {
        tuple(row): seed & LARGEST_SEED for row, seed in zip(ROWS, SEEDS, strict=True)
    }
    assert all(one["ignore_eos"] and one["return_token_ids"] and one["repetition_penalty"] == 1 for one in server.asked)


def test_weights_are_sent_when_they_changed_and_only_then(server: VLLMServer, generation: VLLMGeneration) -> None:
    policy = tiny.policy(7)
    for loads in (1, 1):
        generation.generate(policy, prompts(), sampling(), SEEDS)
        assert server.loads == loads
    change_weights(policy, 0.1)
    whole = generation.generate(policy, prompts(), sampling(), SEEDS)
    assert server.loads == 2
    parts = generate_in_parts(generation, policy, prompts(), sampling(), SEEDS, 2)
    assert server.loads == 2
    assert torch.equal(parts.tokens[parts.mask], whole.tokens[whole.mask])
    assert whole.log_probs is not None
    assert parts.log_probs is not None
    assert torch.equal(parts.log_probs[parts.mask], whole.log_probs[whole.mask])


def test_adapters_are_merged_and_the_policy_stays_as_it_is(server: VLLMServer, generation: VLLMGeneration) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    policy = peft.get_peft_model(tiny.policy(7), config)
    change_weights(policy, 0.1)
    before = copy.deepcopy(policy.state_dict())
    found = generation.generate(policy, prompts(), sampling(), SEEDS)  # compared with the policy's own, too
    merged = copy.deepcopy(policy).merge_and_unload()
    own = TransformersGeneration().generate(merged, prompts(), sampling(), [seed & LARGEST_SEED for seed in SEEDS])
    assert torch.equal(found.tokens[found.mask], own.tokens[own.mask])
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    sent = server.model.state_dict()
    assert all(torch.allclose(weight, sent[name], atol=1e-6) for name, weight in merged.state_dict().items())


def test_an_adapter_that_is_switched_off_is_another_policy(server: VLLMServer, generation: VLLMGeneration) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(tiny.policy(7), config)
    generation.generate(policy, prompts(), sampling(), SEEDS)
    with policy.disable_adapter():
        generation.generate(policy, prompts(), sampling(), SEEDS)
    assert server.loads == 2
    plain = tiny.policy(7).state_dict()
    assert all(torch.equal(weight, plain[name]) for name, weight in server.model.state_dict().items())


def test_tied_weights_are_sent_by_both_names(tmp_path: Path) -> None:
    with served(tiny.policy(0, tie_word_embeddings=True)) as server:
        generation = VLLMGeneration(ServerEngine(server.url, tmp_path), say=pytest.fail)
        generation.generate(tiny.policy(7, tie_word_embeddings=True), prompts(), sampling(), SEEDS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("production", "VLLM_SERVER_DEV_MODE=1"),
        ("processed", "--logprobs-mode raw_logprobs"),
        ("short", "2 of 6 tokens, without an end token"),
        ("empty", "0 of 6 tokens"),
        ("long", "more than 6 or beyond its end token"),
        ("foreign", "token 10000, of a vocabulary of 40"),
        ("few log-probs", "log-probabilities"),
        ("no choice", "without token_ids"),
    ],
)
def test_answers_that_are_none(bad: str, message: str, server: VLLMServer, generation: VLLMGeneration) -> None:
    server.bad.add(bad)
    with pytest.raises(EngineError, match=message):
        generation.generate(tiny.policy(7), prompts(), sampling(eos=()), SEEDS)


@pytest.mark.parametrize(
    ("tokens", "log_probs"),
    [
        (None, ...), (..., None), ("5 6 7", ...), ([5.5, 6, 7, 8, 9, 10], ...), ([True] * 6, ...), (["5"] * 6, ...),
        (..., ["-1"] * 6), (..., -1.0), ([[5]] * 6, ...),
    ],
)  # fmt: skip
def test_answers_of_other_types(tokens: Any, log_probs: Any, server: VLLMServer, generation: VLLMGeneration) -> None:
    server.tokens, server.log_probs = tokens, log_probs
    came = repr(log_probs if tokens is ... else tokens)
    with pytest.raises(EngineError, match=rf"without token_ids and their log-probabilities .*{re.escape(came)}"):
        generation.generate(tiny.policy(7), prompts(), sampling(eos=()), SEEDS)


def test_another_server_altogether(server: VLLMServer, generation: VLLMGeneration) -> None:
    server.bad |= {"production", "other"}
    with pytest.raises(EngineError, match="something else than JSON"):
        generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)


def test_probabilities_that_are_none(server: VLLMServer, generation: VLLMGeneration) -> None:
    server.bad.add("nan")
    with pytest.raises(GenerationError) as caught:
        generation.generate(tiny.policy(7), prompts(), sampling(eos=(), max_new_tokens=3), SEEDS)
    assert (caught.value.row, caught.value.position, caught.value.rows) == (0, 2, 3)


def test_prompts_longer_than_the_engine_takes(tmp_path: Path) -> None:
    with served(tiny.policy(0), max_length=9) as server:
        generation = VLLMGeneration(ServerEngine(server.url, tmp_path))
        message = "prompt 0 has 4 tokens; with max_new_tokens=6 that exceeds the 9 .*larger --max-model-len"
        with pytest.raises(EngineError, match=message):
            generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)
        assert server.completions == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "start it again with the policy's own folder"),
        ({"num_hidden_layers": 1}, "differ from the policy"),
    ],
)
def test_weights_of_another_shape(changes: dict, message: str, server: VLLMServer, generation: VLLMGeneration) -> None:
    """A worker refuses other sizes; of fewer layers it takes those that there are, which the comparison notices."""
    policy = tiny.policy(7, **changes)
    for model in (policy, server.model):
        change_weights(model, 0.5)
    with pytest.raises(EngineError, match=message):
        generation.generate(policy, prompts(), sampling(eos=(), temperature=1.0, top_k=0, top_p=1.0), SEEDS)


def test_weights_in_parts_are_refused(generation: VLLMGeneration) -> None:
    policy = tiny.policy(7)
    policy.lm_head.weight.ds_id = 0  # as ZeRO-3 marks them
    with pytest.raises(EngineError, match="held in parts.*generation='transformers'"):
        generation.generate(policy, prompts(), sampling(), SEEDS)


def test_a_server_that_dies_in_the_middle_is_waited_for(server: VLLMServer, tmp_path: Path) -> None:
    """It comes back with the weights that it began with: they are sent again, and the same responses drawn."""
    said: list[str] = []
    generation = VLLMGeneration(ServerEngine(server.url, tmp_path, patience=5.0), say=said.append)
    policy = tiny.policy(7)
    undisturbed = generation.generate(policy, prompts(), sampling(), SEEDS)
    server.dies_at = server.completions + 2
    found = generation.generate(policy, prompts(), sampling(), SEEDS)
    assert torch.equal(found.tokens[found.mask], undisturbed.tokens[undisturbed.mask])
    assert (server.loads, len(said)) == (2, 1)
    assert "does not answer" in said[0]
    assert "3 responses are drawn again" in said[0]
    server.die()  # between two rollouts
    server.back = 0.0
    generation.generate(policy, prompts(), sampling(), SEEDS)
    assert (server.loads, len(said)) == (3, 1)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    generation = VLLMGeneration(ServerEngine(f"http://127.0.0.1:{port}", tmp_path), say=pytest.fail)
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{port} does not answer .*; start it first .*, or correct vllm_url"):
        generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)
    assert time.monotonic() - start < 5


def test_a_server_that_does_not_come_back(server: VLLMServer, tmp_path: Path) -> None:
    generation = VLLMGeneration(ServerEngine(server.url, tmp_path, patience=0.1), say=lambda text: None)
    generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)
    server.down = 60.0
    server.die()
    with pytest.raises(EngineError, match=re.escape("did not come back within 0.1 s")):
        generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)


def test_a_server_that_takes_calls_and_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = ServerEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", patience=0.3)
        start = time.monotonic()
        with pytest.raises(EngineError, match=re.escape("did not come back within 0.3 s")):
            engine.restart()
        assert time.monotonic() - start < 3


def test_a_server_that_others_use(server: VLLMServer, tmp_path: Path) -> None:
    server.bad.add("busy")
    generation = VLLMGeneration(ServerEngine(server.url, tmp_path), say=lambda text: None)
    with pytest.raises(EngineError, match="keeps keys and values of earlier weights"):
        generation.generate(tiny.policy(7), prompts(), sampling(), SEEDS)


def test_ppo_logs_the_mismatch_and_the_time_of_sending(server: VLLMServer, tmp_path: Path) -> None:
    settings = {"generation": "vllm", "vllm_url": server.url, "max_prompt_length": 8, "max_steps": 2}
    trainer = tiny.trainer(tmp_path, vllm_folder=str(tmp_path), **settings)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert server.loads == 2
    for row in steps:
        assert row["generation_mismatch"] < 1e-5
        assert row["generation_mismatch_max"] < 1e-4
        assert row["generation_mismatch_ratio"] == pytest.approx(1, abs=1e-5)
        assert 0 < row["seconds_weight_sync"] < row["seconds_generation"]
        assert row["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_no_mismatch_is_logged_of_other_distributions(server: VLLMServer, tmp_path: Path) -> None:
    settings = {"generation": "vllm", "vllm_url": server.url, "logprob_temperature": 0.7, "max_steps": 1}
    trainer = tiny.trainer(tmp_path, max_prompt_length=8, **settings)
    trainer.train()
    assert not any("mismatch" in name for row in trainer.state.log_history for name in row)


def test_ppo_stops_with_its_checkpoints_whole(server: VLLMServer, tmp_path: Path) -> None:
    from wpr.ppo import TrainingFault

    settings = {"generation": "vllm", "vllm_url": server.url, "max_prompt_length": 8, "max_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = tiny.trainer(tmp_path, **settings, **saving)
    trainer.collector.generation.engine.patience = 0.1  # type: ignore[attr-defined]
    server.dies_at, server.down = 12, 60.0
    with pytest.raises(TrainingFault, match="step 1: .*did not come back.*are as they were"):
        trainer.train()
    server.back = 0.0
    resumed = tiny.trainer(tmp_path, **settings, **saving)
    resumed.train(resume_from_checkpoint=True)
    whole = tiny.trainer(tmp_path / "whole", **settings)
    whole.train()
    scores = [[row["score"] for row in one.state.log_history if "score" in row] for one in (resumed, whole)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
