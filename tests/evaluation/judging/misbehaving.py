"""A chat server that does what a test tells it to, over real sockets, and remembers what it was asked.

with ChatServer(lambda request: reply("A")) as server:
    server.address, server.requests
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["_Handler"], None]


@dataclass(frozen=True)
class Request:
    """What came: the body, its headers, a fingerprint of its messages, and how often these came (1, 2, ...)."""

    body: dict[str, Any]
    headers: dict[str, str]
    key: str
    times: int

    @property
    def text(self) -> str:
        """The last message."""
        return str(self.body["messages"][-1]["content"])


def fingerprint(messages: Any) -> str:
    return hashlib.sha256(json.dumps([dict(one) for one in messages], sort_keys=True).encode()).hexdigest()


def completion(text: str | None, **more: Any) -> bytes:
    """A chat completion with this text."""
    message = {"role": "assistant", "content": text}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "test",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
    }
    return json.dumps(body | more).encode()


def raw(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    def act(handler: _Handler) -> None:
        handler.send_response(status)
        for name, value in ({"content-type": "application/json"} | (headers or {})).items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return act


def reply(text: str | None, **more: Any) -> Behaviour:
    return raw(completion(text, **more))


def error(status: int, message: str = "no", headers: dict[str, str] | None = None, **more: Any) -> Behaviour:
    return raw(json.dumps({"error": {"message": message, **more}}).encode(), status, headers)


def plain(answer: bytes) -> Behaviour:
    """These bytes, whatever they are, and the end of the connection."""

    def act(handler: _Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(answer)

    return act


def cut_before_answering(handler: _Handler) -> None:
    """Close the connection instead of an answer."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_in_the_middle(handler: _Handler) -> None:
    """Half of the body that was announced, then the end."""
    body = completion("A")
    handler.send_response(200)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def endless(handler: _Handler) -> None:
    """A body without end: the test is over when the client hangs up."""
    handler.close_connection = True
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" " * 65536)


def slow(until: threading.Event, then: Behaviour) -> Behaviour:
    """Nothing until the event, which the server sets when it closes."""

    def act(handler: _Handler) -> None:
        until.wait(60)
        with contextlib.suppress(OSError):
            then(handler)

    return act


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: ChatServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that a test cut are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.owner.handle(self, body)


class ChatServer:
    """Runs in a thread. requests: all that came, in their order. answered: fingerprints by how often they were answered
    with success.
    """

    def __init__(self, behave: Callable[[Request], Behaviour]) -> None:
        self.behave = behave
        self.requests: list[Request] = []
        self.under_way = self.most_under_way = 0
        self.closing = threading.Event()
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def handle(self, handler: _Handler, body: dict[str, Any]) -> None:
        key = fingerprint(body["messages"])
        with self._lock:
            self._times[key] += 1
            headers = {name.lower(): value for name, value in handler.headers.items()}
            request = Request(body, headers, key, self._times[key])
            self.requests.append(request)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            self.behave(request)(handler)
        finally:
            with self._lock:
                self.under_way -= 1

    @property
    def times(self) -> Counter[str]:
        """How often each request came."""
        with self._lock:
            return Counter(self._times)

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def chat_server(behave: Callable[[Request], Behaviour]) -> Iterator[ChatServer]:
    with ChatServer(behave) as server:
        yield server
