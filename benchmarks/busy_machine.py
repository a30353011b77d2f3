"""How much longer each stage of the recipe `stories` takes on a machine with other work, by how waiting threads wait.

    python -m benchmarks.busy_machine [--busy 2] [--steps 3] [--waits default sleep] [overrides ...]

By default libgomp's threads spin 300,000 times before they sleep; the command lets them sleep at once
(OMP_WAIT_POLICY=passive). Each runs the recipe alone and beside ``--busy`` processes that only count; all of the
results, times aside, must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAITS = {
    # What libgomp does by itself, said aloud: the command would set the policy otherwise.
    "default": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"},
    "sleep": {"OMP_WAIT_POLICY": "passive"},
}
SHORT = ["prepare.options.openings=240", "evaluation.prompts=24"]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that keep a core each busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def stages(wait: str, busy: int, overrides: list[str]) -> dict[str, Any]:
    """The finished stages of a run, from its manifest."""
    with tempfile.TemporaryDirectory() as folder, busy_processes(busy):
        command = [sys.executable, "-m", "wpr", "run", "stories", f"output={folder}/run", *overrides]
        done = subprocess.run(command, env=os.environ | WAITS[wait], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(Path(folder, "run", "manifest.json").read_text())["stages"]
        return found


def results(found: dict[str, Any]) -> dict[str, Any]:
    """What a run found, without how long it took."""
    return json.loads(
        json.dumps({name: stage.get("results") for name, stage in found.items()}),
        object_hook=lambda entry: {key: value for key, value in entry.items() if "second" not in key},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--waits", nargs="+", choices=WAITS, default=list(WAITS))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = [*SHORT, f"ppo.max_steps={options.steps}", *options.overrides]
    print(f"{os.cpu_count()} cores, {options.busy} busy processes; seconds\n")
    print(f"| waiting threads | stage | alone | beside {options.busy} | ratio |\n|---|---|---|---|---|")
    first: dict[str, Any] | None = None
    for wait in options.waits:
        alone, beside = (stages(wait, busy, overrides) for busy in (0, options.busy))
        for name in alone:
            times = [found[name]["seconds"] for found in (alone, beside)]
            print(f"| {wait} | {name} | {times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.2f} |", flush=True)
        for found in (alone, beside):
            first = first or results(found)
            if results(found) != first:
                raise SystemExit("the results differ")
    print("\nAll results are the same.")


if __name__ == "__main__":
    main()
