"""What several tests of analyses share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from wpr import pico


@pytest.fixture(scope="module")
def model() -> Any:
    """wpr-pico."""
    return AutoModelForCausalLM.from_pretrained(pico.path(), dtype=torch.float32).eval()
