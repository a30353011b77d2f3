"""The one place where text becomes tokens, so that SFT, the reward model and PPO see the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wpr.data.dialogues import render_transcript
from wpr.data.rows import DataError, Message, Row, prompt_messages
from wpr.data.settings import DataSettings

_PROBE = "wpr7probe"


class Encoder:
    """Prompts and completions of rows as token ids.

    chat: whether prompts go through the tokenizer's chat template.
    end_id: the token that ends a completion: the template's own end of turn in a chat, otherwise the end of sequence.
    """

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if settings.template == "chat" and not has_template:
            raise DataError(
                f"data.template is chat, but the tokenizer {_name(tokenizer)} has no chat template; use template: "
                "text, or an instruction-tuned model's tokenizer"
            )
        self.chat = has_template and settings.template != "text"
        self.opening = self._opening()
        self.end_id = self._end()

    @property
    def padding_id(self) -> int:
        """A padding token that is not `end_id`.

        Sequence classifiers take the score at the last token that is not padding. Where both are one token (as in many
        tokenizers, and by default where there is no padding token), a reward model is trained on the score *before* the
        end token, and PPO then asks for the one *at* it.
        """
        tokenizer = self.tokenizer
        for token in (tokenizer.pad_token_id, *sorted(tokenizer.all_special_ids)):
            if token is not None and token != self.end_id:
                return int(token)
        raise DataError(
            f"the tokenizer {_name(tokenizer)} has no special token but its end token to pad with; add one: "
            "tokenizer.add_special_tokens({'pad_token': '<pad>'}), and resize the models' embeddings"
        )

    def prompt_value(self, row: Row) -> str | list[Message]:
        """The prompt as reward functions see it: chat messages, or the text that the model continues."""
        if self.chat:
            return prompt_messages(row.prompt)
        return row.prompt if isinstance(row.prompt, str) else render_transcript(row.prompt, answer=True)

    def prompt(self, row: Row) -> list[int]:
        """Ids of the prompt, with whatever the tokenizer or the template puts before it."""
        return self.encode(row, [])[0]

    def completion(self, row: Row, text: str) -> list[int]:
        """Ids of one completion of the row's prompt, with the end token."""
        return self.encode(row, [text])[1][0]

    def encode(self, row: Row, texts: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Ids of the row's prompt, and of completions of it, each with the end token.

        A completion is what the ids of prompt and completion have after those of the prompt. Where that is not so for
        all of them, since tokens may merge across the seam, all are tokenized by themselves: PPO draws responses after
        the prompt's own ids, and of two completions that are compared none should stand out by its first token.
        """
        prompt = self._prompt_text(row)
        texts = [self._continuation(prompt, text) for text in texts]
        start, *wholes = self._bare([prompt, *(prompt + text for text in texts)])
        if all(whole[: len(start)] == start for whole in wholes):
            completions = [whole[len(start) :] for whole in wholes]
        else:
            completions = self._bare(texts)
        return [*self.opening, *start], [[*ids, self.end_id] for ids in completions]

    def _continuation(self, prompt: str, text: str) -> str:
        if self.chat:
            return text.strip()  # as most templates do with a turn's content
        return text if prompt[-1:].isspace() or text[:1].isspace() else " " + text

    def _prompt_text(self, row: Row) -> str:
        value = self.prompt_value(row)
        if isinstance(value, str):
            return value
        return self._render(value, row.origin, add_generation_prompt=True)

    def _render(self, messages: list[Message], origin: str, **options: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # templates refuse what they do not know, in the template engine's words
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{origin or 'a row'}: the chat template of {_name(self.tokenizer)} refuses a dialogue of the turns "
                f"{roles} ({' '.join(str(error).split())[:200]}); use data.template: text, or leave such rows out"
            ) from error

    def _bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, without any special tokens around them."""
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    def _opening(self) -> list[int]:
        """What the tokenizer puts before a text; a template brings its own. What it puts after it is left out."""
        if self.chat:
            return []
        bare = self._bare([_PROBE])[0]
        full = list(self.tokenizer(_PROBE)["input_ids"])
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        raise DataError(
            f"the tokenizer {_name(self.tokenizer)} gives a text other ids with special tokens than without, beyond "
            "those around it; use a tokenizer of a causal language model"
        )

    def _end(self) -> int:
        if self.chat:
            question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}
            after = self._render([question, answer], "").rpartition(_PROBE)[2]
            special = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
            special.update(self.tokenizer.all_special_ids)
            for token in self._bare([after])[0]:
                if token in special:
                    return token
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer {_name(self.tokenizer)} has no end-of-sequence token, so that no completion can end; "
                "set tokenizer.eos_token"
            )
        return int(self.tokenizer.eos_token_id)


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
