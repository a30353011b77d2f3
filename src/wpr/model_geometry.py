"""What costs between tokens are made of: embeddings of models by name, geometries of them, regularizers on those."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch

from wpr.errors import OptionError
from wpr.language_models import whole_embeddings
from wpr.other_embeddings import TokenEmbeddings, map_tokens, other_embeddings
from wpr.regularizers.regularizer import Regularizer
from wpr.regularizers.spec import OUTPUT, GeometrySpec, RegularizerSpec
from wpr.transport.geometry import TokenGeometry, input_embeddings

logger = logging.getLogger(__name__)


def measure_vocabulary(weight: torch.Tensor | TokenEmbeddings, spec: RegularizerSpec | None = None) -> TokenGeometry:
    """The geometry of embeddings ``(V, d)``, by default that of a regularizer of which nothing was set."""
    known = weight if isinstance(weight, TokenEmbeddings) else TokenEmbeddings(weight)
    fitted, _ = (spec or RegularizerSpec()).fitted(len(known.weight), known.count)
    return TokenGeometry.from_embeddings(known.weight, mapped=known.mapped, **fitted.costs.options())


def regularizer_on(
    reference: Any,
    spec: RegularizerSpec,
    device: Any = None,
    cache: MutableMapping[GeometrySpec, TokenGeometry] | None = None,
    say: Callable[[str], None] = logger.warning,
    embeddings: Callable[[str | None], TokenEmbeddings] | None = None,
) -> Regularizer:
    """The regularizer on ``reference``'s input or output embeddings, or on those of the model that it names.

    device: if it is a GPU, the vocabulary is measured there, and the geometry is there; else where the model is. It
        takes seconds on a GPU; for 256,000 x 2,048 some 36 minutes on two CPU cores.
    cache: see `RegularizerSpec.build`. say: told what is lowered to fit a small vocabulary, that output embeddings are
        the input embeddings where a model ties them, and how many tokens have no embedding in another model.
    embeddings: gives those that a spec names, where they are at hand; default: `token_embeddings`.
    """
    if not spec.is_wasserstein:
        return spec.build()
    if device is None or device.type != "cuda":  # others lack operations that measuring needs
        device = input_embeddings(reference).device
    name = spec.costs.embeddings
    known = (embeddings(name) if embeddings is not None else token_embeddings(reference, name, say)).to(device)
    spec, notes = spec.fitted(len(known.weight), known.count)
    for note in notes:
        say(note)
    cache = {} if cache is None else cache
    if spec.costs not in cache:
        cache[spec.costs] = measure_vocabulary(known, spec)
    return spec.build(known.weight, cache)


def token_embeddings(reference: Any, embeddings: str | None, say: Callable[[str], None]) -> TokenEmbeddings:
    """The embeddings that `GeometrySpec.embeddings` names. say: as of `regularizer_on`."""
    if embeddings is None:
        return TokenEmbeddings(whole_embeddings(reference))
    if embeddings != OUTPUT:
        return other_embeddings(embeddings, reference, say)
    weight = whole_embeddings(reference, "output")
    if reference.get_output_embeddings().weight is reference.get_input_embeddings().weight:
        say("embeddings=output are the input embeddings: the model ties them.")
    return TokenEmbeddings(weight)


class RegularizerFactory:
    """Makes regularizers on one reference model, each geometry once, and other models' embeddings once: measuring and
    mapping a vocabulary take a while.
    """

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._notes: dict[str, list[str]] = {}
        self._geometries: dict[GeometrySpec, TokenGeometry] = {}
        self._embeddings: dict[str | None, TokenEmbeddings] = {}

    def make_all(self, texts: Sequence[str]) -> dict[str, Any]:
        """Regularizers by the text that names them, see `RegularizerSpec.parse`."""
        return {text: self.make(parse_option(text), text) for text in dict.fromkeys(texts)}

    def make(self, spec: RegularizerSpec, name: str) -> Any:
        """One regularizer; ``name`` is what notes call it."""
        self._notes[name] = []
        try:
            return regularizer_on(
                self.reference,
                spec,
                cache=self._geometries,
                say=lambda note: self._note(name, note),
                embeddings=lambda whose: self.embeddings(whose, name),
            )
        except ValueError as error:
            raise OptionError(f"{name}: {error}") from None

    def embeddings(self, whose: str | None, name: str) -> TokenEmbeddings:
        """Those that `GeometrySpec.embeddings` names; ``name`` is what notes call who asks first."""
        if whose not in self._embeddings:
            self._embeddings[whose] = token_embeddings(self.reference, whose, lambda note: self._note(name, note))
        return self._embeddings[whose]

    def _note(self, name: str, note: str) -> None:
        self._notes.setdefault(name, []).append(f"{name}: {note}")

    def notes(self, names: Iterable[str]) -> list[str]:
        """What was changed in these regularizers to fit a small vocabulary."""
        return [note for name in names for note in self._notes.get(name, [])]


def parse_option(text: str, **changes: Any) -> RegularizerSpec:
    """What ``--regularizer`` names, with changes that are not None."""
    try:
        return RegularizerSpec.parse(text).changed(**changes)
    except (TypeError, ValueError) as error:
        raise OptionError(f"--regularizer {text}: {error}") from None


def check_other_embeddings(spec: RegularizerSpec, model: str, revision: str | None = None) -> None:
    """Refuse embeddings of a model in whose tokenizer none of ``model``'s tokens can be mapped, or fewer than a spec
    has neighbours.
    """
    if spec.costs.other_model is None or (mapping := map_tokens(spec.costs.other_model, model, revision)) is None:
        return
    if (fault := spec.check_vocabulary(len(mapping.pieces), mapping.mapped)) is not None:
        raise ValueError(fault[1])
