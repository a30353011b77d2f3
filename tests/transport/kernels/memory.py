"""Memory that is handed out full of rubbish, so that a kernel which reads what nobody wrote gives itself away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def rubbish(value: float) -> Iterator[None]:
    """``torch.empty`` gives floats of this value; integers far outside of every range, and flags that are set."""
    allocate = torch.empty

    def filled(*shape: Any, **settings: Any) -> Tensor:
        out = allocate(*shape, **settings)
        if out.is_floating_point():
            return out.fill_(value)
        return out.fill_(True) if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max - 7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", filled)
        yield
