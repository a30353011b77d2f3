"""vLLM itself, within this process and as a server of its own: `make test-vllm`, some minutes on two cores.

The model is wpr-pico, in float32. Each engine is asked for the same, and says what it measured.
"""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo.vllm_server import change_weights
from wpr import pico
from wpr.language_models import logits_of, pad, states_before
from wpr.ppo.back_ends import BackEnd
from wpr.ppo.generation import EngineError, Sampling
from wpr.ppo.rollout import Prompts, Responses, join
from wpr.ppo.vllm_engines import LocalEngine, ServerEngine
from wpr.ppo.vllm_generation import VLLMGeneration

pytestmark = pytest.mark.needs("vllm")

PICO = Path(pico.__file__).parent
ROWS = [[5, 6, 7, 8], [9, 10], [300, 301, 302, 303, 304, 305, 306]]
SEEDS = [3, 2**64 - 5, 8]
STOP = 16
MAX_LENGTH = 128


class Clock:
    """Seconds by subject, all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, subject: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(subject, []).append(time.perf_counter() - start)


class Server:
    """vLLM's server in a process of its own, which can be killed and started again at the same address."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(PICO), "--port",
                   str(self.port), "--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--generation-config",
                   "vllm", "--enforce-eager", "--gpu-memory-utilization", "0.06"]  # fmt: skip
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "TRITON_INTERPRET": "0"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # with its engine and workers
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("vllm") / "log")
    try:
        ServerEngine(running.url, patience=300).restart()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def local() -> Iterator[VLLMGeneration]:
    generation = VLLMGeneration(LocalEngine(0.15, MAX_LENGTH), say=pytest.fail, stopwatch=Clock())
    yield generation
    generation.close()


@pytest.fixture(scope="module", params=["local", "server"])
def generation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VLLMGeneration:
    if request.param == "local":
        return request.getfixturevalue("local")
    url = request.getfixturevalue("server").url
    return VLLMGeneration(ServerEngine(url, tmp_path_factory.mktemp("weights")), say=pytest.fail, stopwatch=Clock())


@pytest.fixture
def policy() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32).eval()


def sampling(**changes: Any) -> Sampling:
    return Sampling(**{"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_new_tokens": 0, "max_new_tokens": 24,
                       "eos": (STOP,)} | changes)  # fmt: skip


def prompts(rows: list[list[int]] = ROWS) -> Prompts:
    return Prompts(*pad(rows, left=True))


def difference(policy: Any, given: Prompts, found: Responses) -> torch.Tensor:
    """vLLM's log-probabilities minus the policy's."""
    ids, mask = join(given, found)
    with torch.no_grad():
        logits = logits_of(policy, states_before(policy, ids, mask, found.mask.shape[1])[found.mask])
    own = logits.log_softmax(-1).gather(-1, found.tokens[found.mask].unsqueeze(-1)).squeeze(-1)
    assert found.log_probs is not None
    return found.log_probs[found.mask] - own


def tokens(found: Responses) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(found.tokens, found.mask, strict=True)]


def test_log_probs_follow_the_weights(generation: VLLMGeneration, policy: Any, capsys: pytest.CaptureFixture) -> None:
    """Also where tokens are drawn from a truncated distribution: they are of the model's own."""
    many = prompts(ROWS * 6)
    found = generation.generate(policy, many, sampling(), range(18))
    before = difference(policy, many, found).abs()
    change_weights(policy, 0.02)
    changed = generation.generate(policy, many, sampling(), range(18))
    after = difference(policy, many, changed).abs()
    for off in (before, after):
        assert float(off.max()) < 1e-3
    assert tokens(found) != tokens(changed)
    seconds = generation.stopwatch.seconds["weight_sync"]  # type: ignore[attr-defined]
    with capsys.disabled():
        print(
            f"\n{generation.engine.name}: log-probabilities of {len(before)} and {len(after)} tokens are off by "
            f"{float(before.mean()):.1e} and {float(after.mean()):.1e} on average, {float(before.max()):.1e} and "
            f"{float(after.max()):.1e} at most; weights sent in {', '.join(f'{one * 1e3:.0f} ms' for one in seconds)}"
        )


def test_a_seed_is_a_response(generation: VLLMGeneration, policy: Any) -> None:
    found = generation.generate(policy, prompts(), sampling(), SEEDS)
    loads = len(generation.stopwatch.seconds["weight_sync"])  # type: ignore[attr-defined]
    again = generation.generate(policy, prompts(ROWS[::-1]), sampling(), SEEDS[::-1])
    assert tokens(again) == tokens(found)[::-1]
    assert tokens(generation.generate(policy, prompts(), sampling(), [4, 5, 6])) != tokens(found)
    assert len(generation.stopwatch.seconds["weight_sync"]) == loads  # type: ignore[attr-defined]


def test_ends_and_lengths(generation: VLLMGeneration, policy: Any) -> None:
    common = (STOP, 14, 201, 269, 223, 4)  # frequent tokens
    for row, done in zip(
        tokens(found := generation.generate(policy, prompts(), sampling(eos=common, min_new_tokens=5), SEEDS)),
        found.finished.tolist(), strict=True,
    ):  # fmt: skip
        assert len(row) > 5 or not done
        assert not set(row[:-1]) & set(common)
    never = generation.generate(policy, prompts(), sampling(eos=(), max_new_tokens=40), SEEDS)
    assert [len(row) for row in tokens(never)] == [40] * 3
    assert not never.finished.any()


@pytest.mark.parametrize("changes", [{"top_k": 5, "top_p": 1.0}, {"top_k": 0, "top_p": 0.6}, {"temperature": 1.3}])
def test_tokens_are_drawn_from_the_policy_s_distribution(
    generation: VLLMGeneration, policy: Any, changes: dict[str, Any]
) -> None:
    """One token 3,000 times, beside the chances that our own back ends draw it by."""
    from wpr.ppo.generation import warpers

    count, wanted = 3000, sampling(max_new_tokens=1, eos=(), **changes)
    found = generation.generate(policy, prompts([ROWS[0]] * count), wanted, range(count))
    with torch.no_grad():
        scores = policy(torch.tensor([ROWS[0]])).logits[:, -1]
    for warp in warpers(wanted):
        scores = warp(None, scores)
    chances = scores.softmax(-1)[0]
    drawn = torch.bincount(found.tokens[:, 0], minlength=len(chances)) / count
    assert not bool((drawn[chances == 0] > 0).any())
    distance = float((drawn - chances).abs().sum()) / 2
    support = int((chances > 0).sum())
    assert distance < 0.6 * (support / count) ** 0.5 + 0.01  # of a sample: about 0.4 sqrt(support / count) at most


def test_bad_input(generation: VLLMGeneration, policy: Any) -> None:
    with pytest.raises(EngineError, match=f"exceeds the {MAX_LENGTH} of"):
        generation.generate(policy, prompts([[5] * 120]), sampling(), [1])
    fewer = copy.deepcopy(policy.config)
    fewer.num_hidden_layers -= 2
    other = type(policy)(fewer).eval()
    if isinstance(generation.engine, ServerEngine):
        with pytest.raises(EngineError, match="differ from the policy's"):
            generation.generate(other, prompts(), sampling(), SEEDS)
    else:  # starts again, with that architecture
        found = generation.generate(other, prompts(), sampling(), SEEDS)
        assert float(difference(other, prompts(), found).abs().max()) < 1e-3
    found = generation.generate(policy, prompts(), sampling(), SEEDS)
    assert float(difference(policy, prompts(), found).abs().max()) < 1e-3


def test_adapters(generation: VLLMGeneration, policy: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear"))
    change_weights(adapted, 0.02)
    found = generation.generate(adapted, prompts(), sampling(), SEEDS)
    assert float(difference(adapted, prompts(), found).abs().max()) < 1e-3


def test_a_local_engine_that_dies(local: VLLMGeneration, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(local, "say", said.append)
    before = tokens(local.generate(policy, prompts(), sampling(), SEEDS))
    executor = local.engine.llm.llm_engine.engine_core.engine_core.model_executor  # type: ignore[attr-defined]
    executor.driver_worker.worker.model_runner.model = None  # what it calls next fails
    del executor
    assert tokens(local.generate(policy, prompts(), sampling(), SEEDS)) == before
    assert len(said) == 1
    assert "3 responses are drawn again" in said[0]


def test_weights_that_a_server_refuses(server: Server, policy: Any) -> None:
    generation = VLLMGeneration(ServerEngine(server.url))
    wide = copy.deepcopy(policy.config)
    wide.hidden_size *= 2
    with pytest.raises(EngineError, match="start it again with the policy's own folder"):
        generation.generate(type(policy)(wide).eval(), prompts(), sampling(), SEEDS)
    server.kill()  # vLLM 0.32 has half of them and refuses the next ones, too
    server.start()
    ServerEngine(server.url, patience=300).restart()


def test_a_server_that_is_killed_in_a_rollout(server: Server, policy: Any, tmp_path: Path) -> None:
    said: list[str] = []
    generation = VLLMGeneration(ServerEngine(server.url, tmp_path, patience=300), say=said.append)
    change_weights(policy, 0.01)
    many, long = prompts(ROWS * 10), sampling(eos=(), max_new_tokens=100)
    before = tokens(generation.generate(policy, many, long, range(30)))

    def kill() -> None:
        time.sleep(0.3)
        server.kill()
        server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    found = generation.generate(policy, many, long, range(30))
    killer.join()
    assert len(said) == 1
    assert float(difference(policy, many, found).abs().max()) < 1e-3
    assert tokens(found) == before


@pytest.mark.parametrize("mode", ["local", "server"])
def test_ppo(mode: str, request: pytest.FixtureRequest, policy: Any, tmp_path: Path) -> None:
    """Trains, evaluates, saves and resumes."""
    from transformers import AutoTokenizer

    from wpr.ppo import PPOConfig, PPOTrainer

    request.getfixturevalue("local").close()  # two engines do not fit
    url = request.getfixturevalue("server").url if mode == "server" else None

    def trainer(steps: int) -> Any:
        args = PPOConfig(
            str(tmp_path), generation="vllm", vllm_url=url, vllm_memory=0.15, max_prompt_length=32, max_new_tokens=16,
            per_device_train_batch_size=8, max_steps=steps, share_backbone=True, use_cpu=True, report_to="none",
            learning_rate=1e-4, save_steps=1, log_completions=0,
        )  # fmt: skip
        rows = [{"prompt": "Once upon a time"}, {"prompt": "The dog"}] * 16
        return PPOTrainer(
            copy.deepcopy(policy), args, reward=lambda prompts, responses, **_: [float(len(one)) for one in responses],
            regularizer="reverse-kl", train_dataset=rows, eval_dataset=rows[:4],
            processing_class=AutoTokenizer.from_pretrained(PICO),
        )  # fmt: skip

    first = trainer(2)
    first.train()
    first.collector.generation.close()
    second = trainer(3)
    second.train(resume_from_checkpoint=True)
    second.evaluate()
    second.collector.generation.close()
    logs = [row for row in second.state.log_history if "generation_mismatch" in row]
    assert len(logs) == 3
    for row in logs:
        assert row["generation_mismatch_max"] < 1e-3
        assert abs(row["generation_mismatch_ratio"] - 1) < 1e-4
        assert 0 < row["seconds_weight_sync"] < row["seconds_generation"]
    assert not torch.equal(second.actor_critic.policy.lm_head.weight, policy.lm_head.weight)


def test_wpr_generate(server: Server, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt": "The dog"}\n')
    command = [sys.executable, "-m", "wpr", "generate", "-m", f"pico={PICO}", "--prompts", "prompts.jsonl", "-o",
               "answers", "--max-new-tokens", "16", "--device", "cpu", "--generation"]  # fmt: skip
    environment = os.environ | {"COLUMNS": "200"}
    run = subprocess.run(
        [*command, "vllm", "--vllm-url", server.url], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    made = (tmp_path / "answers" / "pico-t0.5.jsonl").read_text()
    assert '"generation": "vllm"' in made
    other = subprocess.run([*command, "auto"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert other.returncode != 0
    assert "generation" in other.stderr


def test_the_choice_of_a_back_end() -> None:
    made = BackEnd("vllm", vllm_memory=0.15).make(torch.device("cpu"))
    assert isinstance(made, VLLMGeneration)
    assert isinstance(made.engine, LocalEngine)
