"""Fixtures of the judges' tests."""

from __future__ import annotations

import pytest

from tests.evaluation.judging.asked import KEY


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """A key in the environment, and no server in it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return KEY
