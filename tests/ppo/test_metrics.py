"""Means over time and processes, and clocks."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from wpr.ppo.metrics import Metrics, Stopwatch, peak_memory_gb

CPU = torch.device("cpu")


def test_means_weigh_every_value_the_same() -> None:
    metrics = Metrics()
    metrics.add("kl", torch.tensor([1.0, 2.0, 3.0]))
    metrics.add("kl", torch.tensor([10.0]))
    metrics.add("clip", 3.0, count=12)
    metrics.add("beta", 0.5)
    metrics.add("nothing", torch.zeros(0))
    assert metrics.drain(lambda table: table, CPU) == {"kl": 4.0, "clip": 0.25, "beta": 0.5}
    assert metrics.drain(lambda table: table, CPU) == {}


def test_means_over_processes_are_means_of_everything() -> None:
    one, other = Metrics(), Metrics()
    one.add("score", torch.tensor([1.0]))
    other.add("score", torch.tensor([2.0, 3.0]))
    tables: list[torch.Tensor] = []
    other.drain(lambda table: tables.append(table) or table, CPU)
    assert one.drain(lambda table: table + tables[0], CPU) == {"score": 2.0}


def test_a_name_that_only_one_process_has() -> None:
    """A process whose responses are all empty has no solver to report of."""
    one, other = Metrics(), Metrics()
    one.add("solver_iterations", torch.tensor([4.0, 6.0]))
    one.add("score", 1.0)
    other.add("score", 3.0)
    agree = lambda names: ["score", "solver_iterations"]  # noqa: E731
    tables: list[torch.Tensor] = []
    other.drain(lambda table: tables.append(table) or table, CPU, agree)
    assert one.drain(lambda table: table + tables[0], CPU, agree) == {"score": 2.0, "solver_iterations": 5.0}


def test_state_survives() -> None:
    metrics, again = Metrics(), Metrics()
    metrics.add("score", torch.tensor([1.0, 4.0]))
    again.load_state_dict(metrics.state_dict())
    metrics.add("score", 9.0)
    assert again.drain(lambda table: table, CPU) == {"score": 2.5}


def test_stopwatch_adds_up_also_through_errors() -> None:
    clock = Stopwatch(CPU)
    for _ in range(2):
        with suppress(KeyError), clock("penalty"):
            time.sleep(0.01)
            raise KeyError
    assert 0.02 <= clock.drain()["penalty"] < 1
    assert clock.drain() == {}


def test_peak_memory_grows() -> None:
    before = peak_memory_gb(CPU)
    block = torch.ones(60_000_000)
    assert peak_memory_gb(CPU) >= before
    assert peak_memory_gb(CPU) > 0.2
    del block
