"""What `make docs` adds to Sphinx: navigation, a reference made of the code, and checks of the finished site."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    from docs.extension import api_pages, checks, command_pages, docstrings, navigation, setting_pages

    def write_pages(app: Any) -> None:
        docs = Path(app.srcdir)
        made = api_pages.pages() | setting_pages.pages() | command_pages.pages() | navigation.pages(docs.parent)
        for folder in {(docs / name).parent for name in made}:
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.relative_to(docs).as_posix() not in made:
                    path.unlink()  # of an earlier build
        for name, text in made.items():
            if not (docs / name).is_file() or (docs / name).read_text(encoding="utf-8") != text:
                (docs / name).write_text(text, encoding="utf-8")

    app.connect("builder-inited", write_pages)
    app.connect("source-read", navigation.complete)
    app.connect("autodoc-process-docstring", docstrings.as_rst)
    app.connect("build-finished", checks.check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
