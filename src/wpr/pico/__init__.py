"""wpr-pico: a language model of 4.6 million parameters that writes short children's stories, shipped with the package.

It is an ordinary transformers folder, so that every part of the project can be tried on a real model with nothing to
download. `README.md` in this folder is its model card.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder to give to ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``."""
    folder = Path(__file__).resolve().parent
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} has no model.safetensors: this copy of wpr was installed without its model; install it again "
            f"from a wheel or from a complete checkout"
        )
    return folder
