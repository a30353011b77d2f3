"""What recipes need: the known models against their architectures, memory and disk against sums done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, PretrainedConfig, Qwen2Config

from tests.pipeline.command import SMALL
from tests.ppo import tiny
from wpr.config.recipe_file import load_recipe
from wpr.pipeline.estimates import (
    KNOWN,
    ModelSize,
    StageEstimate,
    _count,
    disk_needed,
    downloads,
    estimate,
    estimate_generation,
    model_size,
)
from wpr.pipeline.run import plan
from wpr.ppo.generation import Sampling
from wpr.ppo.graph_generation import GraphGeneration
from wpr.ppo.rollout import Prompts

# As the models' own configurations have it.
GEMMA = {"vocab_size": 256_000, "head_dim": 256, "tie_word_embeddings": True}
GEMMA_7B = GemmaConfig(hidden_size=3072, intermediate_size=24_576, num_hidden_layers=28, num_attention_heads=16,
                       num_key_value_heads=16, **GEMMA)  # fmt: skip
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "google/gemma-2b": GemmaConfig(hidden_size=2048, intermediate_size=16_384, num_hidden_layers=18,
                                   num_attention_heads=8, num_key_value_heads=1, **GEMMA),
    "google/gemma-7b": GEMMA_7B,
    "google/codegemma-7b": GEMMA_7B,
    "google/codegemma-7b-it": GEMMA_7B,
    "Qwen/Qwen1.5-1.8B-Chat": Qwen2Config(vocab_size=151_936, hidden_size=2048, intermediate_size=5504,
                                          num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
                                          tie_word_embeddings=False),
}  # fmt: skip
SIZE = ModelSize(1000, 50, 8, 3, 4, "made up")
BASE = ["data.max_prompt_tokens=20", "data.max_completion_tokens=10"]


@pytest.fixture(autouse=True)
def nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_are_what_they_are(name: str) -> None:
    config, size = ARCHITECTURES[name], KNOWN[name]
    assert size.parameters == _count(config)
    assert (size.vocabulary, size.hidden, size.layers) == (
        config.vocab_size, config.hidden_size, config.num_hidden_layers,
    )  # fmt: skip
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert size.key_value_width == config.num_key_value_heads * width


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_of_a_folder(tied: bool, tmp_path: Path) -> None:
    model = tiny.policy(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = model_size(str(tmp_path))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert found == ModelSize(count, tiny.TOKENS, 32, 2, 16, "configuration")


def test_models_that_are_not_there(tmp_path: Path) -> None:
    assert model_size("google/gemma-2b") == KNOWN["google/gemma-2b"]
    for name in ("nobody/nothing", "{prepare}/model", str(tmp_path), str(tmp_path / "gone")):
        assert model_size(name) is None


def needed(stage: str, *changes: str, bf16: bool = False) -> StageEstimate:
    recipe = load_recipe("tiny", [*BASE, *changes])
    return estimate(next(part for part in plan(recipe) if part.name == stage), SIZE, bf16)


def test_sft_by_hand() -> None:
    found = needed("sft", "sft.per_device_train_batch_size=2", "sft.batch_size=8", "sft.save_total_limit=3")
    # 2 sequences of 30 tokens: inner states of 3 layers of 8, 28 * 4 bytes each; logits of 50, three times in float32.
    assert found.states == 16 * 1000
    assert found.activations == 28 * 4 * 60 * 8 * 3 + 3 * 4 * 60 * 50
    assert found.disk == 4 * (4000 + 8000)  # the oldest checkpoint goes when the newest is whole
    assert found.kept == 4000 + 3 * (4000 + 8000)
    assert needed("sft", "finished_checkpoints=none").kept == 4000
    assert needed("sft", "finished_checkpoints=weights").kept == 4000 + 2 * 4000
    assert found.memory == found.states + found.activations
    assert found.sharded(4) == 4000 + found.activations


def test_reward_model_by_hand() -> None:
    found = needed("reward", "reward.per_device_train_batch_size=2", "reward.batch_size=8")
    assert (found.states, found.activations) == (16_000, 28 * 4 * 120 * 8 * 3)  # chosen and rejected, no logits
    assert (found.disk, found.kept) == (3 * 12_000, 4000 + 2 * 12_000)


def test_ppo_by_hand() -> None:
    batch = ["ppo.per_device_train_batch_size=2", "ppo.batch_size=8", "ppo.logits_memory_mb=1"]
    found = needed("ppo/rkl", *batch)
    # Policy and critic trained, reference and reward model frozen.
    assert found.states == 16_000 + 16_000 + 4000 + 4000
    assert found.activations == 28 * 4 * 120 * 8 * 3 + 2**20
    assert (found.disk, found.kept) == (3 * 2 * 12_000, 4000 + 2 * 2 * 12_000)
    assert found.sharded_disk == 3 * 2 * 18_000
    assert found.host == 12 * 2000
    shared = needed("ppo/rkl", *batch, "ppo.share_backbone=true")
    assert shared.states == 16_000 + 4000 + 4000
    assert shared.disk == 3 * 12_000
    grpo = needed("ppo/rkl", *batch, "trainer=grpo", "ppo.generation_batch_size=1")  # no critic either
    assert (grpo.states, grpo.activations, grpo.disk) == (shared.states, shared.activations, shared.disk)


def test_ppo_is_rewarded_by_a_function() -> None:
    changes = ["scorer.kind=function", "scorer.function=a:b"]
    assert needed("ppo/rkl", *changes).states == needed("ppo/rkl").states - 4000


def test_the_cache_of_a_large_rollout_counts() -> None:
    """Keys and values of all responses that are drawn together, where that is more than training takes."""
    changes = ["ppo.per_device_train_batch_size=1", "ppo.batch_size=100000", "ppo.logits_memory_mb=1"]
    whole = needed("ppo/rkl", *changes)
    assert whole.activations == 2 * 4 * 4 * 3 * 30 * 100_000
    assert needed("ppo/rkl", *changes, "ppo.generation_batch_size=50000").activations == whole.activations / 2


def test_half_precision_and_checkpointing_by_hand() -> None:
    changes = ["model.precision=auto", "reward.per_device_train_batch_size=2", "reward.batch_size=8"]
    assert needed("reward", *changes, bf16=True).activations == 28 * 2 * 120 * 8 * 3
    found = needed("reward", *changes, "reward.gradient_checkpointing=true", bf16=True)
    assert found.activations == 2 * 120 * 8 * 3 + 28 * 2 * 120 * 8


def test_adapters_take_less() -> None:
    full, lora = (needed("sft", *changes) for changes in ([], ["model.lora.r=1"]))
    adapter = 1 * 20 * 8 * 3
    assert lora.states == 4 * 1000 + 16 * adapter
    assert lora.disk < full.disk


def test_what_the_prepare_stage_needs_is_not_known() -> None:
    assert needed("prepare") == StageEstimate("prepare", 0, 0, 0)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_longer_batches_and_larger_models_need_more(stage: str) -> None:
    name = "ppo/rkl" if stage == "ppo" else stage
    batch = [f"{stage}.batch_size=64", f"{stage}.per_device_train_batch_size="]
    small, large = (needed(name, batch[0], batch[1] + str(size)) for size in (8, 64))
    assert small.activations < large.activations
    assert needed(name, "data.max_prompt_tokens=200").activations > needed(name).activations


def test_the_disk_of_stages_one_after_the_other() -> None:
    """What those before it left, and the one that runs, at its largest."""
    stages = [StageEstimate(name, 0, 0, disk, kept, 2 * disk) for name, disk, kept in (("a", 5, 1), ("b", 5, 4))]
    assert disk_needed(stages) == 1 + 5
    assert disk_needed(stages, sharded=True) == 1 + 10
    assert disk_needed([*stages, StageEstimate("c", 0, 0, 0, 3)]) == 1 + 4 + 3


def test_the_disk_of_a_real_run(whole_run: Path) -> None:
    """Weights and moments of every stage within a quarter; tokenizers and logs are no part of the estimate."""
    recipe = load_recipe("tiny", [*SMALL, f"model.name={whole_run / 'prepare' / 'model'}"])
    size = model_size(recipe.model.name)
    assert size is not None
    for stage in plan(recipe)[1:]:
        folder = whole_run / stage.name
        files = [*folder.rglob("*.safetensors"), *folder.rglob("optimizer.pt")]
        written = sum(path.stat().st_size for path in files)
        assert len(list((folder / "checkpoints").glob("checkpoint-*"))) == 2
        assert estimate(stage, size, False).kept == pytest.approx(written, rel=0.25), stage.name


def fetched(*changes: str, size: ModelSize | None = SIZE) -> dict[str, Any]:
    return downloads(load_recipe("hh-gemma-2b", list(changes)), size)


def test_downloads(tmp_path: Path) -> None:
    assert set(fetched()) == {"google/gemma-2b", "data (full-hh)"}
    assert fetched()["google/gemma-2b"] == 2000  # hubs keep models in half precision
    assert set(fetched(f"model.name={tmp_path}")) == {"data (full-hh)"}
    assert set(fetched("data.source=mine.jsonl")) == {"google/gemma-2b"}
    unknown = fetched(size=None)["google/gemma-2b"]
    assert unknown != unknown
    assert downloads(load_recipe("tiny"), None) == {}


@pytest.mark.parametrize("tied", [True, False])
def test_graphs_hold_what_is_estimated(tied: bool, tmp_path: Path) -> None:
    """To the byte, but for norms, which stay in float32, and with the head counted as if it were tied."""
    model = tiny.policy(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    assert size is not None
    changes = [*BASE, "model.precision=auto", "ppo.batch_size=6", "ppo.per_device_train_batch_size=3"]
    stage = next(stage for stage in plan(load_recipe("tiny", changes)) if stage.name == "ppo/rkl")
    found = estimate_generation(stage, size, True, "cuda")
    generation, prompts = GraphGeneration(), Prompts(torch.full((6, 20), 3), torch.ones(6, 20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generation.generate(model, prompts, Sampling(1.0, 0, 1.0, 0, 10, ()), range(6))
    cache = sum(states.nbytes for states in generation.drawer.held)
    assert found.cache == cache > 0
    held = generation._held_bytes() - cache
    norms, head = 2 * (2 * size.layers + 1) * size.hidden, 2 * size.vocabulary * size.hidden
    assert found.copy == held - norms + (0 if tied else head)
    assert estimate_generation(stage, size, False, "cuda").copy == 0
    training = StageEstimate("ppo/rkl", 100.0, 10.0, 0.0)
    assert found.peak(training, 1e9) == 110 + found.cache + found.copy
    assert found.peak(training, 1e3) == 100 + found.cache + found.copy  # freed after drawing
    assert estimate_generation(stage, size, True, "cpu").back_end == "transformers"
    # Where weights are in parts every device has the whole copy, also without autocast; batches are shared.
    half, full = (estimate_generation(stage, size, bf16, "cuda", 2) for bf16 in (True, False))
    assert (half.copy, half.gathered, half.cache) == (found.copy, found.copy, cache / 2)
    assert (full.copy, full.gathered) == (0, 4 * size.parameters)
    assert half.peak(training, 1e3, 2) == 50 + half.cache + found.copy


def test_vllm_holds_its_share() -> None:
    changes = [*BASE, "ppo.generation=vllm", "ppo.vllm_memory=0.75"]
    training = StageEstimate("ppo/rkl", 100.0, 10.0, 0.0)
    for url, share in (([], 0.75), (["ppo.vllm_url=http://x"], 0)):
        stage = next(stage for stage in plan(load_recipe("tiny", changes + url)) if stage.name == "ppo/rkl")
        found = estimate_generation(stage, SIZE, True, "cuda")
        assert found.peak(training, 400.0) == 110 + share * 400
