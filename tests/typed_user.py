"""A user's script, for `mypy --strict` and the installed package (`make test-package`, the row of `dev`).

Lines that are wrong have a comment that silences the error: where the package's types were lost, mypy would call the
comment unused, and fail.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import wpr
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer

embeddings: Tensor = torch.randn(50, 8)
geometry: TokenGeometry = TokenGeometry.from_embeddings(embeddings, neighbours=9, progress=False)
geometry.save(Path("geometry.safetensors"))
again: TokenGeometry = TokenGeometry.load("geometry.safetensors", embeddings)

regularizer = ReverseKL() + 4 * Wasserstein(geometry, preset="semantic", k2=16)
out = regularizer(torch.randn(3, 50), torch.randn(3, 50), torch.tensor([1, 2, 3]))
penalty: Tensor = out.penalty
named: Tensor = make_regularizer("rkl")(torch.randn(3, 50), torch.randn(3, 50), torch.tensor([1, 2, 3])).penalty
loss: Tensor = ReverseKL().loss(torch.randn(3, 50), torch.randn(3, 50))

run = wpr.load_run("runs/tiny")
run.plot.frontier().save("frontier.svg")
names: list[str] = list(run.policies)
score: float | None = run.responses("rkl")[0].measured("score")

Wasserstein(geometry, preset="semantics")  # type: ignore[call-overload,arg-type,unused-ignore]
wrong: int = geometry.scale_rule  # type: ignore[assignment]
penalty = out.scale  # type: ignore[attr-defined]
TokenGeometry.from_embeddings("embeddings")  # type: ignore[arg-type]
picture: str = run.plot.frontier()  # type: ignore[assignment]
