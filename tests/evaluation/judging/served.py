"""`transformers serve` in a process of its own, and small models for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import wpr.pico

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@contextlib.contextmanager
def serving(log: Path) -> Iterator[str]:
    """The address of a server that loads models by their folders as they are asked for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def story_model(folder: Path) -> Path:
    """wpr-pico, with a chat template: a real model, which tells stories and knows nothing of letters."""
    folder.mkdir()
    for path in Path(wpr.pico.path()).iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def model_that_says(word: str, folder: Path) -> Path:
    """A model whose next token is always ``word``, whatever came before."""
    tokenizer = AutoTokenizer.from_pretrained(wpr.pico.path())
    tokenizer.chat_template = TEMPLATE
    (token,) = tokenizer(word, add_special_tokens=False)["input_ids"]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=1024, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()  # the last state is the bias, at every position
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
