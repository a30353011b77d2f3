"""Everything that is shipped and is no code has its origin and licence stated; CITATION.cff agrees with the package."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

from wpr import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "wpr"
PAGE = (ROOT / "docs" / "licences.md").read_text()


def stated(section: str) -> list[str]:
    """The patterns in the first column of a section's table; each row has an origin and a licence."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    assert all(len(row) == 4 and all(row) for row in rows)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_data_file_of_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["wpr"]
    shipped = {str(path.relative_to(PACKAGE)) for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert len(shipped) > 25
    known = stated("In the package")
    assert [name for name in sorted(shipped) if not any(fnmatch(name, pattern) for pattern in known)] == []
    for pattern in known:
        assert any(fnmatch(name, pattern) for name in shipped), f"{pattern} is stated, and not shipped"


def test_every_data_file_is_shipped() -> None:
    """What the code reads from its folder must be among the package's data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["wpr"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there if path.suffix != ".py"} == shipped


def test_what_the_repository_has_beside_it() -> None:
    known = stated("In the repository only")
    assert all((ROOT / name).exists() for name in known)
    for path in [*(ROOT / "tests" / "golden").iterdir(), *(ROOT / "scripts").rglob("*.txt")]:
        name = str(path.relative_to(ROOT))
        assert any(name == one or (one.endswith("/") and name.startswith(one)) for one in known), name


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert f"\n## {__version__} ({citation['date-released']})\n" in (ROOT / "CHANGELOG.md").read_text()
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Na", "Na", "Kim", "Jo", "Bae", "Kang", "Moon"]
