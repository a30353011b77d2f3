"""Names of a run's stages. They name folders too, and a manifest may come from anywhere: `..` must not get far."""

from __future__ import annotations

import re

FOLDER_NAME = r"\w[\w.=+-]*"
"""What recipes, policies and sweeps may be called: one folder, neither hidden nor elsewhere."""


def is_stage(name: str) -> bool:
    """Whether a run can have a stage of this name: ``prepare``, ``sft``, ``reward`` or ``ppo/POLICY``."""
    return re.fullmatch(rf"prepare|sft|reward|ppo/{FOLDER_NAME}", name) is not None
