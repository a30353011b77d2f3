"""A real HTTP server with the endpoints of vLLM's that `ServerEngine` uses, behind them a real model; it can misbehave.

What it answers has the form of vLLM 0.32's answers, as recorded from it; `test_vllm_engines.py` runs the same client
against vLLM itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

from wpr.language_models import logits_of, pad, states_before
from wpr.ppo.generation import Sampling, TransformersGeneration
from wpr.ppo.rollout import Prompts


class VLLMServer(ThreadingHTTPServer):
    """model: what it serves until weights come. bad: names of what it does wrong.

    tokens, log_probs: what it answers in the place of those that it drew.
    dies_at: the completion at which it drops all connections, for ``down`` seconds; then it is back as it began.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, model: Any, max_length: int = 64) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.max_length = model, max_length
        self.first = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.bad: set[str] = set()
        self.tokens: Any = ...
        self.log_probs: Any = ...
        self.instance, self.loads, self.completions = 1, 0, 0
        self.dies_at, self.down, self.back = -1, 0.2, 0.0
        self.lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def die(self) -> None:
        self.dies_at, self.back = -1, time.monotonic() + self.down
        self.instance += 1
        self.model.load_state_dict(self.first)

    def load(self, folder: Path) -> None:
        weights = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
        own = self.model.state_dict()
        shapes = {name: weight.shape for name, weight in weights.items() if name in own}
        if any(shape != own[name].shape for name, shape in shapes.items()):
            raise ValueError("Call to collective_rpc method failed: Worker failed with error ''")
        self.model.load_state_dict({name: weights[name] for name in shapes}, strict=False)
        self.loads += 1

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        eos = tuple(body["stop_token_ids"])
        sampling = Sampling(
            body["temperature"], body["top_k"], body["top_p"], body["min_tokens"], body["max_tokens"], eos
        )
        prompts = Prompts(*pad([body["prompt"]], left=True))
        drawn = TransformersGeneration().generate(self.model, prompts, sampling, [body["seed"]])
        tokens = drawn.tokens[drawn.mask].tolist()
        ids = torch.tensor([body["prompt"] + tokens])
        with torch.no_grad():
            logits = logits_of(self.model, states_before(self.model, ids, torch.ones_like(ids), len(tokens))[0])
        log_probs = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
        if "short" in self.bad:
            tokens, log_probs = tokens[:2], log_probs[:2]
            tokens[-1] = 5
        if "empty" in self.bad:
            tokens, log_probs = [], []
        if "long" in self.bad:
            tokens, log_probs = tokens + tokens, log_probs + log_probs
        if "foreign" in self.bad:
            tokens[0] = 10_000
        if "nan" in self.bad:
            log_probs[-1] = None
        if "few log-probs" in self.bad:
            log_probs = log_probs[1:]
        if self.tokens is not ...:
            tokens = self.tokens
        if self.log_probs is not ...:
            log_probs = self.log_probs
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"token_logprobs": log_probs}, "finish_reason": "stop"}
        return {"choices": [] if "no choice" in self.bad else [choice]}


class Handler(BaseHTTPRequestHandler):
    server: VLLMServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, code: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def gone(self) -> bool:
        return time.monotonic() < self.server.back

    def do_GET(self) -> None:
        server, path = self.server, urlsplit(self.path).path
        if self.gone():
            return  # the connection is closed without an answer
        if path == "/health":
            self.answer(b"")
        elif path == "/server_info" and "production" not in server.bad:
            mode = "processed_logprobs" if "processed" in server.bad else "raw_logprobs"
            settings = {"max_model_len": server.max_length, "logprobs_mode": mode, "served_model_name": "tiny"}
            self.answer({"vllm_config": {"model_config": settings, "instance_id": server.instance}})
        elif path == "/server_info" and "other" in server.bad:
            self.answer(b"<html>")
        else:
            self.answer({"error": "Not Found"}, 404)

    def do_POST(self) -> None:
        server, path = self.server, urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.gone():
            return
        with server.lock:
            if path == "/collective_rpc":
                try:
                    server.load(Path(body["kwargs"]["weights_path"]))
                    self.answer({"results": [None]})
                except ValueError as error:
                    self.answer({"error": {"message": str(error)}}, 500)
            elif path == "/reset_prefix_cache":
                self.answer({"success": "busy" not in server.bad})
            elif path == "/v1/completions":
                server.completions += 1
                if server.completions == server.dies_at:
                    server.die()
                    return
                server.asked.append(body)
                self.answer(server.complete(body))


@contextmanager
def served(model: Any, **options: Any) -> Iterator[VLLMServer]:
    """Such a server, for the duration."""
    server = VLLMServer(model, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def change_weights(model: Any, scale: float) -> None:
    """In place, and behind the back of torch's count of changes."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.add_(scale * torch.randn(weight.shape, generator=generator))
