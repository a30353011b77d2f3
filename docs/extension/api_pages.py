"""Reference of the Python API: every public name once, grouped by what it is for."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wpr

GROUPS: dict[str, tuple[str, str]] = {
    "wpr.regularizers": ("regularizers", "Regularizers"),
    "wpr.transport": ("geometry", "Geometry and transport"),
    "wpr.ppo": ("ppo", "PPO"),
    "wpr.divergence_monitor": ("ppo", "PPO"),
    "wpr.trl": ("trl", "TRL's trainers"),
    "wpr.verl": ("verl", "verl"),
    "wpr.rewards": ("rewards", "Rewards"),
    "wpr.rewards.code": ("code-rewards", "Code rewards"),
    "wpr.data": ("data", "Data"),
    "wpr.config": ("recipes", "Recipes"),
    "wpr.pipeline": ("recipes", "Recipes"),
    "wpr.runs": ("runs", "Runs"),
    "wpr.evaluation": ("evaluation", "Evaluation"),
    "wpr.evaluation.judging": ("judging", "Judging"),
    "wpr.findings": ("evaluation", "Evaluation"),
    "wpr.analysis": ("analysis", "Analyses"),
    "wpr.report": ("report", "Reports"),
    "wpr.pico": ("models", "Models"),
    "wpr": ("other", "More"),
}
"""Page and title of what is defined in a module, by the longest of these that it begins with."""

ALSO = ("wpr.config.recipe_file.load_recipe", "wpr.pico.path")
"""Public names that are in no ``__all__``, beside those that the pages import."""

PAGES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PublicName:
    """Something that users import.

    path: where from, the shortest way. module: where it is defined.
    """

    path: str
    module: str
    value: Any

    @property
    def name(self) -> str:
        """Without its module."""
        return self.path.rpartition(".")[2]

    @property
    def page(self) -> tuple[str, str]:
        """File name and title of its page."""
        prefix = max((p for p in GROUPS if self.module == p or self.module.startswith(p + ".")), key=len)
        return GROUPS[prefix]


def public_names() -> list[PublicName]:
    """Every name in an ``__all__`` of the package, those that the pages import, and `ALSO`, by their shortest paths."""
    paths = [f"{module}.{name}" for module in _modules() for name in importlib.import_module(module).__all__]
    found: dict[int | str, PublicName] = {}
    for path in sorted({*paths, *_imported(), *ALSO}, key=lambda path: (path.count("."), path)):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        own = inspect.isclass(value) or inspect.isroutine(value)
        key = id(value) if own else name
        if key not in found:
            found[key] = PublicName(path, value.__module__ if own else module, value)
    return list(found.values())


def _imported() -> Iterator[str]:
    """What the Python blocks of the pages import from the package, but for modules."""
    for page in sorted(PAGES.glob("*.md")):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wpr":
                    module = importlib.import_module(str(node.module))
                    own = [one.name for one in node.names if not inspect.ismodule(getattr(module, one.name, module))]
                    yield from (f"{node.module}.{name}" for name in own)


def _modules() -> Iterator[str]:
    """Modules with an ``__all__``: those whose source says so, so that no others need importing."""
    yield "wpr"
    for module in pkgutil.walk_packages(wpr.__path__, "wpr."):
        spec = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        source = spec.loader.get_source(module.name) if spec and spec.loader else None  # type: ignore[attr-defined]
        if source and "\n__all__ = [" in source:
            yield module.name


def pages() -> dict[str, str]:
    """A page per group, and one that lists them."""
    grouped: dict[tuple[str, str], list[PublicName]] = {}
    for name in public_names():
        grouped.setdefault(name.page, []).append(name)
    order = list(dict.fromkeys(GROUPS.values()))
    grouped = dict(sorted(grouped.items(), key=lambda item: order.index(item[0])))
    index = [
        "# Python API",
        "",
        "Every public class and function, by what it is for, with the path to import it from.",
        "",
        "| what for | names |",
        "|---|---|",
        *(
            f"| [{title}](api-{file}.rst) | {', '.join(f'`{name.name}`' for name in names)} |"
            for (file, title), names in grouped.items()
        ),
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *(f"api-{file}" for file, _ in grouped),
        "```",
        "",
    ]
    made = {f"reference/api-{file}.rst": _page(title, names) for (file, title), names in grouped.items()}
    return {"reference/api.md": "\n".join(index)} | made


def _page(title: str, names: list[PublicName]) -> str:
    heading = f"{title}: API"
    lines = [heading, "=" * len(heading), ""]
    for name in names:
        shown, module = name.name, name.path.removesuffix(f".{name.name}")
        kind = "class" if inspect.isclass(name.value) else "function" if inspect.isroutine(name.value) else "data"
        lines += [shown, "-" * len(shown), "", f"``from {module} import {shown}``", "", f".. auto{kind}:: {name.path}"]
        if kind == "class" and issubclass(name.value, BaseException):
            lines[-1] = f".. autoexception:: {name.path}"
        if shown == "PPOConfig":
            lines += ["   :no-members:", "", "   Every setting: :doc:`trainer-settings`."]
        lines.append("")
    return "\n".join(lines)
