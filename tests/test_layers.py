"""Imports go one way, and `import wpr` stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "wpr"
LAYERS = [
    "pico",
    "atomic_io",
    "damaged_files",
    "stage_names",
    "transport",
    "regularizers",
    "verl",
    "language_models",
    "rewards",
    "ppo",
    "trl_settings",
    "trl",
    "divergence_monitor",
    "findings",
    "data",
    "recipes",
    "errors",
    "config",
    "model_loading",
    "other_embeddings",
    "model_geometry",
    "runs",
    "evaluation",
    "analysis",
    "report",
    "pipeline",
    "reproduce",
    "commands",
    "cli",
]
"""From the bottom up: a layer imports none that stands after it."""


def imported_modules(path: Path, *, top_level: bool) -> set[str]:
    """Names of the modules that a file imports; only those imported when the file is, if ``top_level``."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_nothing_imports_upwards() -> None:
    checked = 0
    for path in SOURCE.rglob("*.py"):
        layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if path.parent == SOURCE and layer in ("__init__", "__main__"):  # the names of the whole
            continue
        assert layer in LAYERS, f"{layer} has no place among the layers"
        above = {f"wpr.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :]}
        for name in imported_modules(path, top_level=False):
            assert not any(name == upper or name.startswith(upper + ".") for upper in above), f"{path} imports {name}"
        checked += 1
    assert checked > 5


def test_transport_needs_torch_only() -> None:
    """Reading and writing files (safetensors) and the progress bar (rich) are imported where they are used, and so are
    the files of the kernels, which need Triton.
    """
    standard = sys.stdlib_module_names | {"torch", "wpr"}
    triton = {path for path in (SOURCE / "transport" / "kernels").glob("*.py") if path.name != "__init__.py"}
    for path in (SOURCE / "transport").rglob("*.py"):
        for name in imported_modules(path, top_level=True):
            allowed = standard | {"triton"} if path in triton else standard
            assert name.split(".")[0] in allowed, f"{path} imports {name}"
            assert path in triton or not name.startswith("wpr.transport.kernels."), f"{path} imports {name}"
            assert not name.startswith("wpr.") or name.startswith("wpr.transport"), f"{path} imports {name}"


def test_import_is_light() -> None:
    heavy = [
        "transformers",
        "trl",
        "datasets",
        "matplotlib",
        "openai",
        "triton.language",
        "scipy",
        "rich",
        "safetensors",
    ]
    code = (
        "import sys, torch; before = set(sys.modules); import wpr; wpr.Wasserstein; wpr.TokenGeometry; "
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_torch_starts_after_the_commands_setting() -> None:
    """How threads wait is decided when torch is loaded; whoever set it otherwise keeps that."""
    code = "import os, sys, wpr.cli; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, used in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        out = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        assert out.stdout.split() == ["False", used]


def test_scoring_needs_no_trainer() -> None:
    """Analyses use it, and importing the trainer takes seconds."""
    code = (
        "import sys, wpr; wpr.from_hidden; print([m for m in ('wpr.ppo.trainer', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_packages_that_need_no_import_of_their_own() -> None:
    code = "import wpr; print(wpr.regularizers.ReverseKL is wpr.ReverseKL, wpr.transport.geometry.TokenGeometry)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.startswith("True <class"), out.stderr


def test_public_names() -> None:
    import wpr

    assert all(hasattr(wpr, name) for name in wpr.__all__)
    assert wpr.__version__
