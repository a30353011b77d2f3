"""Responses of a model to many prompts: in batches, each prompt drawn with a seed of its own, resumable.

The seed of a response is made from the given seed and the prompt, so that a response depends neither on the batch that
it is drawn in nor on the other prompts of the file. (Logits of a prompt in a larger batch differ in their last bits;
where two tokens stand nearly alike at the drawn quantile, another token may come out.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wpr.atomic_io import unused_path
from wpr.data.rows import DataError, Message
from wpr.errors import UserError
from wpr.runs.fingerprints import content_fingerprint, tokenizer_fingerprint
from wpr.runs.jsonl_log import PARTIAL, Journal, refuse_other_header
from wpr.runs.responses import Response, ResponseFile, read_responses, response_of

if TYPE_CHECKING:
    from wpr.ppo.generation import Generation, Sampling


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    temperature: 0 takes the most likely token each time; then the next two have no effect.
    top_k: only the k most likely tokens, 0 for all.
    top_p: the most likely tokens that together reach this probability.
    max_new_tokens: longest response, its end token included.
    seed: of all that is drawn.
    """

    temperature: float = 0.5
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (0 <= self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (fine, limit) in limits.items():
            if not fine:
                raise DataError(f"{name.replace('_', '-')} is {getattr(self, name)}; it must be {limit}")

    def sampling(self, stops: Sequence[int]) -> Sampling:
        """The same for the sampler of `wpr.ppo`; the most likely token is a draw among one."""
        from wpr.ppo.generation import Sampling

        greedy = self.temperature == 0
        return Sampling(
            1.0 if greedy else self.temperature,
            1 if greedy else self.top_k,
            1.0 if greedy else self.top_p,
            0,
            self.max_new_tokens,
            tuple(stops),
        )


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt: what files call it, as a reader sees it, and as the model does.

    temperature: its own, where prompts of one file are answered at different ones.
    """

    prompt_id: str
    prompt: str | list[Message]
    input_ids: list[int]
    temperature: float | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers.

    name: where it was loaded from. weights: their fingerprint. stops: tokens that end a response.
    template: ``chat`` or ``text``, how prompts became tokens.
    back_end: what draws its responses; None: what does by default on its device.
    """

    model: Any
    tokenizer: Any
    name: str
    weights: str
    stops: tuple[int, ...]
    template: str
    back_end: Generation | None = None

    @cached_property
    def generation(self) -> Generation:
        """What draws its responses."""
        from wpr.ppo.back_ends import BackEnd

        return self.back_end or BackEnd().make(self.model.device, training=False)

    def facts(self) -> dict[str, Any]:
        """For a header."""
        return {
            "model": self.name,
            "fingerprint": {"weights": self.weights, "tokenizer": tokenizer_fingerprint(self.tokenizer)},
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "template": self.template,
            "stop_token_ids": list(self.stops),
            "device": str(self.model.device),
        }


def header_of(
    speaker: LoadedModel, prompts: Sequence[EncodedPrompt], drawing: SamplingParams, **facts: Any
) -> dict[str, Any]:
    """What decides the responses, for the first line of their file."""
    content = [list(vars(asked).values()) for asked in prompts]
    return {
        "format": 1,
        **speaker.facts(),
        "sampling": {name: value for name, value in asdict(drawing).items() if name != "seed"},
        "seed": drawing.seed,
        "prompts": len(prompts),
        "prompts_fingerprint": content_fingerprint(content),
        **facts,
    }


def finished_file(path: Path, header: dict[str, Any], restart: str) -> ResponseFile | None:
    """The file, if it is there already and made as the header says; refused if it was made otherwise."""
    if not path.exists():
        return None
    found = read_responses(path)
    refuse_other_header(path, dict(found.header), header, restart)
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)  # left by an end between two steps
    return found


def settings_differ(path: Path, header: dict[str, Any]) -> bool:
    """Whether the file, or its growing part, is there and cannot be continued."""
    growing = path.with_name(path.name + PARTIAL)
    try:
        if finished_file(path, header, "") is None and growing.exists():
            with Journal(path, header, "", response_of):
                pass
    except DataError:
        return True
    return False


def set_aside(path: Path) -> Path | None:
    """Rename a file of responses and its growing part to ``NAME.old``; where the file went, None if there was none."""
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
    if not path.exists():
        return None
    return path.rename(unused_path(path.with_name(path.name + ".old"), ""))


def generate_file(
    path: Path,
    speaker: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    drawing: SamplingParams,
    header: dict[str, Any],
    batch_size: int,
    restart: str,
    advance: Callable[[int], None] = lambda count: None,
) -> ResponseFile:
    """Answer all prompts, and write the file when all are answered. Batches that an earlier process has on the disk are
    not drawn again. advance: is given how many prompts were answered, those of earlier processes first.
    """
    check_prompts(prompts)
    check_batch_size(batch_size)
    refuse_too_long(speaker, prompts, drawing)
    done = finished_file(path, header, restart)
    if done is not None:
        advance(len(prompts))
        return done
    with Journal(path, header, restart, response_of) as journal:
        answered = {row["prompt_id"]: row for row in journal.rows}
        advance(len(answered))
        places = {asked.prompt_id: place for place, asked in enumerate(prompts)}
        waiting = [asked for asked in prompts if asked.prompt_id not in answered]
        for batch in batches(waiting, batch_size):
            found = respond(speaker, batch, drawing)
            rows = [replace(response, number=places[response.prompt_id]).as_dict() for response in found]
            journal.append(rows)
            answered.update((row["prompt_id"], row) for row in rows)
            advance(len(rows))
        journal.finish([answered[asked.prompt_id] for asked in prompts])
    return read_responses(path)


def check_prompts(prompts: Sequence[EncodedPrompt]) -> None:
    """Refuse none at all, and two of one name."""
    if not prompts:
        raise DataError("there are no prompts to answer; name a file that has some, or raise --limit")
    seen: set[str] = set()
    for asked in prompts:
        if asked.prompt_id in seen:
            raise DataError(f"two prompts have the prompt_id {asked.prompt_id!r}; each needs one of its own")
        seen.add(asked.prompt_id)


def check_batch_size(size: int) -> None:
    """Refuse batches of nothing."""
    if size < 1:
        raise DataError(f"batch-size is {size}; it must be 1 or more")


def batches(prompts: Sequence[EncodedPrompt], size: int) -> Iterator[list[EncodedPrompt]]:
    """Prompts of one temperature and of like length together, which saves padding; the longest first, so that what does
    not fit into memory is known at once.
    """
    check_batch_size(size)
    for temperature in dict.fromkeys(asked.temperature for asked in prompts):
        alike = [asked for asked in prompts if asked.temperature == temperature]
        ordered = sorted(alike, key=lambda asked: -len(asked.input_ids))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def respond(speaker: LoadedModel, batch: Sequence[EncodedPrompt], drawing: SamplingParams) -> list[Response]:
    """One response to each prompt of a batch, all of one temperature."""
    from wpr.language_models import pad
    from wpr.ppo.generation import EngineError, GenerationError
    from wpr.ppo.rollout import Prompts

    own = batch[0].temperature
    drawing = drawing if own is None else replace(drawing, temperature=own)
    prompts = Prompts(*pad([asked.input_ids for asked in batch], left=True, device=speaker.model.device))
    seeds = [seed_of(drawing.seed, asked) for asked in batch]
    try:
        found = speaker.generation.generate(speaker.model, prompts, drawing.sampling(speaker.stops), seeds)
    except GenerationError as error:
        raise DataError(
            f"{speaker.name} gives no probabilities for token {error.position} of its response to prompt "
            f"{batch[error.row].prompt_id} (largest logit {error.value}); its weights are damaged, or --dtype is too "
            "coarse for them"
        ) from None
    except EngineError as error:
        raise UserError(f"{error}. What was drawn before is kept: run the same command again") from None
    rows = [tokens[real].tolist() for tokens, real in zip(found.tokens, found.mask, strict=True)]
    texts = [
        continuation(speaker.tokenizer, asked.input_ids, tokens) for asked, tokens in zip(batch, rows, strict=True)
    ]
    return [
        Response(
            asked.prompt_id, asked.prompt, text, temperature=drawing.temperature, length=len(tokens),
            finished=bool(finished), response_ids=tokens, drawn=True,
        )
        for asked, text, tokens, finished in zip(batch, texts, rows, found.finished.tolist(), strict=True)
    ]  # fmt: skip


def continuation(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """The text of a response, with the space that it may begin with: some tokenizers leave out the first space of
    whatever they decode, which an indented program cannot do without.
    """
    before = prompt[-8:]
    start: str = tokenizer.decode(before, skip_special_tokens=True)
    whole: str = tokenizer.decode(before + tokens, skip_special_tokens=True)
    if whole.startswith(start):
        return whole[len(start) :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))  # a character lies across the seam


def refuse_too_long(speaker: LoadedModel, prompts: Sequence[EncodedPrompt], drawing: SamplingParams) -> None:
    """Refuse prompts that leave no room for a response among the model's positions."""
    from wpr.language_models import position_limit

    limit = position_limit(speaker.model)
    longest = max(prompts, key=lambda asked: len(asked.input_ids))
    if limit is not None and len(longest.input_ids) + drawing.max_new_tokens > limit:
        raise DataError(
            f"prompt {longest.prompt_id} has {len(longest.input_ids)} tokens; with max-new-tokens "
            f"{drawing.max_new_tokens} that exceeds the {limit} positions of {speaker.name}; lower --max-new-tokens, "
            "or leave the prompt out"
        )


def seed_of(seed: int, asked: EncodedPrompt) -> int:
    """The seed of one response: of the prompt's content, so that it is the same wherever the prompt stands."""
    content = f"{seed}:{asked.prompt_id}:{asked.input_ids}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
