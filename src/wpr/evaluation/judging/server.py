"""A judge behind an OpenAI-compatible server, asked with the `openai` client.

Retries, waits and the pace are those of `wpr.evaluation.judging.asking`: the client's own are switched off, so that
each attempt is counted once. Bodies are read up to a limit, and what a server says is kept without the key. An answer
that cannot be read as HTTP, as text or as a chat completion has failed, and is asked for again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar
from typing import TYPE_CHECKING, Any, Self

from wpr.evaluation.judging.pacing import asked_wait
from wpr.evaluation.judging.questions import (
    JudgingError,
    JudgingSettingsError,
    Message,
    RefusedError,
    Reply,
    TransientError,
)
from wpr.evaluation.judging.redaction import Secret, checked_address, is_here, shown
from wpr.evaluation.judging.verdicts import load_json

if TYPE_CHECKING:
    import httpx2
    import openai

OPENAI = "https://api.openai.com/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "no-key"
"""Sent to a server where there is no key: the protocol wants one, servers on one's own machine check none."""
SETTINGS: Mapping[str, Any] = {"temperature": 0, "max_tokens": 512}
RESERVED = ("model", "messages", "stream", "n", "key", "api_key", "authorization")
LARGEST_BODY = 2_000_000
"""Bytes of an answer; one of 512 tokens has a few thousand."""
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "windows-1252")
"""Of answers that are read. Python knows others that decompress (zlib), or are slow beyond measure (punycode)."""
LARGEST_REFUSAL = 100_000
"""Characters of a refusal that are read, for the sentence in it."""
MOST_TOKENS = 100_000_000
"""Of a request. A larger number counts something else."""
WAITS = ("retry-after", "retry-after-ms")

PASSING = (408, 409, 425, 429)
"""And all from 500 on: worth another attempt. Others below 500 are not."""
ONE_QUESTION = (400, 413, 422)
"""Refused because of what this request holds, for instance a text longer than the model's context."""

_TRANSPORT = [logging.getLogger(name) for name in ("httpcore2", "httpx2")]


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
        self._levels: list[int] = []

    @property
    def warning(self) -> str | None:
        """What is to be said before a key goes out in the open."""
        if self.secret is None or self.base_url.startswith("https://") or is_here(self.base_url):
            return None
        return f"the key is sent unencrypted to {self.base_url}; use https where the network is not your own"

    async def __aenter__(self) -> Self:
        self._client = _client(self.base_url, self.secret, self.largest_body)
        # Below warnings the transport logs the status line and headers of answers, where a server may put the key.
        self._levels = [logger.level for logger in _TRANSPORT]
        for logger in _TRANSPORT:
            logger.setLevel(max(logger.level, logging.WARNING))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()
            for logger, level in zip(_TRANSPORT, self._levels, strict=True):
                logger.setLevel(level)
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
        except openai.OpenAIError as error:
            raise JudgingError(f"the openai client failed: {shown(str(error), self.secret)}") from None
        return read_reply(answered.http_response.text, self.secret)

    def _refusal(self, error: openai.APIStatusError) -> Exception:
        """What a status other than success means for the question and for the evaluation."""
        status, headers = error.status_code, error.response.headers
        message = f"HTTP {status}: {shown(_message(error.body) or error.response.reason_phrase, self.secret)}"
        if status == 429 and error.code == "insufficient_quota":
            return JudgingError(
                f"the account of {self.base_url} has nothing left ({message}); add credit and run again"
            )
        if status in PASSING or status >= 500:
            return TransientError(message, asked_wait(headers, time.time()), everyone=status in (429, 503))
        if status in ONE_QUESTION:
            return RefusedError(message)
        remedy = {
            401: "check the key in the environment",
            402: "the account has to be paid",
            403: "the key may not use this model or server",
            404: "check the base URL (it usually ends in /v1) and the model's name",
        }.get(status, "check the base URL, and what the server's own log says")
        return JudgingError(f"{self.base_url} refused the model {self.model!r} with {message}; {remedy}")


def read_reply(body: str, secret: Secret | None) -> Reply:
    """The answer in a response's body. A body that is no chat completion may be one at the next attempt."""
    try:
        found = load_json(body)
        choice = found["choices"][0]
        text = choice["message"].get("content")
        refusal = choice["message"].get("refusal")
    except (ValueError, RecursionError):
        raise TransientError(f"the answer is not JSON: {shown(body, secret, 80)!r}") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise TransientError(f"the answer is no chat completion: {shown(body, secret, 80)!r}") from None
    text = refusal if text is None else text
    if not isinstance(text, str | None):
        raise TransientError(f"the answer's content is a {type(text).__name__}, not a text")
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    ended = choice.get("finish_reason")
    text = (text or "").encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be written
    return Reply(
        secret.remove_from(text) if secret is not None else text,
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        shown(ended, secret, 40) if isinstance(ended, str) else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None


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
        """Reads no more of a body than the limit, whatever the status, and before anybody looks at it. Of an answer go
        on its status, its text and when to come again: nothing else, to log or to stumble over.
        """

        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            try:
                response = await super().send(request, **{**options, "stream": True})
                try:
                    text = await _text_of(response, largest_body, secret)
                finally:
                    await response.aclose()
                waits = {name: response.headers[name] for name in WAITS if name in response.headers}
                return httpx2.Response(response.status_code, headers=waits, text=text, request=request)
            except TransientError:
                raise
            except Exception as error:  # what headers and bodies make the client raise is no list that ends
                raise TransientError(shown(f"{type(error).__name__}: {error}", secret)) from None

    return openai.AsyncOpenAI(
        api_key=NO_KEY if secret is None else secret.reveal(),
        base_url=base_url,
        max_retries=0,
        timeout=None,  # the whole request has a limit of its own
        # No redirects: the key goes where the user sent it.
        http_client=LimitedClient(timeout=None, follow_redirects=False, limits=httpx2.Limits(), cookies=_NoCookies()),
    )


class _NoCookies(CookieJar):
    """Takes none: one that cannot be sent back would make every later request fail."""

    def extract_cookies(self, response: object, request: object) -> None:
        pass


async def _text_of(response: httpx2.Response, largest_body: int, secret: Secret | None) -> str:
    """The text of a body. What a refusal looks like does not matter; an answer has to be what it says it is."""
    status = f"HTTP {response.status_code}"
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > largest_body:
            raise TransientError(
                f"{status} with a body of more than {largest_body:,} bytes, which was not read further"
            )
    named = response.headers.get("content-type", "").lower().partition("charset=")[2]
    charset = named.replace(",", ";").partition(";")[0].strip(" \t\"'") or CHARSETS[0]
    if response.is_success:
        for name, value in response.headers.raw:
            if not (name + value).isascii():
                message = shown(name.decode("ascii", "replace"), secret, 40)
                raise TransientError(f"{status} with a header that is not ASCII: {message!r}")
        if charset not in CHARSETS:
            message = shown(charset, secret, 40)
            raise TransientError(f"{status} in the charset {message!r}, which is none of {', '.join(CHARSETS)}")
        return body.decode(charset, "replace")
    return body.decode(charset if charset in CHARSETS else CHARSETS[0], "replace")[:LARGEST_REFUSAL]
