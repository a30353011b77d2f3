"""The rewriting world: sentences, and copies of them in which some words are replaced by others that fit there.

A copy keeps most words of its sentence. Each whole word but the first is drawn again with probability ``noise``, from
what a language model finds likely after the words before it; about half of those drawn are the word that stood there.
SFT on such pairs makes a rewriter that is fluent and careless of meaning.

Sentences come from a file with one per line (``.txt``), from the responses of a dataset that `wpr.data` reads, or,
where neither is named, from stories that wpr-pico writes. Everything is drawn from the seed.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.data import DataSettings, load_corpus
from wpr.data.rows import DataError
from wpr.language_models import hidden_states, logits_of, pad
from wpr.recipes.stories import sample
from wpr.recipes.stories_gold import ENDING, load_pico, sentences
from wpr.transport.progress import progress_bar

logger = logging.getLogger(__name__)

STORY_TOKENS = 120
STORIES_AT_ONCE = 256
ROUNDS_WITHOUT_NEW = 20
"""After so many, no more sentences are expected."""
BATCH = 128
WORD_START = ("Ġ", "▁")
"""What tokenizers mark the first token of a word with, where a space is before it."""

SHIPPED = (
    "# The recipe's own list. Where scorer.words names another, policies avoid that: see words.txt in their folders."
)


def prepare(
    folder: Path,
    seed: int = 0,
    source: str | list[str] | None = None,
    format: str | None = None,
    model: str | None = None,
    count: int = 4000,
    copies: int = 2,
    noise: float = 0.2,
    shortest: int = 6,
    longest: int = 20,
    instruction: str = "{}\n",
    words: str = "rewrite-words.txt",
) -> dict[str, Any]:
    """Write ``pairs.jsonl`` (prompt, completion, source) to ``folder``; ``words.txt``, the list that the recipe forbids
    if it is not told another, which it says; and ``model/``, if the model is wpr-pico.

    source: a file of sentences, one per line; or what `wpr.data` reads, by its ``format``. model: that draws words, and
    whose tokens are counted; null: wpr-pico. count: sentences at most. copies: of each, which differ. noise: share of
    words that are drawn again. shortest, longest: tokens of a sentence. instruction: the prompt, with the sentence for
    ``{}``. words: a shipped list.
    """
    listed = _check_options(count, copies, noise, shortest, longest, instruction, words)
    language_model, tokenizer = load_pico() if model is None else _load(model)
    left_out: Counter[str] = Counter()
    if source is None and format is None:
        found = _made(count, seed, tokenizer, shortest, longest)
    else:
        found = _fitting(_read(source, format), tokenizer, shortest, longest, left_out)
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        if not found:
            raise DataError(
                f"data.source={source} has no sentence of {shortest} to {longest} tokens that ends with . ! or ? and "
                f"has no quotation mark (left out: {reasons or 'nothing, it is empty'}); write one sentence per line, "
                "or change prepare.options.shortest and longest"
            )
        if left_out:
            logger.warning("prepare: %d sentences are used; left out: %s", len(found), reasons)
    repeated = [text for text in found[:count] for _ in range(copies)]
    completions, replaced = noisy_copies(repeated, language_model, tokenizer, noise, seed)
    rows = [
        {"prompt": instruction.replace("{}", text), "completion": completion, "source": text}
        for text, completion in zip(repeated, completions, strict=True)
    ]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "words.txt").write_text(f"{SHIPPED}\n{listed}", encoding="utf-8")
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    if model is None:
        from wpr import pico

        shutil.copytree(pico.path(), folder / "model", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    exact = sum(row["completion"] == row["source"] for row in rows)
    return {
        "sentences": len(rows) // copies,
        "left_out": dict(left_out),
        "words_replaced": replaced,
        "exact_copies": exact / len(rows),
    }


def _check_options(
    count: int, copies: int, noise: float, shortest: int, longest: int, instruction: str, words: str
) -> str:
    """Refuse options that make no pairs; the shipped list of words."""
    place = "prepare.options."
    if not 0 < noise < 1:
        raise DataError(f"{place}noise={noise} must lie between 0 and 1, both excluded")
    for name, value in {"count": count, "copies": copies, "shortest": shortest}.items():
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{place}{name}={value} must be a whole number, 1 or more")
    if not isinstance(longest, int) or longest < shortest:
        raise DataError(f"{place}longest={longest} must be a whole number, {place}shortest={shortest} or more")
    if not isinstance(instruction, str) or "{}" not in instruction:
        raise DataError(f"{place}instruction={instruction!r} must be a text with {{}} where the sentence goes")
    folder = Path(__file__).parent
    shipped = sorted(path.name for path in folder.glob("*words.txt"))
    if words not in shipped:
        raise DataError(
            f"{place}words={words} is no list that comes with this package ({', '.join(shipped)}); for one of your own "
            "set reward.words=FILE"
        )
    return (folder / words).read_text(encoding="utf-8")


def noisy_copies(texts: Sequence[str], model: Any, tokenizer: Any, noise: float, seed: int) -> tuple[list[str], float]:
    """Each text with some of its words drawn again, and the share of all such words that became others.

    Words that are one token and not the first may be drawn again; what is drawn is such a word of any of the texts.
    """
    rows = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    tokens = model.get_input_embeddings().num_embeddings  # the tokenizer may have fewer
    names = [name or "" for name in tokenizer.convert_ids_to_tokens(range(tokens))]
    starts = [name[:1] in WORD_START and name[1:].isalpha() for name in names]
    inner = [name[:1] not in WORD_START and (name[:1].isalnum() or name[:1] == "'") for name in names]
    before = [list(ids) for ids in rows]
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    whole = [_whole_words(ids, starts, inner) for ids in rows]
    words = torch.zeros(len(names), dtype=torch.bool)
    words[[ids[place] for ids, places in zip(rows, whole, strict=True) for place in places]] = True
    generator = torch.Generator().manual_seed(seed)
    drawn = iter(torch.rand(sum(map(len, whole)), generator=generator).tolist())
    chosen = [[place for place in places if next(drawn) < noise] for places in whole]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # alike in length: little padding
    with progress_bar("prepare: copies with other words", len(rows), enabled=True) as bar:
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            _replace(part, rows, chosen, model, opening, words, generator)
            bar.advance(len(part))
    replaced = sum(a != b for ids, first in zip(rows, before, strict=True) for a, b in zip(ids, first, strict=True))
    return [tokenizer.decode(ids) for ids in rows], replaced / max(1, sum(map(len, whole)))


def _whole_words(ids: Sequence[int], starts: Sequence[bool], inner: Sequence[bool]) -> list[int]:
    """Places of words that are one token; the first token is left out, since nothing says what may begin a sentence.

    starts, inner: ``(V,)`` tokens that begin a word after a space, and tokens that go on with one.
    """
    ends = [*(not inner[token] for token in ids[1:]), True]
    return [place for place in range(1, len(ids)) if starts[ids[place]] and ends[place]]


@torch.no_grad()
def _replace(
    part: Sequence[int],
    rows: list[list[int]],
    chosen: Sequence[Sequence[int]],
    model: Any,
    opening: int,
    words: Tensor,
    generator: torch.Generator,
) -> None:
    """Put other words, of ``words`` ``(V,)``, in the chosen places of these rows."""
    places = [(index, place) for index, row in enumerate(part) for place in chosen[row]]
    if not places:
        return
    ids, mask = pad([[opening, *rows[row]] for row in part], device=model.device)
    states = hidden_states(model, ids, mask)
    # The state before a token is at the token's place, since the opening stands before the first.
    picked = states[[index for index, _ in places], [place for _, place in places]]
    scores = logits_of(model, picked).float().cpu()
    likely = scores.masked_fill(~words, -torch.inf).softmax(-1)
    new = torch.multinomial(likely, 1, generator=generator).squeeze(1)
    for (index, place), token in zip(places, new.tolist(), strict=True):
        rows[part[index]][place] = token


def _made(count: int, seed: int, tokenizer: Any, shortest: int, longest: int) -> list[str]:
    """Different sentences of stories that wpr-pico writes, so many at least."""
    found: dict[str, None] = {}
    part, at_once, last_new = 0, min(STORIES_AT_ONCE, max(8, count // 4)), 0
    while len(found) < count:
        if part - last_new > ROUNDS_WITHOUT_NEW:
            raise DataError(
                f"wpr-pico wrote {len(found)} different sentences of {shortest} to {longest} tokens, and none in the "
                f"last {part - last_new} of {part} rounds; lower prepare.options.count={count}, or allow more lengths "
                "(prepare.options.shortest, longest)"
            )
        before = len(found)
        stories = sample([""] * at_once, STORY_TOKENS, seed, part, f"stories, {len(found)} sentences so far")
        found |= dict.fromkeys(
            _fitting((text for story in stories for text in sentences(story)), tokenizer, shortest, longest)
        )
        part += 1
        last_new = part if len(found) > before else last_new
    return list(found)


def _read(source: str | list[str] | None, format: str | None) -> list[str]:
    """The sentences of a file with one per line, or those of a dataset's responses."""
    if isinstance(source, str) and source.lower().endswith(".txt"):
        try:
            return Path(source).expanduser().read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.source={source} cannot be read ({error}); name a text file in UTF-8") from None
    if format is None:
        raise DataError(
            f"data.source={source} is no .txt file with one sentence per line; name one, or say how it is read, "
            "prepare.options.format=hh (docs/data.md)"
        )
    corpus = load_corpus(DataSettings(format, source, bad_rows="skip"))
    return [text for row in corpus.rows if row.chosen for line in row.chosen.splitlines() for text in sentences(line)]


def _fitting(
    texts: Iterable[str], tokenizer: Any, shortest: int, longest: int, left_out: Counter[str] | None = None
) -> list[str]:
    """Different texts of the right length that end as a sentence does and quote nobody; ``left_out`` counts the others,
    by the reason.
    """
    counts = Counter[str]() if left_out is None else left_out
    clean = [text for text in (re.sub(r"\s+", " ", text).strip() for text in texts) if text]
    different, kept = list(dict.fromkeys(clean)), []
    counts["repeated"] += len(clean) - len(different)
    for text in different:
        if not re.search(ENDING, text):
            counts["without . ! or ? at the end"] += 1
        elif '"' in text:
            counts["with a quotation mark"] += 1
        else:
            kept.append(text)
    lengths = list(map(len, tokenizer(kept, add_special_tokens=False)["input_ids"])) if kept else []
    counts[f"shorter than {shortest} tokens"] += sum(length < shortest for length in lengths)
    counts[f"longer than {longest} tokens"] += sum(length > longest for length in lengths)
    for reason in [reason for reason, number in counts.items() if not number]:
        del counts[reason]
    return [text for text, length in zip(kept, lengths, strict=True) if shortest <= length <= longest]


def _load(model: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    return loaded, AutoTokenizer.from_pretrained(model)
