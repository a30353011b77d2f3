"""What is done to scores before they are learned from, and their running mean and variance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class RunningMoments:
    """Mean and variance of a stream of batches, by the pairwise update of Chan et al., in float64.

    With n, m, S the count, mean and sum of squared deviations of what was seen, and n', m', S' of a new batch:

        m <- m + (m' - m) n' / (n + n'),        S <- S + S' + (m' - m)^2 n n' / (n + n')
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of what was seen; 1 before there are two different values."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return float((self.squares / self.count) ** 0.5)

    def update(self, values: Tensor, reduce: Callable[[Tensor], Tensor] = lambda total: total) -> None:
        """Take in values ``(B,)``; ``reduce`` sums a tensor over all processes."""
        values = values.double()
        count, total = reduce(torch.stack([values.new_tensor(len(values)), values.sum()])).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(reduce((values - mean).square().sum()))
        shift, seen = mean - self.mean, self.count + count
        self.squares += squares + shift**2 * self.count * count / seen
        self.mean += shift * count / seen
        self.count = seen

    def normalise(self, values: Tensor) -> Tensor:
        """``(values - mean) / deviation``."""
        return ((values.double() - self.mean) / max(self.deviation, 1e-8)).to(values.dtype)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class ScoreShaping:
    """Scores as they are placed on responses: end-of-sequence penalty, normalisation, clip, in this order.

    missing_eos_penalty: subtracted where a response did not end by itself. normalize: by the running moments.
    clip: scores are held within plus and minus this. None leaves the first or the last out.
    """

    def __init__(self, missing_eos_penalty: float | None, normalize: bool, clip: float | None) -> None:
        self.missing_eos_penalty, self.normalize, self.clip = missing_eos_penalty, normalize, clip
        self.moments = RunningMoments()

    @property
    def scale(self) -> float:
        """What the part of a score that stands on tokens is multiplied by, once scores were shaped. What else shaping
        does is done to a whole response: its last token gets it.
        """
        return 1 / max(self.moments.deviation, 1e-8) if self.normalize else 1.0

    def __call__(self, scores: Tensor, finished: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Of scores ``(B,)`` of responses that are ``finished`` ``(B,)``; the same object where nothing is to be done.
        reduce: sums a tensor over all processes.
        """
        if self.missing_eos_penalty is not None:
            scores = scores - self.missing_eos_penalty * (~finished).float()
        if self.normalize:
            self.moments.update(scores[~scores.isnan()], reduce)  # NaN: a response that was not scored
            scores = self.moments.normalise(scores)
        if self.clip is not None:
            scores = scores.clamp(-self.clip, self.clip)
        return scores
