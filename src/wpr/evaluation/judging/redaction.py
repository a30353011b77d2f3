"""Keys: where they come from, and how they are kept out of everything that is written or shown.

What a server says is cleaned at two places, both after it was decoded: `wpr.evaluation.judging.server.read_reply`
cleans what is stored, `shown` what is quoted in messages.
"""

from __future__ import annotations

import base64
import json
import os
import re
from itertools import islice
from urllib.parse import quote, unquote_to_bytes, urlsplit

from wpr.evaluation.judging.questions import JudgingSettingsError

REMOVED = "[key removed]"
SHORTEST = 8
"""Shorter keys are taken for placeholders ("none", "EMPTY") of servers that check none."""


class Secret:
    """A key that shows itself only when asked for."""

    def __init__(self, value: str) -> None:
        self._value = value
        self._forms = _forms(value)
        self._unescaped_forms = {
            plain for form in self._forms if (plain := _unescaped(form)) and len(plain) >= SHORTEST
        }

    @classmethod
    def from_environment(cls, variable: str) -> Secret | None:
        """The key that an environment variable holds; None where it is not set."""
        value = os.environ.get(variable, "").strip()
        if not value:
            return None
        if not value.isascii() or not value.isprintable() or " " in value:
            raise JudgingSettingsError(
                f"the environment variable {variable} holds a key with a space, a line break or a letter that no key "
                "has; set it again"
            )
        return cls(value)

    def reveal(self) -> str:
        """The key itself, to be sent and for nothing else."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def remove_from(self, text: str) -> str:
        """The text without the key, as it is and as a server might have written it.

        Where the key is found only after escapes are undone, at whatever characters they are, nothing of the text is
        left: somebody who decodes it, a reader of JSON for instance, would have the key.
        """
        if len(self._value) < SHORTEST:
            return text
        lowered = text.lower()
        for form in self._forms:
            if form.lower() in lowered:  # in any case: a header's name, for one, comes in small letters
                text = re.sub(re.escape(form), REMOVED, text, flags=re.IGNORECASE)
        plain = _unescaped(text)
        return REMOVED if plain is None or any(form in plain for form in self._unescaped_forms) else text


def shown(text: str, secret: Secret | None, length: int = 300) -> str:
    """What a server said, fit for a message: without the key, control characters and line breaks, cut to a length."""
    text = secret.remove_from(text) if secret is not None else text
    words = re.finditer(r"[^\x00-\x1f\x7f-\x9f\s]+", text)
    text = " ".join(word.group() for word in islice(words, length))  # more of them are too long in any case
    return text if len(text) <= length else text[: length - 3] + "..."


def _forms(key: str) -> list[str]:
    """A key as JSON, addresses, base64 (in both alphabets, alone and within a longer text) and hex have it."""
    data = key.encode()
    forms = {key, json.dumps(key)[1:-1], key.replace("/", "\\/"), quote(key, safe=""), data.hex(), data.hex().upper()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        forms.add(encode(data).decode().rstrip("="))
        for before in range(3):  # bytes before it in its group of three, which decide how its own fall on characters
            encoded = encode(bytes(before) + data).decode()
            # Only the characters that no neighbour has a part in.
            forms.add(encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6])
    return sorted(forms, key=len, reverse=True)


_DROPPED = bytes(set(range(256)) - set(range(32, 127))) + b"\\"
DEEPEST, MOST = 5, 50_000
"""Escapes within each other, and escapes, of a text that is searched; one with more is removed as a whole."""


def _unescaped(text: str) -> bytes | None:
    """A text in lower case without its escapes: JSON's, those of addresses, and any of both within the other; without
    control characters, which could stand between the letters, too. None where there are more of them than an answer
    has.
    """
    plain = text.encode("ascii", "ignore").lower()
    for _ in range(DEEPEST + 1):
        escaped = plain.replace(b"\\u00", b"%").replace(b"\\x", b"%").translate(None, _DROPPED)
        if escaped.count(b"%") > MOST:
            return None
        before, plain = plain, unquote_to_bytes(escaped).lower()
        if plain == before:
            return plain
    return None


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
