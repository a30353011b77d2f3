"""Judges in this process: a Python function, and a reward model."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wpr.evaluation.judging.questions import JudgingError, Question, Reply


class FunctionJudge:
    """``function(prompt=..., response_a=..., response_b=...)``, which returns "A", "B" or "E".

    Its answers are kept like those of any judge, and asked for again when the file that it stands in has changed.
    """

    batch_size = 1

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name.rsplit(":", 1)[-1]
        self.identity: Mapping[str, Any] = {"function": name, "source": _source(function)}

    def replies(self, questions: Sequence[Question]) -> list[Reply]:
        """See `LocalJudge.replies`."""
        return [Reply(self._ask(question)) for question in questions]

    def _ask(self, question: Question) -> str:
        try:
            found = self.function(**question.fields)
        except Exception as error:
            raise JudgingError(
                f"the judge {self.identity['function']} raised {type(error).__name__}: {error} (comparison "
                f"{question.id}); it is called with {', '.join(question.fields)} by name"
            ) from error
        # Neither a text nor a number: shown with its kind, so that a list of one letter is not read as that letter.
        return str(found) if isinstance(found, str | int | float) else f"{type(found).__name__} {found!r}"


class RewardModelJudge:
    """The response with the higher score wins; equal scores are a tie. Each response is scored once.

    Texts become tokens as they do for the stages of a run (`wpr.data.Encoder`), with the token that ends a completion:
    reward models are trained on the score there, and say little at the token before it. Encoders such as BERT, which
    have no such token, read prompt and response as their tokenizer writes them.
    """

    def __init__(self, folder: str, batch_size: int = 32, device: str | None = None) -> None:
        import torch
        from transformers import AutoTokenizer

        from wpr.rewards import RewardModel

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = RewardModel.from_pretrained(folder, batch_size=batch_size)
        except (OSError, ValueError) as error:
            raise JudgingError(f"{folder} cannot be loaded as a reward model: {error}") from error
        self._tokenizer = tokenizer
        self._model.tokenizer = tokenizer if self._model.whole else None
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model.to(self._device)
        self._scores: dict[tuple[str, str], float] = {}
        self.batch_size = batch_size
        self.name = Path(folder).name if Path(folder).name != "model" else Path(folder).resolve().parent.name
        self.identity: Mapping[str, Any] = {"reward_model": _weights(folder, self._model.model), "encoding": 2}

    def replies(self, questions: Sequence[Question]) -> list[Reply]:
        """See `LocalJudge.replies`."""
        places = [(question.fields["prompt"], question.fields[name]) for question in questions for name in
                  ("response_a", "response_b")]  # fmt: skip
        self._score(places)
        return [Reply(_verdict(*(self._scores[_name(*place)] for place in places[i : i + 2])))
                for i in range(0, len(places), 2)]  # fmt: skip

    def _score(self, places: list[tuple[Any, str]]) -> None:
        import torch

        from wpr.rewards import Completions

        new = {_name(*place): place for place in places if _name(*place) not in self._scores}
        if not new:
            return
        prompts, responses = zip(*new.values(), strict=True)
        # An encoder's own tokenizer makes its tokens, see above; it needs no ids here.
        rows = [[0]] * len(new) if self._model.whole else [self._ids(*place) for place in new.values()]
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows], device=self._device)
        mask = (torch.arange(ids.shape[1], device=self._device) < lengths.unsqueeze(-1)).long()
        scores = self._model(Completions(prompts, responses, ids, mask, lengths - 1))
        self._scores.update(zip(new, scores.tolist(), strict=True))

    def _ids(self, prompt: Any, response: str) -> list[int]:
        from wpr.data import DataSettings, Encoder, Row
        from wpr.language_models import position_limit

        text = isinstance(prompt, str)
        encoder = Encoder(self._tokenizer, DataSettings("prompts", template="text" if text else "auto"))
        start, (completion,) = encoder.encode(Row(prompt if text else tuple(prompt)), [response])
        return [*start, *completion][: position_limit(self._model.model)]


def _name(prompt: Any, response: str) -> tuple[str, str]:
    return json.dumps(prompt), response


def _verdict(first: float, second: float) -> str:
    if first != first or second != second:
        raise JudgingError("the reward model gave a score that is not a number (nan); check its weights")
    choice = "A" if first > second else "B" if second > first else "E"
    return json.dumps({"comparison": f"scores {first:.6g} and {second:.6g}", "choice": choice})


def _source(function: Callable[..., Any]) -> str:
    """A fingerprint of the file that a function stands in; of callable objects, that of their class."""
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
    except TypeError:
        file = None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else "built in"


def _weights(folder: str, model: Any) -> str:
    if not Path(folder).is_dir():
        return f"{folder}@{getattr(model.config, '_commit_hash', None)}"
    return folder_fingerprint(folder)


def folder_fingerprint(folder: str) -> str:
    """Of a model's files, so that another model in the same place is another judge."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt"):
            found.update(f"{path.name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                for part in iter(lambda: file.read(1 << 20), b""):
                    found.update(part)
    return found.hexdigest()[:16]
