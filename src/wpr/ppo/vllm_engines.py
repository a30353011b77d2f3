"""vLLM in two places: within this process, or as a server. What both do: take weights, and draw with a seed a request.

Read from vLLM 0.32: `reload_weights` of its workers, from tensors or from a folder of safetensors files; and of its
server `/server_info`, `/collective_rpc` and `/reset_prefix_cache`, which it has with ``VLLM_SERVER_DEV_MODE=1`` only,
and `/v1/completions`, which takes and gives token ids.
"""

from __future__ import annotations

import gc
import http.client
import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from wpr.language_models import plain_model
from wpr.ppo.generation import EngineError, Sampling

RAW = "raw_logprobs"
"""vLLM's log-probabilities of the model's own distribution: at temperature 1, whatever tokens are drawn from."""
SHARD = 2**31
"""Bytes of weights that are copied to the host and written at a time."""
REQUESTS = 256
"""Requests that a server is sent at a time."""
SOON = 10.0
"""Seconds within which a server says that it is there, and what it runs."""


class EngineStoppedError(EngineError):
    """The engine does not answer any more; started again, it may."""


@dataclass(frozen=True)
class Drawn:
    """A response, and the log-probabilities that vLLM has for its tokens at temperature 1."""

    tokens: Sequence[int]
    log_probs: Sequence[float | None]


class Engine(Protocol):
    """Where vLLM runs. name: for messages. longer: how it is made to take longer sequences."""

    name: str
    longer: str
    max_length: int

    def connect(self, model: Any, kind: torch.dtype) -> bool:
        """Be ready for this model in this precision; whether that is a new start, without any weights of ours."""
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, and forget what was computed with others."""
        ...

    def draw(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Drawn]:
        """One response to each prompt."""
        ...

    def restart(self) -> None:
        """Start again after a stop, or wait until somebody has."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


def request(sampling: Sampling, seed: int) -> dict[str, Any]:
    """vLLM's settings of one response. All that decides its distribution is said: defaults may be the model's own."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.eos),
        "ignore_eos": True,  # of the tokens that vLLM knows: ours are named above
        "logprobs": 0,  # of the drawn token alone
    }


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """vLLM seeds a process's generators when it starts, and draws from them; here they go on as if it had not."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def check_installed() -> None:
    """Refuse vLLM within this process where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "generation='vllm' needs the package vllm in this environment (docs/generation-back-ends.md); install "
            "it, or set vllm_url to a server that has it"
        )


class LocalEngine:
    """vLLM within this process, on the policy's device: weights are handed over as they lie in memory.

    memory: share of the device's memory for vLLM's weights and cache. max_length: of a sequence; None: what the model
    has positions for.
    """

    longer = "raise vllm_max_length"

    def __init__(self, memory: float = 0.3, max_length: int | None = None) -> None:
        check_installed()
        self.name, self.memory, self.wanted, self.max_length = "the vLLM engine", memory, max_length, 0
        self.llm: Any = None
        self._model: tuple[Any, ...] = ()

    @_random_numbers_kept()
    def connect(self, model: Any, kind: torch.dtype) -> bool:
        config = plain_model(model).config
        names = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        wanted = ({name: value for name, value in config.to_dict().items() if name not in names}, kind)
        if self.llm is not None and wanted == self._model:
            return False
        self.close()
        self._start(config, kind, plain_model(model).device)
        self._model = wanted
        return True

    def _start(self, config: Any, kind: torch.dtype, device: torch.device) -> None:
        # Read when vLLM is imported. In a process of its own its engine could not read our tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            try:
                from vllm import LLM

                self.llm = LLM(
                    model=folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
                    dtype=str(kind).removeprefix("torch."), max_model_len=self.wanted, logprobs_mode=RAW,
                    gpu_memory_utilization=self.memory, enforce_eager=device.type == "cpu", disable_log_stats=True,
                )  # fmt: skip
            except Exception as error:
                raise EngineError(
                    f"vLLM does not start with {self.memory:.0%} of the memory of {device} (vllm_memory): {error}"
                ) from error
        self.max_length = self.llm.llm_engine.model_config.max_model_len

    @_random_numbers_kept()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        except Exception as error:
            self.close()  # half of its weights are others
            raise EngineError(f"vLLM refuses the policy's weights: {type(error).__name__}: {error}") from error
        if not self.llm.reset_prefix_cache():
            raise EngineStoppedError("vLLM keeps keys and values of earlier weights")

    @_random_numbers_kept()
    def draw(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Drawn]:
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [SamplingParams(**request(sampling, seed), detokenize=False) for seed in seeds]
        try:
            found = self.llm.generate(asked, params, use_tqdm=False)
        except Exception as error:
            raise EngineStoppedError(f"{type(error).__name__}: {error}") from error
        outputs = [one.outputs[0] for one in found]
        return [
            Drawn(
                list(one.token_ids),
                [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)],
            )
            for one in outputs
        ]

    def restart(self) -> None:
        self.close()

    def close(self) -> None:
        if self.llm is None:
            return
        with suppress(Exception):  # of an engine that is broken
            self.llm.llm_engine.engine_core.shutdown()
        self.llm, self._model = None, ()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ServerEngine:
    """vLLM's server with its development endpoints. Weights go through files in a folder that it reads, too.

    url: as ``http://localhost:8000``. folder: for the weights; None: the system's for temporary files.
    patience: seconds that a server that stopped may take to come back; one that never answered is not waited for.
    timeout: seconds that one answer may take.
    """

    longer = "start the server with a larger --max-model-len"

    def __init__(
        self, url: str, folder: str | Path | None = None, patience: float = 120.0, timeout: float = 1800.0
    ) -> None:
        self.url, self.folder, self.patience, self.timeout = url.rstrip("/"), folder, patience, timeout
        self.name, self.max_length, self.served = f"the vLLM server at {self.url}", 0, ""
        self._instance: str | None = None

    def connect(self, model: Any, kind: torch.dtype) -> bool:
        try:
            info = self._ask("/server_info?config_format=json", timeout=SOON)
        except EngineStoppedError as error:
            if self._instance is not None:
                raise
            # One that never was there is not waited for: the address may be wrong.
            raise EngineError(f"{error}; start it first (docs/generation-back-ends.md), or correct vllm_url") from None
        try:
            config = info["vllm_config"]
            settings, instance = config["model_config"], str(config["instance_id"])
            self.max_length, mode = int(settings["max_model_len"]), settings["logprobs_mode"]
            served = settings["served_model_name"] or settings["model"]
            self.served = served if isinstance(served, str) else str(served[0])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"{self.name} does not say what it runs, as vLLM 0.32 does: {error!r}") from None
        if mode != RAW:
            raise EngineError(
                f"{self.name} gives log-probabilities as {mode}, not of the model's own distribution; start it with "
                f"--logprobs-mode {RAW}"
            )
        new, self._instance = instance != self._instance, instance
        return new

    def load(self, weights: Mapping[str, Tensor]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="wpr-weights-", dir=self.folder))
        try:
            for number, part in enumerate(_shards(weights)):
                save_file(part, folder / f"model-{number:05}.safetensors")
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            try:
                self._ask("/collective_rpc", call)
            except EngineStoppedError:
                raise
            except EngineError as error:
                raise EngineError(
                    f"{error}. It serves {self.served} and may have taken half of the weights: start it again with the "
                    f"policy's own folder; and it must be able to read {folder.parent} (vllm_folder)"
                ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        answer = self._ask("/reset_prefix_cache", {})
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineStoppedError(f"{self.name} keeps keys and values of earlier weights; is it used by others?")

    def draw(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Drawn]:
        with ThreadPoolExecutor(min(len(prompts), REQUESTS)) as threads:
            asked = [
                threads.submit(self._complete, prompt, request(sampling, seed))
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            try:
                return [one.result() for one in asked]
            except EngineError:
                threads.shutdown(cancel_futures=True)
                raise

    def _complete(self, prompt: Sequence[int], settings: Mapping[str, Any]) -> Drawn:
        body = {"model": self.served, "prompt": list(prompt), "return_token_ids": True, **settings}
        answer = self._ask("/v1/completions", body)
        try:
            (choice,) = answer["choices"]
            tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if not _all_of(tokens, int) or not _all_of(log_probs, int | float | None):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise EngineError(
                f"{self.name} answers without token_ids and their log-probabilities ({str(answer)[:200]}); wpr needs "
                "vLLM 0.32 or later"
            ) from None
        return Drawn(tokens, log_probs)

    def restart(self) -> None:
        end = time.monotonic() + self.patience
        while True:
            try:
                self._ask("/health", timeout=max(0.1, min(SOON, end - time.monotonic())))
                return
            except EngineError as error:
                if time.monotonic() >= end:
                    raise EngineStoppedError(
                        f"{self.name} did not come back within {self.patience:g} s ({error}); start it, and resume"
                    ) from None
                time.sleep(min(1.0, self.patience / 10))

    def close(self) -> None:
        pass

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON of an answer; None if it is empty. timeout: seconds, if not the engine's own."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout if timeout is None else timeout) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            raise self._refusal(path.partition("?")[0], error.code, said) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineStoppedError(
                f"{self.name} does not answer ({getattr(error, 'reason', None) or error!r})"
            ) from None
        except ValueError:
            raise EngineError(f"{self.name} answers {path} with something else than JSON; is it vLLM's?") from None

    def _refusal(self, path: str, code: int, said: str) -> EngineError:
        if code == 404 and path in ("/server_info", "/collective_rpc", "/reset_prefix_cache"):
            return EngineError(
                f"{self.name} has no {path}, which takes weights and says what it runs; start vLLM 0.32 or later with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        # Its engine is dead, or about to be: it says so by a 500, and ends.
        stopped = code >= 500 and path != "/collective_rpc"
        return (EngineStoppedError if stopped else EngineError)(f"{self.name} answers {path} with {code}: {said}")


def _all_of(values: Any, kind: Any) -> bool:
    """Whether this is a list of such values. JSON's true and false are integers in Python, and no tokens."""
    return isinstance(values, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The weights on the host, in parts of about `SHARD` bytes."""
    part: dict[str, Tensor] = {}
    for name, weight in weights.items():
        part[name] = weight.detach().to("cpu", copy=True).contiguous()  # tied weights are written twice
        if sum(one.nbytes for one in part.values()) >= SHARD:
            yield part
            part = {}
    if part:
        yield part
