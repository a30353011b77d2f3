"""The forms in which a server may give a key away, and whether one of them is in what was written or printed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from urllib.parse import quote


def _every(text: str, form: str) -> str:
    return "".join(form.format(ord(letter)) for letter in text)


FORMS: Mapping[str, Callable[[str], str]] = {
    "as it is": lambda key: key,
    "in base64": lambda key: base64.b64encode(key.encode()).decode(),
    "in base64 for addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "in base64 without padding": lambda key: base64.b64encode(key.encode()).decode().rstrip("="),
    "in base64 for addresses without padding": lambda key: base64.urlsafe_b64encode(key.encode()).decode().rstrip("="),
    "in base64 behind a name": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "in base64 within a text": lambda key: base64.urlsafe_b64encode(f"me:{key}\n".encode()).decode(),
    "quoted for addresses": lambda key: quote(key, safe=""),
    "with every letter quoted": lambda key: _every(key, "%{:02x}"),
    "quoted twice": lambda key: quote(_every(key, "%{:02X}")),
    "as JSON": lambda key: json.dumps(key),
    "as JSON with slashes": lambda key: json.dumps(key).replace("/", "\\/"),
    "as JSON with escapes": lambda key: _every(key, "\\u{:04x}"),
    "as JSON with large escapes": lambda key: _every(key, "\\u{:04X}"),
    "as JSON with one escape": lambda key: key[:5] + f"\\u{ord(key[5]):04x}" + key[6:],
    "as JSON within JSON": lambda key: json.dumps(_every(key, "\\u{:04x}")),
    "as JSON within an address": lambda key: quote(_every(key, "\\u{:04x}")),
    "in hex": lambda key: key.encode().hex(),
    "in large hex": lambda key: key.encode().hex().upper(),
    "with zeros between": lambda key: "\0".join(key),
}


def reveals(text: str, key: str) -> list[str]:
    """The forms of the key that are in a text, also after its escapes are undone; the tail of the key counts for it."""
    undone = [text]
    for _ in range(4):
        last = re.sub(r"\\+u00(..)|%(..)", lambda found: _letter(found[1] or found[2]), undone[-1])
        undone += [last, last.replace("\\", ""), last.replace("\\\\", "\\").replace('\\"', '"')]
    data = key.encode()
    wanted = {"the key": key, "its tail": key[8:], "without backslashes": key.replace("\\", ""), "hex": data.hex()}
    for name, encode in (("base64", base64.b64encode), ("base64 for addresses", base64.urlsafe_b64encode)):
        for before in range(3):
            wanted[f"{name} behind {before}"] = encode(bytes(before) + data).decode()[4:-4]
    return [name for name, form in wanted.items() if any(form.lower() in one.lower() for one in undone)]


def _letter(code: str) -> str:
    try:
        return chr(int(code, 16))
    except ValueError:
        return code
