"""`wpr push`: what is uploaded can be used, by the hub's own client against a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

from tests.commands.hub_server import TOKEN, Hub, hub_server
from tests.pipeline.command import Here
from wpr import TokenGeometry, Wasserstein
from wpr.regularizers.spec import RegularizerSpec

FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "wpr.json",
}  # fmt: skip
SPEC = "reverse-kl + 2*semantic:neighbours=16,k2=8,lam=20"


@pytest.fixture
def transport_run(own_run: Path) -> Path:
    """A run whose policy was trained under a sum with transport, by its manifest."""
    path = own_run / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stages"]["ppo/rkl"]["inputs"]["regularizer"] = RegularizerSpec.parse(SPEC).resolved()
    path.write_text(json.dumps(manifest))
    return own_run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process is logged in to; the client reads these when it is imported."""
    with hub_server(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_uploaded_can_be_used(here: Here, transport_run: Path, hub: Hub, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = files(transport_run / "ppo" / "rkl" / "model")
    finished = here.succeeds("push", str(transport_run), "rkl", "--to", "me/mine", "--private")
    assert finished.stdout == f"uploaded to {hub.url}/me/mine\n"
    assert hub.repositories == {"me/mine": {"visibility": "private", "commits": ["Upload by wpr push"]}}
    folder = tmp_path / "hub" / "me" / "mine"
    assert files(folder) == files(transport_run / "hub" / "rkl")
    assert set(files(folder)) == FILES | {"geometry.safetensors"}
    assert files(transport_run / "ppo" / "rkl" / "model") == before

    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(transport_run / "ppo" / "rkl" / "model")
    assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    geometry = TokenGeometry.load(folder / "geometry.safetensors", model)
    measured = TokenGeometry.from_model(model, neighbours=16, transform="centre/unit", progress=False)
    assert torch.equal(geometry.radius, measured.radius)
    assert geometry.scale == measured.scale

    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["wpr", "ppo"]
    line = next(line for line in card.splitlines() if line.startswith("transport = "))
    transport = eval(line.partition("= ")[2], {"geometry": geometry, "Wasserstein": Wasserstein})
    assert (transport.settings.lam, transport.settings.k2) == (20, 8)
    settings = json.loads((folder / "wpr.json").read_text())
    assert RegularizerSpec.from_record(settings["regularizer"]).resolved() == RegularizerSpec.parse(SPEC).resolved()
    assert settings["settings"]["beta"] == json.loads((transport_run / "manifest.json").read_text())["stages"][
        "ppo/rkl"]["settings"]["beta"]  # fmt: skip
    assert not [name for name in settings["settings"] if name.endswith(("_dir", "_token"))]


def test_folders_of_this_machine_are_not_uploaded(here: Here, own_run: Path) -> None:
    """A run that was made with absolute paths: neither the settings nor the card has them."""
    path, card = own_run / "manifest.json", own_run / "ppo" / "rkl" / "model" / "README.md"
    manifest = json.loads(path.read_text())
    manifest["recipe"]["output"] = "/home/me/secret/mine"
    manifest["recipe"]["data"]["source"] = "/home/me/secret/pairs.jsonl"
    path.write_text(json.dumps(manifest))
    card.write_text(
        f"{card.read_text()}\nMade from /home/me/secret/mine/prepare/model and /home/me/secret/pairs.jsonl\n"
    )
    here.succeeds("push", str(own_run), "rkl", "--to", "me/mine", "--dry-run")
    folder = own_run / "hub" / "rkl"
    recipe = json.loads((folder / "wpr.json").read_text())["recipe"]
    assert (recipe["output"], recipe["data"]["source"]) == ("mine", "pairs.jsonl")
    assert "Made from mine/prepare/model and pairs.jsonl" in (folder / "README.md").read_text()
    assert not [name for name, data in files(folder).items() if b"/home/me" in data]


def test_a_repository_that_is_there(here: Here, own_run: Path, hub: Hub, tmp_path: Path) -> None:
    """It is not overwritten unasked; a card that was edited is uploaded as it is."""
    push = ("push", str(own_run), "rkl", "--to", "mine")
    here.succeeds(*push)
    refused = here(*push)
    assert refused.code == 1
    assert refused.error == (
        "Error: mine is on the hub already; add a commit to it with --update, or choose another name with --to"
    )
    (own_run / "hub" / "rkl" / "README.md").write_text("# edited\n")
    updated = here.succeeds(*push, "--update")
    assert "README.md is kept as it is" in updated.stderr
    assert len(hub.repositories["me/mine"]["commits"]) == 2
    assert (tmp_path / "hub" / "me" / "mine" / "README.md").read_text() == "# edited\n"


def test_dry_run(here: Here, own_run: Path) -> None:
    """Without a token, and offline. A regularizer without costs has no geometry."""
    finished = here.succeeds("push", str(own_run), "rkl", "--to", "me/mine", "--dry-run")
    folder = own_run / "hub" / "rkl"
    assert finished.stdout == f"nothing was uploaded; the folder is {folder}\n"
    assert set(files(folder)) == FILES
    for name in FILES:
        assert f"{(folder / name).stat().st_size:,}  {name}\n" in finished.stderr
    assert "geometry" not in (folder / "README.md").read_text().partition("## Use")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rkk", "--to", "me/x"), "unknown policy rkk; did you mean rkl?"),
        (("rkl", "--to", "a/b/c"), "--to a/b/c: "),
        (("rkl", "--to", "me/x"), "the hub is switched off here (HF_HUB_OFFLINE)"),
    ],
)
def test_refusals(here: Here, own_run: Path, arguments: tuple[str, ...], message: str) -> None:
    finished = here("push", str(own_run), *arguments)
    assert finished.code != 0
    assert message in finished.error
    assert not (own_run / "hub").exists()


def test_unfinished_policy(here: Here, own_run: Path) -> None:
    path = own_run / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stages"]["ppo/rkl"]["status"] = "interrupted"
    path.write_text(json.dumps(manifest))
    finished = here("push", str(own_run), "rkl", "--to", "me/x", "--dry-run")
    assert finished.code == 2
    assert "the policy rkl is not finished (it is interrupted); let `wpr run` finish it" in finished.error


def test_hub_that_refuses_or_is_not_there(
    here: Here, own_run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    push = ("push", str(own_run), "rkl", "--to", "me/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "log in with a token that may write (`hf auth login`)" in here(*push).error
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreached = here(*push).error
    assert unreached.startswith("Error: the hub cannot be reached: ")
    assert str(own_run / "hub" / "rkl") in unreached
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "without a token of the hub: run `hf auth login`, or set HF_TOKEN" in here(*push).error
