"""A run that is to be looked into: its models, and its responses to held-out prompts as tokens.

All is read from the manifest, which has every setting written out: neither TRL nor the training data is needed, and a
run can be looked into on another machine than it was made on.
"""

from __future__ import annotations

import dataclasses
import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from wpr.config.recipe import ModelSettings, ScorerSettings
from wpr.data import DataSettings, Encoder, Row
from wpr.errors import OptionError, RunFolderError
from wpr.model_loading import load_causal, load_tokenizer
from wpr.regularizers.spec import RegularizerSpec
from wpr.runs.folder import RunFolder
from wpr.runs.responses import Answer, Response

REFERENCE = "sft"
"""What the model that all policies start from is called."""

AFTER, BEFORE = "responses.jsonl", "responses-before.jsonl"


class FinishedRun:
    """The folder of a run with at least the model that policies start from."""

    def __init__(self, path: Path, device: str | None = None) -> None:
        """device: where models are put; None takes the accelerator, if there is one."""
        if not (path / "manifest.json").is_file():
            raise RunFolderError(
                f"{path} is no run's folder: it has no manifest.json; name the folder that `wpr run` wrote"
            )
        self.path = path
        self.manifest = RunFolder(path, writes=False).manifest
        self.recipe: Mapping[str, Any] = self.manifest.get("recipe") or {}
        if not self.recipe:
            raise RunFolderError(f"{path / 'manifest.json'} has no recipe; let `wpr run` go on with the run first")
        self._device = device

    @cached_property
    def device(self) -> Any:
        """Where models are."""
        return device_of(self._device)

    @property
    def finished(self) -> list[str]:
        """Policies that are done and have their model."""
        stages = self.manifest["stages"]
        done = [name.removeprefix("ppo/") for name in stages if name.startswith("ppo/")]
        return [name for name in done if self._record(name)["status"] == "done" and self._folder(name).is_dir()]

    def choose(self, names: Sequence[str] | None) -> list[str]:
        """Those of the finished policies that are named; all where none is."""
        finished = self.finished
        for name in names or []:
            if name not in finished:
                known = ", ".join(finished) or "none"
                raise OptionError(f"{self.path} has no finished policy {name}; finished are: {known}")
        if not finished:
            raise RunFolderError(f"{self.path} has no finished policy; let `wpr run` finish one first")
        return list(dict.fromkeys(names or finished))

    @property
    def sft_model(self) -> str:
        """The model that policies start from, and are compared with."""
        if self.recipe.get("sft") is not None:
            folder = self.path / "sft" / "model"
            if not folder.is_dir():
                raise RunFolderError(f"{self.path} has no finished SFT model yet; let `wpr run` finish it first")
            return str(folder)
        return self._made(str(self.recipe["model"]["name"]))

    @cached_property
    def tokenizer(self) -> Any:
        """Of all the run's models."""
        return load_tokenizer(self.sft_model)

    @cached_property
    def encoder(self) -> Encoder:
        """What made tokens of the run's prompts."""
        return Encoder(self.tokenizer, DataSettings(**self.recipe["data"]))

    def model(self, name: str) -> str:
        """Where a model is, `REFERENCE` or a policy."""
        return self.sft_model if name == REFERENCE else str(self._folder(name))

    def load(self, name: str) -> Any:
        """A model by name, ready to be asked."""
        folder = self.model(name)
        return load_causal(ModelSettings(folder), folder).to(self.device).eval().requires_grad_(False)

    def regularizer(self, policy: str) -> RegularizerSpec:
        """What the policy was trained under."""
        return RegularizerSpec.from_settings(**self._record(policy)["inputs"]["regularizer"])

    def temperature(self, policy: str) -> float:
        """Of the distributions that were compared in training."""
        from wpr.ppo.config import PPOConfig

        default = next(f.default for f in dataclasses.fields(PPOConfig) if f.name == "logprob_temperature")
        return float(self._record(policy)["inputs"]["ppo"].get("logprob_temperature", default))

    def scorer(self) -> tuple[ScorerSettings, str | None]:
        """What PPO maximised: its settings, and the reward model's folder where it is one."""
        settings = ScorerSettings(**self.recipe["scorer"])
        if settings.kind != "model":
            return settings, None
        return settings, self._made(settings.name) if settings.name else str(self.path / "reward" / "model")

    def answers(self, policy: str, file: str = AFTER, limit: int | None = None) -> list[Answer]:
        """The policy's responses to held-out prompts (``file`` `BEFORE`: the reference's), in the order of prompts."""
        path = self.path / "ppo" / policy / file
        if not path.is_file():
            raise RunFolderError(
                f"{path} is missing: the run has no held-out responses (evaluation.prompts, split.held_out)"
            )
        found = []
        for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                found.append(self.answer(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise RunFolderError(f"{path}:{number} is damaged ({error}); restore it from a copy") from None
        return found[:limit]

    def answer_of(self, row: Response, number: int) -> Answer:
        """A response of a file that `wpr generate` wrote, with its tokens."""
        line = {"number": number, "prompt": row.prompt, "response": row.response}
        return self.answer(line | {"finished": row.stopped, "length": row.tokens})

    def answer(self, row: Mapping[str, Any]) -> Answer:
        """A line of a file of responses, with its tokens."""
        prompt, text, length = row["prompt"], row["response"], row.get("length")
        ids = row.get("response_ids")  # as they were drawn; files of older runs have none
        drawn = ids is not None
        if ids is None:
            ids = self._response_ids(prompt, text, bool(row.get("finished")), length)
        score = row.get("score")
        return Answer(int(row["number"]), prompt, text, self.prompt_ids(prompt), list(ids), score, length, drawn)

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt as the run has it, text or chat messages."""
        return self.encoder.prompt(Row(prompt if isinstance(prompt, str) else tuple(prompt)))

    def _response_ids(self, prompt: Any, text: str, finished: bool, length: int | None) -> list[int]:
        """Tokens of a response, of which an older run kept the text alone.

        A text can be tokenized in several ways; what is tried is the text by itself and, for tokenizers that drop or
        add a space at the start of a text, as what it adds to the prompt. The one of the recorded length is taken.
        """
        end = [self.encoder.end_id] if finished else []
        tried = [[*self._bare(text), *end]]
        if isinstance(prompt, str):
            start, whole = self._bare(prompt), self._bare(prompt + text)
            if whole[: len(start)] == start:
                tried.append([*whole[len(start) :], *end])
        return next((ids for ids in tried if len(ids) == length), tried[0])

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _record(self, policy: str) -> Mapping[str, Any]:
        return self.manifest["stages"][f"ppo/{policy}"]  # type: ignore[no-any-return]

    def _folder(self, policy: str) -> Path:
        return self.path / "ppo" / policy / "model"

    def _made(self, name: str) -> str:
        return name.replace("{prepare}", str(self.path / "prepare"))


def device_of(name: str | None) -> Any:
    """The device of that name; of None the accelerator, or the CPU where there is none."""
    import torch

    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None


def retokenized(answers: Sequence[Answer]) -> str:
    """Whose tokens are measured: those drawn, or what a tokenizer makes of the texts."""
    anew = [answer for answer in answers if not answer.drawn]
    if not anew:
        return "The responses' tokens are those that were drawn."
    same = sum(answer.length is None or len(answer.response_ids) == answer.length for answer in anew)
    return (
        f"Responses are tokenized anew from their texts: {same} of {len(anew)} have as many tokens as when they "
        "were drawn."
    )
