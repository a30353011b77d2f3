"""Reference of the `wpr` command: every command and option, from the help texts."""

from __future__ import annotations

import re
from typing import Any

from typer.main import get_command

from docs.extension.docstrings import as_markdown, paragraphs
from wpr.cli import app


def pages() -> dict[str, str]:
    """A page per command, and one that lists them."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    index = [
        "# Commands",
        "",
        "`wpr COMMAND --help` says the same. `--debug`, wherever it stands, shows tracebacks; `wpr --version` prints "
        "the version.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`wpr {name}`](command-{name}.md) | {_first(command)} |" for name, command in commands.items()),
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *(f"command-{name}" for name in commands),
        "```",
        "",
    ]
    made = {f"reference/command-{name}.md": "\n\n".join(_page(name, own)) + "\n" for name, own in commands.items()}
    return {"reference/commands.md": "\n".join(index)} | made


def _first(command: Any) -> str:
    return _prose(re.split(r"(?<=\.)\s", command.help)[0])


def _page(name: str, command: Any, level: int = 1) -> list[str]:
    parts = [f"{'#' * level} `wpr {name}`", *_help(command.help)]
    if hasattr(command, "commands"):
        for own, part in command.commands.items():
            parts += _page(f"{name} {own}", part, level + 1)
        return parts
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = "".join(f" {_placeholder(one)}" if one.required else f" [{_placeholder(one)}]" for one in arguments)
    parts.insert(1, f"```text\nwpr {name} [OPTIONS]{words}\n```")
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if one not in arguments and one.name != "help":
            panels.setdefault(one.rich_help_panel or "Options", []).append(one)
    if arguments:
        parts.append(_table("argument", arguments))
    for title, options in panels.items():
        parts.append(f"**{title}**")
        parts.append(_table("option", options))
    return parts


def _table(kind: str, parameters: list[Any]) -> str:
    rows = [f"| {kind} | default | what it does |", "|---|---|---|"]
    for one in parameters:
        if kind == "argument":
            shown = f"`{_placeholder(one)}`".replace("|", "\\|")
        else:
            shown = ", ".join(f"`{option}`" for option in [*one.opts, *one.secondary_opts])
        rows.append(f"| {shown} | {_default(one)} | {_prose(one.help or '')} |")
    return "\n".join(rows)


def _placeholder(argument: Any) -> str:
    """What stands for an argument, without the brackets of one that may be left out."""
    return (argument.metavar or argument.name.upper()).strip("[]")


def _default(one: Any) -> str:
    if one.required:
        return "required"
    if isinstance(one.show_default, str):
        return as_markdown(one.show_default)
    if one.default in (None, False, ()) or not one.show_default:
        return ""
    return f"`{getattr(one.default, 'value', one.default)}`"


def _help(text: str) -> list[str]:
    """Prose and examples; lines that stand further in are commands."""
    parts: list[str] = []
    for paragraph in paragraphs(text):
        if inline := re.match(r"\[bold\](Examples?)\[/bold\]: *(.*)", paragraph, re.S):
            examples = "\n".join(one.strip() for one in " ".join(inline[2].split()).split("   |   "))
            parts += [f"**{inline[1]}**", f"```bash\n{examples}\n```"]
        elif paragraph[0].isspace():
            code = "\n".join(line.strip() for line in paragraph.splitlines())
            if parts and parts[-1].startswith("```bash"):
                parts[-1] = parts[-1].removesuffix("\n```") + f"\n{code}\n```"
            else:
                parts.append(f"```bash\n{code}\n```")
        else:
            parts.append(_prose(paragraph))
    return parts


def _prose(text: str) -> str:
    """Typer's markup as Markdown."""
    parts = [as_markdown(part) for part in re.split(r"\[/?bold\]", text)]
    parts[1::2] = [f"**{part}**" for part in parts[1::2]]
    return "".join(parts)
