"""Files that were cut off, emptied or overwritten are told from whole ones, in every format that weights come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ppo import tiny
from wpr.analysis.bert_score import Encoder
from wpr.damaged_files import DamagedFileError, first_damaged, refuse_damaged_model
from wpr.pipeline.models import check_model, load_causal
from wpr.pipeline.recipe import ModelSettings
from wpr.ppo.parts import load_critic, load_policy
from wpr.rewards import RewardModel

WRITERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: save_file({"a": torch.randn(50, 50), "b": torch.randn(3)}, path),
    "optimizer.pt": lambda path: torch.save({"a": torch.randn(50, 50), "b": [1, 2]}, path),
    "rng_state.pth": lambda path: torch.save(torch.get_rng_state(), path),
    "training_args.bin": lambda path: torch.save({"lr": 1.0}, path),
    "trainer_state.json": lambda path: path.write_text(json.dumps({"global_step": 7, "log_history": [{}] * 9})),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda whole: whole[:-1],
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "cut after ten bytes": lambda whole: whole[:10],
    "empty": lambda whole: b"",
    "garbage": lambda whole: b"\x07garbage" * (len(whole) // 8),
    "zeros": lambda whole: bytes(len(whole)),  # what a crash may leave of a file that was never flushed
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_whole_file_is_whole(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert first_damaged([tmp_path / name]) is None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    (tmp_path / "other.json").write_text("{}")
    told = first_damaged(tmp_path.iterdir())
    assert told is not None
    assert told.startswith(f"{path} is damaged ({path.stat().st_size} bytes, ")
    assert "\n" not in told


def test_old_formats_and_other_files_are_left_alone(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "README.md").write_text("")
    (tmp_path / "notes.json").write_text("// mine")
    assert first_damaged([tmp_path / "pytorch_model.bin", tmp_path / "README.md"]) is None
    refuse_damaged_model(str(tmp_path))  # notes.json is no file of a model


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path, max_shard_size="5KB")
    refuse_damaged_model(str(tmp_path))
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(DamagedFileError, match=f"model.safetensors.index.json is damaged .*{gone.name}, which is miss"):
        refuse_damaged_model(str(tmp_path))


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: load_causal(ModelSettings(folder)),
        lambda folder: check_model(folder, "critic"),
        lambda folder: load_policy(folder, None),
        lambda folder: load_critic(folder, tiny.settings("unused")),
        RewardModel.from_pretrained,
        Encoder.from_pretrained,
    ],
)
def test_whoever_loads_a_model_names_the_file_and_the_remedy(load: Callable[[str], object], tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged .*; copy or download it again") as caught:
        load(str(tmp_path))
    assert f"move {tmp_path} away and run the same command again" in str(caught.value)


def test_a_model_in_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    tiny.policy().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    refuse_damaged_model("some/model")
    (snapshot / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged"):
        refuse_damaged_model("some/model")
