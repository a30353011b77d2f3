"""Time, memory and file size of building a geometry: SmolLM2's 49,152 tokens on this CPU, each in a process of its own.

python -m benchmarks.geometry [--model FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import registry_models

MEASURE = "measure"


def measure(folder: Path, device: str) -> None:
    """Build, save and load, and print what it took."""
    import torch
    from safetensors import safe_open

    from wpr import TokenGeometry

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        weight = file.get_tensor("model.embed_tokens.weight").to(device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    geometry = TokenGeometry.from_embeddings(weight)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "geometry.safetensors"
        geometry.save(path)
        size = path.stat().st_size
        start = time.perf_counter()
        TokenGeometry.load(path, weight)
        loading = time.perf_counter() - start
    print(geometry.describe())
    print(f"built in {seconds:.1f} s on {device} with {torch.get_num_threads()} threads")
    print(f"peak memory of the process {peak / 1e6:.2f} GB, of which {before / 1e6:.2f} GB before building")
    print(f"file {size / 1e6:.3f} MB, loaded and checked in {loading:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=registry_models.FOLDER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("step", nargs="?", choices=[MEASURE], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == MEASURE:
        measure(arguments.model, arguments.device)
        return
    command = [
        sys.executable,
        "-m",
        "benchmarks.geometry",
        "--model",
        str(arguments.model),
        "--device",
        arguments.device,
    ]
    subprocess.run([*command, MEASURE], check=True)


if __name__ == "__main__":
    main()
