"""Inputs of `benchmarks.kernels`, and how its work is timed.

Inputs are random, but shaped like a language model's: tokens come in 256 groups of neighbours and with frequencies by
Zipf's law; a position prefers the tokens of four groups, its own or (`Case.shared`) those of all, so that the supports
have about as many edges as SmolLM2's.
Radii come from a sample of the vocabulary.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wpr import TokenGeometry
from wpr.regularizers.wasserstein_settings import TRANSFORMS
from wpr.transport.distances import EUCLIDEAN
from wpr.transport.transforms import fit

Work = Callable[[], object]
GROUPS = 256


@dataclass(frozen=True)
class Case:
    """The sizes of one measurement; the defaults are the paper's micro-batch."""

    positions: int = 2048
    vocabulary: int = 256_000
    hidden: int = 2048
    neighbours: int = 512
    k2: int = 128
    iterations: int = 10
    """Of the paper's penalty; the semantic one runs until it has converged to 1e-4."""
    shared: bool = False
    """Whether all positions prefer the same four groups, so that their supports have fewer tokens together."""


@dataclass(frozen=True)
class Result:
    """Milliseconds (median, fastest, slowest) and megabytes of one variant."""

    median: float
    fastest: float
    slowest: float
    megabytes: float


class Bench:
    """Inputs of a case, and how its work is timed."""

    def __init__(self, case: Case, device: torch.device, repeats: int) -> None:
        self.case, self.device, self.repeats = case, device, repeats
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

        self.policy = torch.empty(case.positions, case.vocabulary, dtype=torch.bfloat16, device=device)
        self.reference = torch.empty_like(self.policy)
        self.groups = torch.randint(GROUPS, (case.vocabulary,), generator=generator, device=device)
        rarity = torch.randperm(case.vocabulary, generator=generator, device=device) + 1.0
        weights = 1 / (torch.arange(GROUPS, device=device) + 1.0)
        for start in range(0, case.positions, 256):  # no float32 copy of everything
            rows = slice(start, min(start + 256, case.positions))
            count = rows.stop - rows.start
            liked = torch.multinomial(weights.expand(count, GROUPS), 4, generator=generator)
            if case.shared:
                liked = torch.arange(4, device=device).expand(count, 4)
            boost = torch.zeros(count, GROUPS, device=device).scatter_(1, liked, 8.0)
            logits = 2.5 * random(count, case.vocabulary) - 1.2 * rarity.log() + boost[:, self.groups]
            self.reference[rows] = logits.to(torch.bfloat16)
            self.policy[rows] = (logits + 0.5 * random(*logits.shape)).to(torch.bfloat16)
        self.tokens = self.policy.argmax(-1)
        self.tokens[::3] = self.reference[::3].topk(2).indices[:, 1]
        centres = random(GROUPS, case.hidden)
        self.embeddings = torch.empty(case.vocabulary, case.hidden, dtype=torch.bfloat16, device=device)
        for rows in torch.arange(case.vocabulary, device=device).split(1 << 14):
            self.embeddings[rows] = (centres[self.groups[rows]] + 0.7 * random(len(rows), case.hidden)).bfloat16()
        self.geometry = sampled_geometry(self.embeddings, case.neighbours)
        transform = fit(TRANSFORMS["semantic"], self.embeddings)
        centred = sampled_geometry(transform(self.embeddings), case.neighbours)
        self.centred = replace(centred, transform=transform)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.policy, self.reference, self.tokens

    def measure(self, works: dict[str, Work], fewer: int = 1 << 30) -> dict[str, Result]:
        """Times of all, taking turns; of what runs through torch as many as ``fewer``."""
        times: dict[str, list[float]] = {name: [] for name in works}
        memory: dict[str, float] = {}
        for name, work in works.items():
            for _ in range(2 if self.device.type == "cuda" else 0):
                work()
            memory[name] = self.peak(work)
        for turn in range(self.repeats):
            for name, work in works.items():
                if turn < fewer or "torch" not in name:
                    times[name].append(self._time(work))
        return {name: Result(statistics.median(x), min(x), max(x), memory[name]) for name, x in times.items()}

    def _time(self, work: Work) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop))

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self, work: Work) -> float:
        if self.device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6


def sampled_geometry(embeddings: Tensor, neighbours: int) -> TokenGeometry:
    """A geometry whose radii are estimated from costs to a sample of the vocabulary: seconds instead of minutes."""
    vocabulary = len(embeddings)
    sample = embeddings[torch.linspace(0, vocabulary - 1, min(vocabulary, 8192), device=embeddings.device).long()]
    rank = max(2, round(len(sample) * neighbours / vocabulary))  # the token itself may be in the sample
    parts = []
    for rows in embeddings.split(8192):
        cost = torch.cdist(rows.float(), sample.float())
        parts.append(cost.kthvalue(min(rank, len(sample)), dim=-1).values)
    radius = torch.cat(parts)
    alive = torch.ones_like(radius, dtype=torch.bool)
    return TokenGeometry(embeddings, EUCLIDEAN, neighbours, radius, radius, alive, float(radius.median()), "given")


@contextmanager
def path(kernels: bool) -> Iterator[None]:
    """Everything within runs through the kernels, or through torch."""
    before = os.environ.get("WPR_KERNELS")
    os.environ["WPR_KERNELS"] = "1" if kernels else "0"
    try:
        yield
    finally:
        os.environ.pop("WPR_KERNELS")
        if before is not None:
            os.environ["WPR_KERNELS"] = before


def on(kernels: bool, work: Work) -> Work:
    def run() -> object:
        with path(kernels):
            return work()

    return run
