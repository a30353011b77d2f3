"""Keys: where they come from, and how they are kept out of everything that is written or shown."""

from __future__ import annotations

import base64
import json
import os
import re
from urllib.parse import quote, urlsplit

from wpr.evaluation.judging.questions import JudgingSettingsError

REMOVED = "[key removed]"
SHORTEST = 8
"""Shorter keys are taken for placeholders ("none", "EMPTY") of servers that check none."""


class Secret:
    """A key that shows itself only when asked for."""

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def from_environment(cls, variable: str) -> Secret | None:
        """The key that an environment variable holds; None where it is not set."""
        value = os.environ.get(variable, "").strip()
        if not value:
            return None
        if not value.isascii() or not value.isprintable() or " " in value:
            raise JudgingSettingsError(
                f"the environment variable {variable} holds a key with a space, a line break or a letter that no key "
                "has; set it anew"
            )
        return cls(value)

    def reveal(self) -> str:
        """The key itself, to be sent and for nothing else."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def remove_from(self, text: str) -> str:
        """The text without the key, as it is and as a server might have written it."""
        if len(self._value) < SHORTEST:
            return text
        encoded = base64.b64encode(self._value.encode()).decode().rstrip("=")
        for form in {self._value, json.dumps(self._value)[1:-1], self._value.replace("/", "\\/"),
                     quote(self._value, safe=""), encoded}:  # fmt: skip
            text = text.replace(form, REMOVED)
        return text


def shown(text: str, secret: Secret | None, length: int = 300) -> str:
    """What a server said, fit for a message: without the key, control characters and line breaks, cut to a length."""
    text = secret.remove_from(text) if secret is not None else text
    text = re.sub(r"[\x00-\x1f\x7f-\x9f\s]+", " ", text).strip()
    return text if len(text) <= length else text[: length - 3] + "..."


def checked_address(address: str) -> str:
    """A server's base address in one form (it is part of what identifies an answer), with nothing secret in it."""
    try:
        parts = urlsplit(address.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise JudgingSettingsError("the base URL cannot be read; give it as http://localhost:8000/v1") from None
    # The address itself is not repeated in these: it may hold a secret.
    if parts.username is not None or parts.password is not None:
        raise JudgingSettingsError(
            "the base URL holds a user name or password; remove them and put the key into an environment variable"
        )
    if parts.query or parts.fragment:
        raise JudgingSettingsError(
            "the base URL holds a query (?...) or a fragment (#...); give the address alone, as "
            "http://localhost:8000/v1, and the key in an environment variable"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise JudgingSettingsError(f"base URL {address!r} must start with http:// or https:// and name a server")
    usual = {"http": 80, "https": 443}[parts.scheme]
    place = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{place}{'' if port in (None, usual) else f':{port}'}{parts.path.rstrip('/')}"


def is_here(address: str) -> bool:
    """Whether an address is of this machine."""
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
