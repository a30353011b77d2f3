"""The reference that `make docs` makes of the code: everything public is in it, with words."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re

import pytest
import typer.main

import wpr
from docs.extension import api_pages, command_pages, setting_pages
from docs.extension.docstrings import as_markdown, descriptions, escaped, plain_rst
from docs.extension.navigation import NAVIGATION, OUTSIDE, with_links
from tests.docs.pages import PAGES, ROOT, all_blocks, prose
from wpr.cli import app
from wpr.config.recipe import Recipe


def test_every_page_is_in_the_navigation() -> None:
    listed = [name for titles in NAVIGATION.values() for name in titles]
    assert len(listed) == len(set(listed))
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem in [*listed, "index"], f"give docs/{path.name} a place in docs/extension/navigation.py"
    assert {*OUTSIDE.values()} <= set(listed)
    assert all((ROOT / file).is_file() for file in OUTSIDE)


def test_links_lead_to_pages_of_the_site() -> None:
    text = "[a](../benchmarks/RESULTS.md#x) [b](ppo.md#y) [c](../README.md) [d](https://x.org/a.md) [e](x.py)"
    assert with_links(text, "trl") == (
        "[a](project/benchmark-results.md#x) [b](ppo.md#y) [c](index.md) [d](https://x.org/a.md) [e](x.py)"
    )
    assert with_links("[a](../docs/kernels.md)", "project/benchmark-results") == "[a](../kernels.md)"


def test_every_public_name_is_there_once_with_words() -> None:
    names = {name.path: name for name in api_pages.public_names()}
    assert {f"wpr.{name}" for name in wpr.__all__} <= names.keys()
    for module in ("wpr.rewards", "wpr.data", "wpr.trl", "wpr.evaluation.judging"):
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            assert any(known.value is value for known in names.values()), f"{module}.{name}"
    pages = "".join(text for name, text in api_pages.pages().items() if name.endswith(".rst"))
    for path, name in names.items():
        assert len(re.findall(rf":: {re.escape(path)}$", pages, re.M)) == 1, path
        if inspect.isclass(name.value) or inspect.isroutine(name.value):
            assert name.value.__doc__, f"{path} has no docstring"


def test_what_the_pages_import_is_in_the_reference() -> None:
    known = {name.value for name in api_pages.public_names() if inspect.isclass(name.value) or callable(name.value)}
    for block in all_blocks("python"):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wpr":
                for name in node.names:
                    value = getattr(importlib.import_module(str(node.module)), name.name, None)
                    if value is not None and not inspect.ismodule(value):
                        assert value in known, f"{block}: {node.module}.{name.name}; it is not in the reference"


def test_every_setting_is_described() -> None:
    kinds = [kind for kind, _ in setting_pages.SECTIONS.values()]
    for kind in [
        *kinds,
        setting_pages.GeometrySpec,
        setting_pages.WassersteinSettings,
        setting_pages.config_class("ppo"),
    ]:
        texts = setting_pages.field_texts(kind)
        missing = [field.name for field in dataclasses.fields(kind) if field.init and not texts.get(field.name)]
        assert not missing, f"{kind.__name__}: {missing}"
    page = setting_pages.pages()["reference/settings.md"]
    for field in dataclasses.fields(Recipe):
        assert not field.init or f"| `{field.name}` |" in page, field.name
    assert "| `data.bad_rows` |" in page
    assert "| `ppo.beta` |" in setting_pages.pages()["reference/trainer-settings.md"]


def test_every_command_and_option_is_there() -> None:
    pages = command_pages.pages()

    def check(command: object, words: str, page: str) -> None:
        if hasattr(command, "commands"):
            for name, part in command.commands.items():
                check(part, f"{words} {name}", page or f"reference/command-{name}.md")
            return
        section = re.split(r"^#+ ", pages[page].partition(f"# `{words}`\n")[2], maxsplit=1, flags=re.M)[0]
        for parameter in command.params:  # type: ignore[attr-defined]
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert all(f"`{option}`" in section for option in parameter.opts), f"{words} {parameter.name}"

    check(typer.main.get_command(app), "wpr", "")
    assert "```bash\nwpr run tiny\n" in pages["reference/command-run.md"]
    assert "[bold]" not in "".join(pages.values())


def test_rows_of_tables_have_all_cells() -> None:
    made = {**api_pages.pages(), **setting_pages.pages(), **command_pages.pages()}
    for name, text in made.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(cells) == 1, f"{name}: {table}"


def test_pages_that_are_linked_are_made() -> None:
    made = {**api_pages.pages(), **setting_pages.pages(), **command_pages.pages()}
    for page in PAGES:
        for target in re.findall(r"\]\((reference/[^)#\s]+)", prose(page)):
            assert target in made, f"{page}: {target}"


def test_docstrings() -> None:
    text = "r: rank. alpha, beta: scales of it, over r; see x: y.\nrho: that price\n    and more."
    assert descriptions(text, ["r", "alpha", "beta", "rho"]) == [
        (["r"], "rank."), (["alpha", "beta"], "scales of it, over r; see x: y."), (["rho"], "that price and more."),
    ]  # fmt: skip
    assert descriptions("The rank r: not of it", ["r"]) is None
    assert escaped("a*b |x| y_ `A_` ``b*``") == r"a\*b \|x\| y\_ `A_` ``b*``"
    assert as_markdown("a*b `x|y` ``z``") == r"a\*b `x\|y` `z`"
    assert plain_rst("Prose:\n    x = 1") == ["Prose:", "", ".. code-block:: none", "", "   x = 1"]


@pytest.mark.parametrize("kind", [int | None, list[str]])
def test_types_in_words(kind: object) -> None:
    assert setting_pages.type_text(kind) in ("integer or null", "list of text")
