"""Build sdist and wheel, and install the wheel into empty environments: each extra by itself, and none.

    python scripts/test_package.py                   # make test-package: the newest dependencies that are allowed
    python scripts/test_package.py --lowest          # make test-bounds: the oldest ones that are allowed
    python scripts/test_package.py --only ppo lora

Needs the packages `build` and `uv` (`make` brings them). Prints a table: was it installed, how long does `import wpr`
take beyond torch, does what the extra is for work. torch is the version of constraints.txt, so that a build for CPUs
that is there (PIP_FIND_LINKS) is used; `--torch` asks for another. Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICO = "$(python -c 'from wpr import pico; print(pico.path())')"
PENALTY = """python -c "
import torch, wpr
torch.manual_seed(0)
geometry = wpr.TokenGeometry.from_embeddings(torch.randn(50, 8), neighbours=9, progress=False)
regularizer = wpr.ReverseKL() + 4 * wpr.Wasserstein(geometry, k2=16)
out = regularizer(torch.randn(3, 50), torch.randn(3, 50), torch.tensor([1, 2, 3]))
assert out.penalty.isfinite().all()
" && wpr recipes && wpr doctor && { wpr || test $? = 2; } && wpr run --help"""
TRAIN = """
from wpr import PPOConfig, PPOTrainer, pico
def reward(prompts, responses, **columns): return [float(len(text)) for text in responses]
args = PPOConfig('ppo', per_device_train_batch_size=4, max_new_tokens=4, max_steps=1, share_backbone=True,
                 report_to='none', save_strategy='no', use_cpu=True)
rows = [{'prompt': 'Once'}] * 4
PPOTrainer(str(pico.path()), args, reward=reward, regularizer='reverse-kl', train_dataset=rows, %s).train()
"""
LORA = "peft_config=__import__('peft').LoraConfig(r=2, target_modules='all-linear', task_type='CAUSAL_LM')"
SMOKE = {
    "": PENALTY,
    "models": f"wpr geometry show {PICO} -w dog",
    "gguf": 'python -c "from transformers.utils import is_gguf_available as ok; import accelerate; assert ok()"',
    "ppo": f'python -c "{TRAIN % ""}"',
    "lora": f'python -c "{TRAIN % LORA}"',
    "train": "wpr run tiny sft.max_steps=1 reward.max_steps=1 ppo.max_steps=1 evaluation.prompts=4",
    "quickstart": "wpr quickstart --quick",
    "rewrite": 'wpr run rewrite --dry-run && python -c "from wpr.evaluation.encoders import load_encoder as load; '
    "assert load('wordllama')(['a dog']).shape[0] == 1\"",
    "judge": 'python -c "import openai, httpx2; from wpr.evaluation.judging import server"',
    "code": 'python -c "from wpr.evaluation.code_tasks import humaneval_file, read_tasks; '
    "assert len(read_tasks(humaneval_file(), 'complete')[1]) == 164\"",
    "wording": 'python -c "from wpr.rewards import ReadingLevel; '
    "assert len(ReadingLevel(5)(['a'], ['The dog ran home.'])) == 1\"",
    "plots": 'python -c "from wpr.findings import Figure, Series; from wpr.report import Picture; '
    "Picture.of(Figure('lines', 'a', 'b', 'c', [Series('d', [0, 1], [0, 1])])).save('a.png')\"",
    "notebooks": 'python -c "import ipykernel, nbclient, pandas, wpr; wpr.load_run"',
    "docs": 'python -c "import furo, myst_parser, sphinx"',
    "deepspeed": 'python -c "import deepspeed, wpr; wpr.PPOTrainer"',
    "test": 'python -c "import pytest, hypothesis, scipy, ot, playwright"',
    "bench": 'python -c "import ot, geomloss, ott, jax"',
    "dev": f"ruff --version && mypy --strict {ROOT / 'tests' / 'typed_user.py'}",
}
"""What works once an extra is installed, by itself, in an empty folder."""


@dataclass
class Outcome:
    """Of one extra. A step that was not reached is empty."""

    extra: str
    installed: str = ""
    seconds: float = 0.0
    import_ms: str = ""
    works: str = ""
    megabytes: float = 0.0

    @property
    def failed(self) -> bool:
        return self.installed != "yes" or not self.works.startswith("yes")


class Environment:
    """An empty virtual environment; `uv` links files from its cache, so that torch is on disk once."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.uv("venv", "--quiet", "--clear", "--python", python, str(folder))

    def uv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "uv", *arguments], capture_output=True, text=True)

    def install(self, *what: str) -> subprocess.CompletedProcess[str]:
        links = [part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)]
        return self.uv("pip", "install", "--quiet", "--python", str(self.folder / "bin" / "python"), *links, *what)

    def shell(self, command: str, folder: Path, seconds: int = 500) -> subprocess.CompletedProcess[str]:
        """Run a command as a user would who has activated the environment; no hub, and nothing of this repository."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            ["timeout", str(seconds), "bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    def import_ms(self, folder: Path) -> float:
        """Milliseconds of `import wpr` and of the regularizers in it, beyond torch: the median of three."""
        code = "import torch, time; t = time.perf_counter(); import wpr; wpr.Sum; print(time.perf_counter() - t)"
        return 1000 * sorted(float(self.shell(f'python -c "{code}"', folder).stdout) for _ in range(3))[1]


def pinned_torch() -> str:
    """As constraints.txt has it."""
    return re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def requirements(extra: str) -> list[str]:
    """What the package asks for, with an extra and those that it includes; torch apart, which is set by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    included = [name for one in listed for names in re.findall(r"^wpr\[(.*)\]", one) for name in names.split(",")]
    own = [one for one in listed if not one.startswith(("wpr[", "torch>="))]
    return own + [one for name in [*included, *([""] if extra else [])] for one in requirements(name)]


def build(folder: Path) -> Path:
    """Build both; the wheel is built from the sdist, and lists what is in it."""
    subprocess.run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(folder), str(ROOT)], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return next(folder.glob("*.whl"))


def try_extra(extra: str, wheel: Path, arguments: argparse.Namespace, place: Path) -> Outcome:
    """Install the wheel with the extra into an empty environment and use it in an empty folder."""
    outcome = Outcome(extra or "(none)")
    environment = Environment(place / "environment", arguments.python)
    empty = place / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    began = time.monotonic()
    # The oldest version is taken of what is asked for by name only: so all of it is.
    oldest = ["--resolution", "lowest-direct", *requirements(extra)] if arguments.lowest else []
    done = environment.install(*oldest, *arguments.torch, f"{wheel}[{extra}]" if extra else str(wheel))
    outcome.seconds = time.monotonic() - began
    outcome.installed = "yes" if done.returncode == 0 else _last(done.stderr)
    if done.returncode == 0:
        outcome.import_ms = f"{environment.import_ms(empty):.0f}"
        if arguments.versions:
            print(environment.uv("pip", "freeze", "--python", str(environment.folder / "bin" / "python")).stdout)
        done = environment.shell(SMOKE[extra], empty)
        outcome.works = "yes" if done.returncode == 0 else _last(done.stderr + done.stdout)
        if arguments.tests and done.returncode == 0:
            environment.install("pytest", "hypothesis", "scipy", "POT", "pyyaml")
            done = environment.shell(f"python -m pytest -q {' '.join(arguments.tests)}", ROOT)
            outcome.works = f"{'yes' if done.returncode == 0 else 'NO'}; tests: {_last(done.stdout)[4:]}"
        outcome.megabytes = sum(path.stat().st_size for path in environment.folder.rglob("*") if path.is_file()) / 1e6
    return outcome


def _last(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return "NO: " + (lines[-1] if lines else "no output")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="EXTRA", help="only these extras; none: the package alone")
    parser.add_argument("--lowest", action="store_true", help="the oldest direct dependencies that are allowed")
    parser.add_argument("--versions", action="store_true", help="print what was installed")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run with the installed package")
    parser.add_argument("--torch", nargs="*", default=[pinned_torch()], help="requirement for torch; empty: any")
    parser.add_argument("--python", default="3.11", help="version or path of Python")
    arguments = parser.parse_args()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := (set(declared) | {""}) ^ set(SMOKE):
        sys.exit(f"SMOKE and pyproject.toml do not have the same extras: {', '.join(unknown)}")
    chosen = ["", *declared] if arguments.only is None else arguments.only or [""]
    with tempfile.TemporaryDirectory() as place:
        wheel = build(Path(place) / "dist")
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, Python {arguments.python}, "
              f"{'oldest' if arguments.lowest else 'newest'} dependencies, {' '.join(arguments.torch)}\n")  # fmt: skip
        print("| extra | installed | seconds | environment | import beyond torch | works |\n|---|---|---|---|---|---|")
        outcomes = []
        for extra in chosen:
            outcomes.append(one := try_extra(extra, wheel, arguments, Path(place)))
            sizes = f"{one.seconds:.0f}", f"{one.megabytes:.0f} MB", f"{one.import_ms} ms"
            print("|", " | ".join((one.extra, one.installed, *sizes, one.works)), "|", flush=True)
    sys.exit(any(one.failed for one in outcomes))


if __name__ == "__main__":
    main()
