"""Transport problems and small embeddings for the tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def distribution(rng: np.random.Generator, n: int, spread: float = 1.5) -> np.ndarray:
    """A random distribution on n points whose logits have standard deviation ``spread``."""
    weights = np.exp(spread * rng.standard_normal(n))
    return weights / weights.sum()


def points_cost(rng: np.random.Generator, n: int, dimension: int = 3) -> np.ndarray:
    """Euclidean distances between random points, largest 1: a positive kernel."""
    points = rng.standard_normal((n, dimension))
    cost = np.linalg.norm(points[:, None] - points, axis=-1)
    return cost / cost.max()


def with_gaps(rng: np.random.Generator, cost: np.ndarray, share: float) -> np.ndarray:
    """The cost with a share of its pairs made infinite, symmetrically."""
    apart = np.triu(rng.random(cost.shape) < share, 1)
    return np.where(apart | apart.T, np.inf, cost)


def batch(*arrays: np.ndarray, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Each array as a batch of one problem; add a leading axis for several."""
    return [torch.as_tensor(array, dtype=dtype).unsqueeze(0) for array in arrays]


def log(array: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(array)


def clustered_embeddings(
    words: int = 20, per_word: int = 3, size: int = 16, spread: float = 0.15, seed: int = 0
) -> Tensor:
    """Embeddings with near synonyms: ``words`` far centres, each with ``per_word`` tokens close around it, in
    consecutive ids.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(words, 1, size, generator=generator)
    return (centres + spread * torch.randn(words, per_word, size, generator=generator)).reshape(-1, size)
