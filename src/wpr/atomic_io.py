"""Files that are there as a whole or not at all, and paths that nothing has yet."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file by a complete new one, or leave it as it was. Text is written as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def unused_path(path: Path, separator: str = "-") -> Path:
    """The path, or what it is called with the first number, from 2 on, that makes it new."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}{separator}{number}")
    return found
