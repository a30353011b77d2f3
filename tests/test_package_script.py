"""`make test-package` tries every extra that there is."""

from __future__ import annotations

import tomllib

from scripts.test_package import ROOT, SMOKE, requirements


def test_every_extra_has_something_to_try() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(SMOKE) == {"", *declared}


def test_requirements_of_an_extra_hold_those_of_the_ones_that_it_includes() -> None:
    assert set(requirements("plots")) < set(requirements("notebooks"))
    assert not any(one.startswith("wpr[") for one in requirements("dev"))
