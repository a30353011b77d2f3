"""Embeddings of another model for the policy's tokens: row by row under the same tokenizer, else by each token's text.

A token of another tokenizer has no row of its own in the other model. Its text, with its leading space, is tokenised
there, and the embeddings of the pieces are averaged:

    row(token) = mean over pieces p of text(token) of E[p]          E: the other model's input embeddings

Special tokens, bytes that are no text by themselves, and texts of which the other tokenizer knows no piece cannot be
mapped. They get no neighbours: see `TokenGeometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import whole_embeddings
from wpr.model_loading import load_any_model, load_any_tokenizer

SETTING = "embeddings"
FRAGMENT = "\ufffd"
"""What bytes that are no text are decoded to."""


@dataclass(frozen=True)
class TokenEmbeddings:
    """Rows for a vocabulary.

    weight: ``(V, d)``. mapped: ``(V,)``, False for tokens whose row means nothing; None where all rows count.
    """

    weight: Tensor
    mapped: Tensor | None = None

    @property
    def count(self) -> int:
        """How many tokens are mapped."""
        return len(self.weight) if self.mapped is None else int(self.mapped.sum())

    def to(self, device: Any) -> TokenEmbeddings:
        return TokenEmbeddings(self.weight.to(device), None if self.mapped is None else self.mapped.to(device))


@dataclass(frozen=True)
class TextMapping:
    """The policy's tokens in another tokenizer.

    pieces: ids of each token's pieces there, by the policy's ids; none where a token cannot be mapped.
    textless: how many tokens have no text by themselves. unknown: of how many the other tokenizer knows no piece.
    """

    pieces: list[list[int]]
    textless: int
    unknown: int

    @property
    def mapped(self) -> int:
        return len(self.pieces) - self.textless - self.unknown


def other_embeddings(name: str, reference: Any, say: Callable[[str], None]) -> TokenEmbeddings:
    """The input embeddings of the model ``name``, a language model or an encoder, for ``reference``'s tokens. say: told
    how many cannot be mapped.
    """
    rows = len(whole_embeddings(reference))
    mapping = map_tokens(name, reference.name_or_path)
    weight = whole_embeddings(load_any_model(name, SETTING)).float()
    if mapping is None:
        if len(weight) < rows:
            raise ValueError(
                f"{SETTING}={name} has embeddings of {len(weight)} tokens and the policy of {rows}: the tokenizer is "
                "the same, but the policy's matrix is padded further; name a model with as many or more"
            )
        return TokenEmbeddings(weight[:rows])  # what is left over pads the other matrix, and is no token
    pieces = mapping.pieces[:rows] + [[]] * (rows - len(mapping.pieces))  # a matrix may be padded beyond its tokens
    found = TokenEmbeddings(*mean_rows(weight, pieces))
    left = rows - found.count
    say(
        f"{SETTING}={name} has another tokenizer; tokens are mapped by their texts. {left} of {rows} tokens "
        f"({left / rows:.1%}) cannot be mapped and have no neighbours: {left - mapping.unknown} are no text by "
        f"themselves, of {mapping.unknown} its tokenizer knows no piece."
    )
    return found


def map_tokens(name: str, model: str, revision: str | None = None) -> TextMapping | None:
    """The tokens of ``model``'s tokenizer in that of the model ``name``; None where these are the same. Refuses one in
    which fewer than two can be mapped.
    """
    if not model:
        raise ValueError(
            f"{SETTING}={name} needs the reference's tokenizer, but the reference was loaded from nowhere; load it "
            "with from_pretrained"
        )
    theirs, ours = load_any_tokenizer(name, SETTING), load_any_tokenizer(model, revision=revision)
    if theirs.get_vocab() == ours.get_vocab():
        return None
    texts = token_texts(ours)
    pieces = text_pieces(texts, theirs)
    textless = sum(text is None for text in texts)
    mapping = TextMapping(pieces, textless, sum(not found for found in pieces) - textless)
    if mapping.mapped < 2:
        raise ValueError(
            f"{SETTING}={name} has another tokenizer than {model}, in which {mapping.mapped} of {len(texts)} tokens "
            f"can be mapped by their texts: {textless} are no text by themselves, of {mapping.unknown} it knows no "
            "piece; name a model for the same language and alphabet"
        )
    return mapping


def token_texts(tokenizer: Any) -> list[str | None]:
    """The text of each token by its id, with its leading space; None for special tokens, bytes that are no text by
    themselves and ids without a token.
    """
    # After another token: many tokenizers drop the space at the start of a text.
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = _decode(tokenizer, before)
    ids = sorted(set(tokenizer.get_vocab().values()))
    special = _special_ids(tokenizer)
    texts: list[str | None] = [None] * (ids[-1] + 1)
    for token in ids:
        if token not in special:
            whole = _decode(tokenizer, [*before, token])
            text = whole[len(start) :] if whole.startswith(start) else _decode(tokenizer, [token])
            texts[token] = None if FRAGMENT in text else text
    return texts


def text_pieces(texts: Sequence[str | None], tokenizer: Any) -> list[list[int]]:
    """Ids of the pieces of each text, without special and unknown tokens; none of a text that is None."""
    # Some tokenizers put a space before every text: a second one would be a piece of its own.
    adds_space = tokenizer.tokenize("a") == ["▁a"]
    given = [(text or "").removeprefix(" ") if adds_space else text or "" for text in texts]
    encoded = tokenizer(given, add_special_tokens=False)["input_ids"]
    special = _special_ids(tokenizer)
    return [
        [] if text is None else [piece for piece in pieces if piece not in special]
        for text, pieces in zip(texts, encoded, strict=True)
    ]


def mean_rows(weight: Tensor, pieces: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Means of rows of ``weight`` ``(W, d)``, one per list of ids: ``(V, d)``, and which lists are not empty
    ``(V,)``. An empty one has a mean of zeros.
    """
    sizes = torch.tensor([len(ids) for ids in pieces])
    flat = torch.tensor([piece for ids in pieces for piece in ids])
    if int(flat.max()) >= len(weight):
        raise ValueError(
            f"{SETTING}: its tokenizer has the id {int(flat.max())}, but its matrix only {len(weight)} rows; the "
            "folder holds a tokenizer of another model"
        )
    return torch.nn.functional.embedding_bag(flat, weight, sizes.cumsum(0) - sizes, mode="mean"), sizes > 0


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _special_ids(tokenizer: Any) -> set[int]:
    """Special tokens, the unknown one among them."""
    added = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    return added | set(tokenizer.all_special_ids)
