"""Models that answer prompts: any model by its name, or the models of a run, on the prompts that it held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wpr.data import DataError, DataSettings, Encoder, Row, SplitSettings, load_corpus, ppo_rows, split_corpus
from wpr.errors import OptionError, RunFolderError
from wpr.evaluation.code_tasks import CodeTask, apps_row_task
from wpr.evaluation.response_generation import EncodedPrompt, LoadedModel
from wpr.model_loading import load_any_causal, load_tokenizer
from wpr.runs.fingerprints import weights_fingerprint
from wpr.runs.finished_run import REFERENCE, FinishedRun, device_of
from wpr.runs.responses import prompt_id

if TYPE_CHECKING:
    from wpr.ppo.generation import Generation

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}
"""The recipe's words and torch's."""

ID_COLUMN = "prompt_id of wpr"
"""Carries a prompt's name through the making of PPO's rows; no dataset has a column of this name."""


class RunModels:
    """A run's models that are finished, and its held-out prompts, as the manifest tells them: TRL is not needed.

    models: names to folders, ``sft`` first; where the recipe has no such stage, it is the model that it starts from.
    unfinished: policies that the run has begun and not ended.
    settings: how the run reads and encodes its data.
    """

    def __init__(self, folder: Path) -> None:
        run = FinishedRun(folder)
        self.folder = folder
        self.recipe = run.recipe
        self.settings = run.data
        self.models = {name: run.model(name) for name in (REFERENCE, *run.finished)}
        self.unfinished = run.unfinished

    def choose(self, names: Sequence[str]) -> dict[str, str]:
        """The named models with the one they start from; all where none is named."""
        for name in names:
            if name in self.unfinished:
                raise RunFolderError(f"policy {name} of {self.folder} is not finished; finish it with `wpr run`")
            if name not in self.models:
                raise OptionError(f"{self.folder} has no model {name}; it has {', '.join(self.models)}")
        return {name: path for name, path in self.models.items() if not names or name in (REFERENCE, *names)}

    def notes(self) -> list[str]:
        """What to tell whoever asks for all models."""
        return [f"policy {name} is not finished, and left out" for name in self.unfinished]

    @property
    def max_new_tokens(self) -> int:
        """The longest response that policies were trained to give."""
        return int(self.recipe["ppo"].get("max_new_tokens", self.settings.max_completion_tokens))

    @property
    def dtype(self) -> str:
        """What the run multiplies matrices in, in torch's words."""
        return PRECISIONS[self.recipe["model"].get("precision", "auto")]  # recorded by `wpr run` in any case

    def held_out(self) -> list[Row]:
        """The rows that no stage was trained on, read and dealt as the run did."""
        seed = int(self.recipe["seed"])
        try:
            corpus = load_corpus(self.settings, seed)
        except DataError as error:
            raise DataError(
                f"the run's data cannot be read again: {error}. Run the command where the run was made, or take the "
                f"prompts that it measured policies on: --prompts {self.folder}/ppo/POLICY/responses.jsonl -o FOLDER"
            ) from None
        rows = split_corpus(corpus, SplitSettings(**self.recipe["split"]), seed).held_out
        if not rows:
            raise RunFolderError(
                f"{self.folder} held no prompts out (split.held_out is 0 and there is no validation data); name a file "
                "with --prompts, and a folder with -o"
            )
        return rows

    def asked(self, tokenizer: Any, limit: int | None = None) -> list[EncodedPrompt]:
        """The first held-out prompts, as PPO was given them: without repetitions, and without those that are too long
        for it.
        """
        named = [
            dataclasses.replace(row, columns={**row.columns, ID_COLUMN: prompt_id(row.prompt)})
            for row in self.held_out()
        ]
        made, _ = ppo_rows(named, Encoder(tokenizer, self.settings))
        return [EncodedPrompt(row[ID_COLUMN], row["prompt"], row["input_ids"]) for row in made[:limit]]

    def code_tasks(self, limit: int | None = None) -> list[CodeTask]:
        """The held-out programming problems, for a run on data of APPS's format."""
        if self.settings.format != "apps":
            raise OptionError(
                f"{self.folder} was trained on data.format {self.settings.format}, which has no tests to run; name a "
                "file of problems with --problems, or humaneval"
            )
        tasks = {prompt_id(row.prompt): apps_row_task(row, prompt_id(row.prompt)) for row in self.held_out()}
        return list(tasks.values())[:limit]


def load_speaker(
    name: str,
    settings: DataSettings,
    dtype: str = "auto",
    device: str | None = None,
    tokenizer: Any = None,
    own_stops: bool = True,
    back_end: Generation | None = None,
) -> LoadedModel:
    """Load a model that answers.

    settings: whose ``template`` says how prompts become tokens. tokenizer: the model's own where none is given.
    own_stops: end responses also at what the model's generation settings say; otherwise only where SFT ended
        completions, as PPO does.
    back_end: what draws its responses, if not what does by default.
    """
    tokenizer = load_tokenizer(name, setting="--model") if tokenizer is None else tokenizer
    encoder = Encoder(tokenizer, settings)
    model = load_any_causal(name, dtype, device_of(device))
    stops = {encoder.end_id, tokenizer.eos_token_id}
    if own_stops:
        own = model.generation_config.eos_token_id
        stops.update([] if own is None else own if isinstance(own, list) else [own])
    return LoadedModel(
        model, tokenizer, name, weights_fingerprint(name), tuple(sorted(stops)), "chat" if encoder.chat else "text",
        back_end,
    )  # fmt: skip


def named_models(given: Sequence[str]) -> dict[str, str]:
    """``--model PATH`` or ``--model NAME=PATH``, by name: the last folder's, but for one that is called ``model``."""
    models: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            path = text
            parts = [part for part in Path(text).parts if part not in ("/", "..", ".")]
            while len(parts) > 1 and parts[-1] == "model":
                parts.pop()
            name = parts[-1] if parts else ""
        if not name or not path:
            raise OptionError(f"--model {text!r} has no name; write --model NAME=FOLDER")
        if name in models:
            raise OptionError(
                f"--model {text} would be called {name}, as {models[name]} is; write --model NAME={path} to tell them "
                "apart"
            )
        models[name] = path
    return models
