"""A policy as a repository of the hub: its model with card, the geometry of its tokens, and its settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wpr.atomic_io import write_atomically
from wpr.config.recipe import ModelSettings
from wpr.config.typed import unknown
from wpr.errors import OptionError, RunFolderError, UserError, first_line
from wpr.model_geometry import measure_vocabulary, token_embeddings
from wpr.model_loading import load_causal
from wpr.pipeline.environment import versions
from wpr.regularizers.spec import OUTPUT, RegularizerSpec
from wpr.runs.finished_run import FinishedRun

CARD, GEOMETRY, SETTINGS = "README.md", "geometry.safetensors", "wpr.json"
LOCAL = ("_dir", "_token", "run_name", "resume_from_checkpoint")
"""How settings end that say something of this machine, and nothing of the model."""


def check_policy(run: FinishedRun, policy: str) -> None:
    """Refuse a policy that the run does not have, or has not finished."""
    if policy in run.unfinished:
        status = run.manifest["stages"][f"ppo/{policy}"]["status"]
        why = "its model is missing" if status == "done" else f"it is {status}"
        raise RunFolderError(
            f"{run.path}: the policy {policy} is not finished ({why}); let `wpr run` finish it, or push one of: "
            f"{', '.join(run.finished) or 'none'}"
        )
    if policy not in run.finished:
        raise unknown(policy, run.finished, lambda _: str(run.path), kind="policy")


def write_folder(
    run: FinishedRun, policy: str, name: str, folder: Path, say: Callable[[str], None], *, geometry: bool = True
) -> None:
    """Write what is uploaded to ``folder``. Weights are linked, where the disk can, and a card that is there is kept.

    name: of the repository, for the card. geometry: whether distances between the policy's tokens are measured, which
        takes minutes for a large vocabulary without a GPU.
    """
    source = Path(run.model(policy))
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.is_file() and path.name != CARD:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            _link_or_copy(path, target)
    spec = run.regularizer(policy)
    settings = settings_of(run, policy, spec)
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    write_atomically(folder / SETTINGS, without_folders(text, settings) + "\n")
    (folder / GEOMETRY).unlink(missing_ok=True)
    has_geometry = geometry and spec.is_wasserstein and spec.costs.other_model is None
    if has_geometry:
        model = load_causal(ModelSettings(str(source)), str(source))
        known = token_embeddings(model, spec.costs.embeddings, say).to(run.device)
        measure_vocabulary(known, spec).save(folder / GEOMETRY)
    if (folder / CARD).is_file():
        say(f"{folder / CARD} is kept as it is; delete it to have it written again")
        return
    card = without_folders((source / CARD).read_text(encoding="utf-8").rstrip(), settings)
    write_atomically(folder / CARD, f"{card}\n\n{_usage(name, spec, has_geometry)}")


def settings_of(run: FinishedRun, policy: str, spec: RegularizerSpec) -> dict[str, Any]:
    """How the policy was made: regularizer, recipe, the trainer's settings as used, results; nothing of the machine."""
    record = run.manifest["stages"][f"ppo/{policy}"]
    used = {name: value for name, value in record.get("settings", {}).items() if not name.endswith(LOCAL)}
    return {
        "policy": policy,
        "trainer": record["inputs"].get("trainer", "ppo"),
        "regularizer": spec.resolved(),
        "settings": used,
        "results": record["results"],
        "recipe": run.manifest["recipe"],
        "versions": run.manifest.get("versions") or versions(),
    }


def without_folders(text: str, settings: Any) -> str:
    """``text`` in which absolute paths of ``settings`` keep only their last part: no folders of this machine."""
    for path in sorted(_absolute_paths(settings), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _absolute_paths(value: Any) -> set[str]:
    """Strings of nested settings that are paths from the root, of two parts at least."""
    if isinstance(value, str):
        return {value} if Path(value).is_absolute() and len(Path(value).parts) > 2 and "\n" not in value else set()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(_absolute_paths, inner))


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(f"--to {name}: {first_line(error)} Give NAME or OWNER/NAME.") from None


def check_access(name: str) -> None:
    """Refuse to begin where nothing could be uploaded at the end."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise UserError("the hub is switched off here (HF_HUB_OFFLINE); unset it, or use --dry-run")
    if get_token() is None:
        raise UserError(
            f"{name} cannot be made without a token of the hub: run `hf auth login`, or set HF_TOKEN; --dry-run writes "
            "the folder without one"
        )


def upload(folder: Path, name: str, *, private: bool, update: bool) -> str:
    """Make the repository and upload the folder in one commit; its address.

    update: allow one that is there already, to which a commit is added.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="wpr")
    try:
        made = api.create_repo(name, private=private or None, exist_ok=update)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload by wpr push")
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 409:
            raise UserError(
                f"{name} is on the hub already; add a commit to it with --update, or choose another name with --to"
            ) from None
        remedy = "log in with a token that may write (`hf auth login`)" if status in (401, 403) else "try again later"
        raise UserError(f"the hub refused {name}: {first_line(error)} What to do: {remedy}. {_kept(folder)}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2"):  # by the client's version
            raise
        raise UserError(f"the hub cannot be reached: {first_line(error)} {_kept(folder)}") from None
    return str(made)


def _kept(folder: Path) -> str:
    return f"What was to be uploaded is in {folder}; the same command tries again."


def _link_or_copy(path: Path, target: Path) -> None:
    if path.suffix == ".safetensors":  # others are small, and may be edited
        try:
            os.link(path, target)
            return
        except OSError:
            pass
    shutil.copyfile(path, target)


def _usage(name: str, spec: RegularizerSpec, geometry: bool) -> str:
    text = (
        f"## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model     = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        f"`{SETTINGS}` has all settings that it was trained by, and what was measured.\n"
    )
    if not geometry:
        return text
    transport = spec.transport
    assert transport is not None
    whose = "model.get_output_embeddings().weight" if spec.costs.embeddings == OUTPUT else "model"
    options = "".join(f", {name}={value!r}" for name, value in transport.overrides.items())
    return text + (
        f"\n`{GEOMETRY}` has the distances between this model's own tokens, measured as those of its reference were in "
        "training. For another run that starts from this model:\n\n```python\n"
        "from huggingface_hub import hf_hub_download\nfrom wpr import TokenGeometry, Wasserstein\n\n"
        f'geometry  = TokenGeometry.load(hf_hub_download("{name}", "{GEOMETRY}"), {whose})\n'
        f'transport = Wasserstein(geometry, preset="{transport.preset}"{options})\n```\n'
    )
