"""The notebooks of examples/notebooks, without executing them (`make notebooks` does): they are whole, were executed
from top to bottom, and use names and settings that there are.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import wpr
from wpr.config.recipe_file import load_recipe
from wpr.pipeline.from_python import _as_yaml, _dotted
from wpr.report.figures import Plots

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OURS = {"policies", "overrides", "on_change", "quiet"}


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def tree(path: Path) -> ast.Module:
    return ast.parse("\n".join("".join(cell["source"]) for cell in cells(path, "code")))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


def test_it_was_executed_from_top_to_bottom(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 2, "its figures are the package's"
    assert not any(output.get("name") == "stderr" for output in outputs), "a reader would take warnings for faults"
    home = re.compile(r"(?<![\w.:/])/(?:home|root|work|tmp|Users|opt|usr)/")
    assert not home.search(json.dumps(outputs)), "paths of the machine that it was executed on"


def test_its_names_are_known(notebook: Path) -> None:
    checked = 0
    for node in ast.walk(tree(notebook)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wpr":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
                checked += 1
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "wpr":
            assert hasattr(wpr, node.attr)
            checked += 1
        if isinstance(node.value, ast.Name) and node.value.id == "run":
            # What is set when a run is read is no attribute of the class.
            assert hasattr(wpr.LoadedRun, node.attr) or node.attr in {"plot", "policies", "evaluations", "analyses"}
            checked += 1
        if isinstance(node.value, ast.Attribute) and node.value.attr == "plot":
            assert hasattr(Plots, node.attr)
    assert checked >= 3


def test_its_recipes_and_links_are_there(notebook: Path) -> None:
    for node in ast.walk(tree(notebook)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "wpr.run":
            name = ast.literal_eval(node.args[0])
            given = {one.arg or "": ast.literal_eval(one.value) for one in node.keywords if one.arg not in OURS}
            load_recipe(name, [f"{key}={_as_yaml(key, value)}" for key, value in _dotted(given)])
    for cell in cells(notebook, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
            assert target.startswith("http") or (FOLDER / target).exists(), target
