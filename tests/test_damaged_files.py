"""Files that were cut off, emptied or overwritten are told from whole ones, in every format that weights come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ppo import tiny
from wpr.config.recipe import ModelSettings
from wpr.damaged_files import DamagedFileError, first_damaged, refuse_damaged_model, refuse_unusable_weights
from wpr.evaluation.encoders import ContextualEncoder
from wpr.model_loading import check_model, load_causal, load_tokenizer, save_model
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
    message = first_damaged(tmp_path.iterdir())
    assert message is not None
    assert message.startswith(f"{path} is damaged ({path.stat().st_size} bytes, ")
    assert "\n" not in message


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


def leave_an_old_index(folder: Path) -> None:
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')


def leave_a_pointer(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def leave_a_stray_file(folder: Path) -> None:
    (folder / "model-tmp.safetensors").write_bytes(b"half")


def leave_an_adapter_without_settings(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("shard_size", ["5GB", "5KB"])
@pytest.mark.parametrize(
    "leave", [leave_an_old_index, leave_a_pointer, leave_a_stray_file, leave_an_adapter_without_settings]
)
def test_weights_that_transformers_does_not_read(
    leave: Callable[[Path], None], shard_size: str, tmp_path: Path
) -> None:
    tiny.policy().save_pretrained(tmp_path, max_shard_size=shard_size)
    leave(tmp_path)
    load_policy(str(tmp_path), None)
    weights = sorted(tmp_path.glob("model-0*.safetensors")) or [tmp_path / "model.safetensors"]
    weights[-1].write_bytes(b"")
    with pytest.raises(DamagedFileError, match=f"{weights[-1].name} is damaged"):
        load_policy(str(tmp_path), None)


def test_of_an_adapter_its_own_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    WRITERS["model.safetensors"](tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refuse_damaged_model(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"adapter_model\.safetensors is damaged"):
        refuse_damaged_model(str(tmp_path))


def test_a_torch_file_overwritten_near_its_start(tmp_path: Path) -> None:
    """The record at its end is whole, and torch would say "Weights only load failed", without the file's name."""
    path = tmp_path / "optimizer.pt"
    torch.save({"state": {f"layer.{i}.weight": torch.randn(50) for i in range(50)}}, path)
    assert first_damaged([path]) is None
    content = bytearray(path.read_bytes())
    content[200:4000] = bytes(3800)
    path.write_bytes(content)
    assert (first_damaged([path]) or "").startswith(f"{path} is damaged ({len(content)} bytes, Bad CRC-32")


@pytest.mark.parametrize(
    "load",
    [
        lambda folder: load_causal(ModelSettings(folder)),
        lambda folder: check_model(folder, "critic"),
        lambda folder: load_policy(folder, None),
        lambda folder: load_critic(folder, tiny.settings("unused")),
        RewardModel.from_pretrained,
        ContextualEncoder.from_pretrained,
    ],
)
def test_whoever_loads_a_model_names_the_file_and_the_remedy(load: Callable[[str], object], tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged .*; copy or download it again") as caught:
        load(str(tmp_path))
    assert f"move {tmp_path} away and run the same command again" in str(caught.value)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of revision main of some/model in the hub's cache."""
    folder = tmp_path / "models--some--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    return folder


def test_a_model_in_the_hub_s_cache(snapshot: Path) -> None:
    tiny.policy().save_pretrained(snapshot)
    refuse_damaged_model("some/model")
    (snapshot / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged") as caught:
        refuse_damaged_model("some/model")
    assert str(caught.value).endswith("; download it again with `hf download some/model --force-download`")


def test_a_download_that_was_interrupted(snapshot: Path) -> None:
    tiny.policy().save_pretrained(snapshot, max_shard_size="5KB")
    first, *others = sorted(snapshot.glob("model-*.safetensors"))
    for shard in others:
        shard.unlink()
    refuse_damaged_model("some/model")  # the others are fetched
    first.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=f"{first.name} is damaged"):
        refuse_damaged_model("some/model")
    first.unlink()
    refuse_damaged_model("some/model")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {')
    with pytest.raises(DamagedFileError, match=r"index\.json is damaged"):
        refuse_damaged_model("some/model")


@pytest.mark.parametrize(
    "load",
    [
        lambda name: load_causal(ModelSettings(name, revision="v2")),
        lambda name: load_tokenizer(name, "v2"),
        lambda name: check_model(name, "model.name", "v2"),
    ],
)
def test_the_revision_that_is_loaded_is_looked_at(
    load: Callable[[str], object], snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    for auto in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(
            f"transformers.{auto}.from_pretrained",
            lambda name, revision, **options: loaded.append(revision) or tiny.tokenizer(),
        )
    tiny.policy().save_pretrained(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"")  # of main
    tiny.policy().save_pretrained(snapshot.with_name("def"))
    (snapshot.parents[1] / "refs" / "v2").write_text("def")
    load("some/model")
    assert loaded == ["v2"]
    (snapshot.with_name("def") / "config.json").write_text("{")
    with pytest.raises(DamagedFileError, match="`hf download some/model --revision v2 --force-download`"):
        load("some/model")


@pytest.mark.parametrize("shard_size", ["10MB", "4KB"])
def test_saved_weights_that_cannot_be_used(shard_size: str, tmp_path: Path) -> None:
    """Every tensor is looked at, also of the last shard."""
    model = tiny.policy()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    refuse_unusable_weights(tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    total = len({name for file in tmp_path.glob("*.safetensors") for name in load_file(file)})
    whole = load_file(path)
    name = sorted(whole)[-1]
    for bad, fault in ((torch.zeros(0), "is empty"), (torch.full((2, 2), torch.nan), "4 of 4 numbers not finite")):
        save_file({**whole, name: bad}, path, metadata={"format": "pt"})
        with pytest.raises(DamagedFileError, match=rf"1 of {total} saved tensors cannot be used \({name} .*{fault}"):
            refuse_unusable_weights(tmp_path)


def test_a_model_of_which_weights_are_empty_is_not_saved(tmp_path: Path) -> None:
    """What was there before stays."""
    model, tokenizer = tiny.policy(), tiny.tokenizer()
    save_model(model, tokenizer, tmp_path / "model", "card")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    model.get_output_embeddings().weight.data = torch.zeros(0)
    with pytest.raises(DamagedFileError, match="the stage is not done"):
        save_model(model, tokenizer, tmp_path / "model", "card")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
