"""A judge behind an OpenAI-compatible server, asked with the `openai` client.

Retries, waits and the pace are those of `wpr.evaluation.judging.asking`: the client's own are switched off, so that
each attempt is counted once. Bodies are read up to a limit, and what a server says is kept without the key.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from wpr.evaluation.judging.pacing import asked_wait
from wpr.evaluation.judging.questions import (
    JudgingError,
    JudgingSettingsError,
    Message,
    PassingError,
    RefusedError,
    Reply,
)
from wpr.evaluation.judging.redaction import Secret, checked_address, is_here, shown

if TYPE_CHECKING:
    import openai

OPENAI = "https://api.openai.com/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "no-key"
"""Sent to a server where there is no key: the protocol wants one, servers on one's own machine check none."""
SETTINGS: Mapping[str, Any] = {"temperature": 0, "max_tokens": 512}
RESERVED = ("model", "messages", "stream", "n", "key", "api_key", "authorization")
LARGEST_BODY = 2_000_000
"""Bytes of an answer; one of 512 tokens has a few thousand."""

PASSING = (408, 409, 425, 429)
"""And all from 500 on: worth another attempt. Others below 500 are not."""
ONE_QUESTION = (400, 413, 422)
"""Refused because of what this request holds, for instance a text longer than the model's context."""

_TRANSPORT = logging.getLogger("httpcore2")


class ServerJudge:
    """Chat completions of one model.

    settings: what else the request's body has, for instance ``temperature`` and ``max_tokens``; None leaves one out.
    key_variable: the environment variable that holds the key.
    """

    def __init__(
        self,
        model: str,
        base_url: str = OPENAI,
        key_variable: str = KEY_VARIABLE,
        settings: Mapping[str, Any] | None = None,
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self.model = model
        self.base_url = checked_address(base_url)
        self.secret = Secret.from_environment(key_variable)
        if self.secret is None and self.base_url == OPENAI:
            raise JudgingSettingsError(
                f"{self.base_url} needs a key, and the environment variable {key_variable} is not set; set it (keys "
                "are taken from the environment only), or name another server or variable"
            )
        self.settings = {name: value for name, value in {**SETTINGS, **(settings or {})}.items() if value is not None}
        for name in self.settings:
            if name.lower().replace("-", "_") in RESERVED:
                raise JudgingSettingsError(
                    f"the setting {name!r} of requests is not free; leave it out (keys come from the environment only)"
                )
        self.largest_body = largest_body
        self.name = model.rstrip("/").rsplit("/", 1)[-1]
        self.identity: Mapping[str, Any] = {"server": self.base_url, "model": model, "settings": self.settings}
        limits = [self.settings.get(name) for name in ("max_tokens", "max_completion_tokens")]
        self.answer_tokens = max([limit for limit in limits if isinstance(limit, int)], default=4096)
        self._client: openai.AsyncOpenAI | None = None
        self._level = logging.NOTSET

    @property
    def warning(self) -> str | None:
        """What is to be said before a key goes out in the open."""
        if self.secret is None or self.base_url.startswith("https://") or is_here(self.base_url):
            return None
        return f"the key is sent unencrypted to {self.base_url}; use https where the network is not your own"

    async def __aenter__(self) -> Self:
        self._client = _client(self.base_url, self.secret, self.largest_body)
        # At its lowest level the transport logs the headers of answers, where a server may have put the key.
        self._level = _TRANSPORT.level
        _TRANSPORT.setLevel(max(self._level, logging.INFO))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()
            _TRANSPORT.setLevel(self._level)
            self._client = None

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """See `RemoteJudge.reply`."""
        import openai

        if self._client is None:
            raise RuntimeError("the judge is not connected; use `async with judge:`")
        try:
            answered = await self._client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[dict(message) for message in messages],  # type: ignore[misc]
                extra_body=self.settings,
            )
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__
            told = "the connection failed" if cause is None else f"{type(cause).__name__}: {cause}"
            raise PassingError(shown(told, self.secret)) from None
        except openai.OpenAIError as error:
            raise JudgingError(f"the openai client failed: {shown(str(error), self.secret)}") from None
        return read_reply(answered.http_response.text, self.secret)

    def _refusal(self, error: openai.APIStatusError) -> Exception:
        """What a status other than success means for the question and for the evaluation."""
        status, headers = error.status_code, error.response.headers
        told = f"HTTP {status}: {shown(_message(error.body) or error.response.reason_phrase, self.secret)}"
        if status == 429 and error.code == "insufficient_quota":
            return JudgingError(f"the account of {self.base_url} has nothing left ({told}); add credit and run again")
        if status in PASSING or status >= 500:
            return PassingError(told, asked_wait(headers, time.time()), everyone=status in (429, 503))
        if status in ONE_QUESTION:
            return RefusedError(told)
        remedy = {
            401: "check the key in the environment",
            402: "the account has to be paid",
            403: "the key may not use this model or server",
            404: "check the base URL (it usually ends in /v1) and the model's name",
        }.get(status, "check the base URL, and what the server's own log says")
        return JudgingError(f"{self.base_url} refused the model {self.model!r} with {told}; {remedy}")


def read_reply(body: str, secret: Secret | None) -> Reply:
    """The answer in a response's body. A body that is no chat completion may be one at the next attempt."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        text = choice["message"].get("content")
        refusal = choice["message"].get("refusal")
    except (ValueError, RecursionError):
        raise PassingError(f"the answer is not JSON: {shown(body, secret, 80)!r}") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise PassingError(f"the answer is no chat completion: {shown(body, secret, 80)!r}") from None
    text = refusal if text is None else text
    if not isinstance(text, str | None):
        raise PassingError(f"the answer's content is a {type(text).__name__}, not a text")
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    ended = choice.get("finish_reason")
    text = (text or "").encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be written
    return Reply(
        secret.remove_from(text) if secret is not None else text,
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        ended[:40] if isinstance(ended, str) else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(body: object) -> str:
    """What an error's body says; servers put it in different places."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), json.dumps(body))
    return body if isinstance(body, str) else json.dumps(body) if body else ""


def _client(base_url: str, secret: Secret | None, largest_body: int) -> openai.AsyncOpenAI:
    try:
        import httpx2
        import openai
    except ImportError as error:
        raise JudgingSettingsError(
            f"a judge behind a server needs the openai package ({error}); install it with `pip install 'wpr[judge]'`"
        ) from None

    class LimitedClient(httpx2.AsyncClient):
        """Reads no more of a body than the limit, whatever the status, and before anybody looks at it."""

        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            response = await super().send(request, **{**options, "stream": True})
            body = bytearray()
            try:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > largest_body:
                        raise PassingError(
                            f"HTTP {response.status_code} with a body of more than {largest_body:,} bytes, which was "
                            "not read further"
                        )
            finally:
                await response.aclose()
            kept = [
                (name, value)
                for name, value in response.headers.multi_items()
                if name.lower() not in ("content-encoding", "content-length", "transfer-encoding")
            ]
            return httpx2.Response(response.status_code, headers=kept, content=bytes(body), request=request)

    return openai.AsyncOpenAI(
        api_key=NO_KEY if secret is None else secret.reveal(),
        base_url=base_url,
        max_retries=0,
        timeout=None,  # the whole request has a limit of its own
        # No redirects: the key goes where the user sent it.
        http_client=LimitedClient(timeout=None, follow_redirects=False, limits=httpx2.Limits()),
    )
