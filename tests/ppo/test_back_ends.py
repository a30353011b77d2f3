"""The choice of a back end: what it is by default, what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo.back_ends import BACK_ENDS, BackEnd
from wpr.ppo.generation import TransformersGeneration
from wpr.ppo.graph_generation import GraphGeneration
from wpr.ppo.vllm_engines import LocalEngine, ServerEngine
from wpr.ppo.vllm_generation import VLLMGeneration

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_by_default_a_cpu_runs_transformers_and_a_gpu_graphs(tmp_path: Path) -> None:
    assert type(BackEnd().make(CPU)) is TransformersGeneration
    assert type(BackEnd().make(GPU)) is GraphGeneration
    assert type(tiny.settings(tmp_path).back_end.make(CPU)) is TransformersGeneration
    assert (BackEnd().resolve("cpu"), BackEnd().resolve("cuda")) == ("transformers", "graphs")


def test_the_named_one() -> None:
    assert type(BackEnd("graphs").make(CPU)) is GraphGeneration
    plain = BackEnd("transformers").make(GPU, synced=True)
    assert isinstance(plain, TransformersGeneration)
    assert plain.synced
    served = BackEnd("vllm", "http://localhost:8000/", vllm_folder="here").make(CPU)
    assert isinstance(served, VLLMGeneration)
    assert isinstance(served.engine, ServerEngine)
    assert (served.engine.url, served.engine.folder) == ("http://localhost:8000", "here")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation": "vlm"}, f"generation='vlm' must be one of {', '.join(BACK_ENDS)}"),
        ({"vllm_url": "http://x"}, "vllm_url='http://x' has no effect with generation='auto'"),
        ({"generation": "vllm", "vllm_url": "localhost:8000"}, "vllm_url='localhost:8000' must begin with http"),
        ({"generation": "vllm", "vllm_url": "http://"}, "vllm_url='http://' must begin with http.* and name a host"),
        ({"vllm_memory": 0.5}, "vllm_memory=0.5 has no effect with generation='auto'; set generation='vllm'"),
        ({"generation": "graphs", "vllm_folder": "x"}, "vllm_folder='x' has no effect with generation='graphs'"),
        ({"generation": "vllm", "vllm_memory": 30.0}, "vllm_memory=30.0 must be between 0 and 1"),
        ({"generation": "vllm", "vllm_max_length": 0}, "vllm_max_length=0 must be an integer of at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.settings(tmp_path, **settings)


def test_graphs_without_a_gpu_are_told(caplog: pytest.LogCaptureFixture) -> None:
    BackEnd("graphs").make(GPU)
    BackEnd().make(CPU)
    assert not caplog.records
    BackEnd("graphs").make(CPU)
    assert [one.message for one in caplog.records] == [
        "generation='graphs': cpu is no GPU, so that steps run one by one, without graphs"
    ]


def test_vllm_is_for_one_process_with_whole_weights() -> None:
    with pytest.raises(ValueError, match="one process that has whole weights; here are 2; use one, or"):
        BackEnd("vllm", "http://x").make(CPU, processes=2)
    with pytest.raises(ValueError, match="which hold parts of them"):
        BackEnd("vllm", "http://x").make(CPU, processes=2, synced=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed() -> None:
    with pytest.raises(ValueError, match="needs the package vllm in this environment.*or set vllm_url"):
        LocalEngine()


def test_one_back_end_not_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args.generation='graphs' names one; leave one out"):
        tiny.trainer(tmp_path, generation="graphs", parts={"generation": TransformersGeneration()})


def test_the_longest_sequence_is_that_of_the_settings(tmp_path: Path) -> None:
    assert tiny.settings(tmp_path, max_prompt_length=50).back_end.vllm_max_length == 58
    assert tiny.settings(tmp_path, vllm_max_length=99).back_end.vllm_max_length == 99
