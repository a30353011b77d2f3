"""What costs between tokens are made of: embeddings of models by name, geometries of them, regularizers on those."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch

from wpr.errors import OptionError
from wpr.model_loading import load_vocabulary
from wpr.regularizers.regularizer import Regularizer
from wpr.regularizers.spec import GeometrySpec, RegularizerSpec
from wpr.transport.geometry import TokenGeometry, input_embeddings

logger = logging.getLogger(__name__)


def measure_vocabulary(weight: torch.Tensor, spec: RegularizerSpec | None = None) -> TokenGeometry:
    """The geometry of embeddings ``(V, d)``, by default that of a regularizer of which nothing was set."""
    fitted, _ = (spec or RegularizerSpec()).fitted(len(weight))
    return TokenGeometry.from_embeddings(weight, **fitted.costs.options())


def regularizer_on(
    reference: Any,
    spec: RegularizerSpec,
    device: Any = None,
    cache: MutableMapping[GeometrySpec, TokenGeometry] | None = None,
    say: Callable[[str], None] = logger.warning,
) -> Regularizer:
    """The regularizer on ``reference``'s embeddings, or on those of the model that it names.

    device: if it is a GPU, the vocabulary is measured there, and the geometry is there; else where the model is. It
        takes seconds on a GPU; for 256,000 x 2,048 some 36 minutes on two CPU cores.
    cache: see `RegularizerSpec.build`. say: told what is lowered to fit a small vocabulary.
    """
    if not spec.is_wasserstein:
        return spec.build()
    weight = input_embeddings(reference)
    if device is None or device.type != "cuda":  # others lack operations that measuring needs
        device = weight.device
    if spec.costs.embeddings is not None:
        weight = _borrowed_embeddings(spec.costs.embeddings, reference)
    spec, notes = spec.fitted(len(weight))
    for note in notes:
        say(note)
    return spec.build(weight.to(device), cache)


class RegularizerFactory:
    """Makes regularizers on one reference model, each geometry once: measuring a vocabulary takes a while."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._notes: dict[str, list[str]] = {}
        self._geometries: dict[GeometrySpec, TokenGeometry] = {}

    def make_all(self, texts: Sequence[str]) -> dict[str, Any]:
        """Regularizers by the text that names them, see `RegularizerSpec.parse`."""
        return {text: self.make(parse_option(text), text) for text in dict.fromkeys(texts)}

    def make(self, spec: RegularizerSpec, name: str) -> Any:
        """One regularizer; ``name`` is what notes call it."""
        notes = self._notes[name] = []
        try:
            return regularizer_on(
                self.reference, spec, cache=self._geometries, say=lambda note: notes.append(f"{name}: {note}")
            )
        except ValueError as error:
            raise OptionError(f"{name}: {error}") from None

    def notes(self, names: Iterable[str]) -> list[str]:
        """What was changed in these regularizers to fit a small vocabulary."""
        return [note for name in names for note in self._notes.get(name, [])]


def parse_option(text: str, **changes: Any) -> RegularizerSpec:
    """What ``--regularizer`` names, with changes that are not None."""
    try:
        return RegularizerSpec.parse(text).changed(**changes)
    except (TypeError, ValueError) as error:
        raise OptionError(f"--regularizer {text}: {error}") from None


def check_same_tokens(embeddings: str, model: str, revision: str | None = None) -> None:
    """Refuse embeddings of a model in whose tokenizer ids stand for other tokens than in ``model``'s. That both have as
    many says nothing: costs between unrelated tokens would be taken without a word.
    """
    theirs, ours = load_vocabulary(embeddings, "regularizer.embeddings"), load_vocabulary(model, revision=revision)
    ids = sorted({index for _, index in theirs.items() ^ ours.items()})
    if not ids:
        return
    named = [{index: token for token, index in one.items()} for one in (theirs, ours)]
    first = ", ".join(f"{index} is {' and not '.join(repr(one.get(index)) for one in named)}" for index in ids[:3])
    raise ValueError(
        f"regularizer.embeddings={embeddings} has another tokenizer than {model}: {len(ids)} ids differ, the first are "
        f"{first} (None: no token); only a model of the same tokenizer gives costs between the policy's tokens"
    )


def _borrowed_embeddings(name: str, reference: Any) -> Any:
    from transformers import AutoModelForCausalLM

    check_same_tokens(name, reference.name_or_path)
    weight = input_embeddings(AutoModelForCausalLM.from_pretrained(name, dtype="auto")).float()
    rows = len(input_embeddings(reference))
    if len(weight) < rows:
        raise ValueError(
            f"regularizer.embeddings={name} has embeddings of {len(weight)} tokens and the policy of {rows}: the "
            "tokenizer is the same, but the policy's matrix is padded further; name a model with as many or more"
        )
    return weight[:rows]  # what is left over pads the other matrix, and is no token
