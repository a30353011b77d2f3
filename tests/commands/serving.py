"""`transformers serve` in a process of its own: a real OpenAI-compatible server on this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.pipeline.command import environment


@contextlib.contextmanager
def transformers_server(model: Path) -> Iterator[str]:
    """The base URL of a server for this model, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", str(model), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with (model / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(process, port, model / "server.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)  # not there yet
