"""The penalty on a GPU: Triton kernels beside the torch path, the released algorithm's way, and the KL penalty.

Everything in one run: all variants take turns, each time is the median of ``--repeats`` runs after a warm-up, memory is
the peak beyond what was allocated before the call. Inputs are those of `benchmarks.kernel_inputs`; `stages` prints how
many edges their supports have. Tables go to the terminal and, as markdown, to ``--out``.

    python -m benchmarks.kernels --out benchmarks/kernels.md             # the micro-batch, its stages, and the scaling
    python -m benchmarks.kernels --only micro stages                     # parts of it
    python -m benchmarks.kernels --only tune                             # block sizes of the kernels
    python -m benchmarks.kernels --only check --logits FILE              # agreement with float64; FILE: see `check`
    TRITON_INTERPRET=1 WPR_KERNELS=1 python -m benchmarks.kernels --tiny # on a CPU, to see that it runs
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_inputs import Bench, Case, Work, on, path
from benchmarks.released_penalty import random_kernel, released_penalty
from wpr import ReverseKL, TokenGeometry, Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS, TRANSFORMS
from wpr.transport.support import truncate as truncate_by_torch

BANDWIDTH, BF16 = 4.3e12, 7.9e14
"""Measured on an H200: bytes a second of a device copy, operations a second of a large bf16 product."""


TINY = Case(positions=2, vocabulary=300, hidden=33, neighbours=20, k2=5, iterations=3)
SCALING: dict[str, list[int]] = {
    "positions": [256, 1024, 2048, 4096, 16_384],
    "vocabulary": [32_000, 128_000, 256_000],
    "hidden": [576, 2048, 4096],
    "k2": [64, 128, 256],
    "iterations": [10, 50, 200],
}
TINY_SCALING = {"positions": [1], "vocabulary": [97], "hidden": [7], "k2": [1], "iterations": [2]}


def log_softmax_kl(policy: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    here = tokens.unsqueeze(-1)
    log_p, log_q = policy.float().log_softmax(-1), reference.float().log_softmax(-1)
    return (log_p.gather(-1, here) - log_q.gather(-1, here)).squeeze(-1)


def fused_log_softmax_kl(policy: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    here = tokens.unsqueeze(-1)
    log_p, log_q = (x.log_softmax(-1, dtype=torch.float32) for x in (policy, reference))
    return (log_p.gather(-1, here) - log_q.gather(-1, here)).squeeze(-1)


def penalties(bench: Bench) -> dict[str, Work]:
    """The penalties through the kernels and through torch."""
    semantic = Wasserstein(bench.centred, "semantic", k2=bench.case.k2)
    unbalanced = Wasserstein(bench.geometry, "unbalanced", k2=bench.case.k2)
    paper = Wasserstein(bench.geometry, "paper", k2=bench.case.k2, iterations=bench.case.iterations)
    both = ReverseKL() + 4 * semantic
    return {
        "semantic, kernels": on(True, lambda: semantic(*bench.inputs)),
        "reverse KL + 4 semantic, kernels": on(True, lambda: both(*bench.inputs)),
        "unbalanced, kernels": on(True, lambda: unbalanced(*bench.inputs)),
        "paper, kernels": on(True, lambda: paper(*bench.inputs)),
        "semantic, torch": on(False, lambda: semantic(*bench.inputs)),
        "paper, torch": on(False, lambda: paper(*bench.inputs)),
    }


def solver_settings(preset: str) -> dict[str, Any]:
    """Those of a preset that the solver takes."""
    return {name: getattr(PRESETS[preset], name) for name in ("lam", "rho", "iterations", "tolerance")}


def micro(bench: Bench) -> list[str]:
    """The micro-batch: every variant."""
    case = bench.case
    kernel = random_kernel(bench.groups, case.neighbours)
    works: dict[str, Work] = {
        "KL, x.float().log_softmax()": lambda: log_softmax_kl(*bench.inputs),
        "KL, log_softmax(dtype=float32)": lambda: fused_log_softmax_kl(*bench.inputs),
        "reverse KL with divergence, kernels": on(True, lambda: ReverseKL()(*bench.inputs)),
        "reverse KL with divergence, torch": on(False, lambda: ReverseKL()(*bench.inputs)),
        **penalties(bench),
        "paper, released algorithm": lambda: released_penalty(kernel, *bench.inputs, case.k2, 100.0, case.iterations),
    }
    results = bench.measure(works)
    # Against the faster of the two ways to write it.
    baseline = min(results[name].median for name in works if name.startswith("KL"))
    released = results["paper, released algorithm"].median
    persistent = 4e-6 * case.vocabulary
    lines = [
        f"{case}",
        "",
        "| variant | ms, median (fastest to slowest) | times KL | released / this | extra MB at peak |",
        "|---|---|---|---|---|",
    ]
    for name, r in results.items():
        lines.append(
            f"| {name} | {r.median:.3f} ({r.fastest:.3f} to {r.slowest:.3f}) | {r.median / baseline:.2f} | "
            f"{released / r.median:.1f} | {r.megabytes:.0f} |"
        )
    kept = (kernel.col_indices().numel() + kernel.crow_indices().numel()) * 8 + kernel.values().numel() * 4
    lines += ["", f"Kept between calls: kernels {persistent:.1f} MB (sizes), released {kept / 1e6:.0f} MB."]
    return lines


def released(bench: Bench) -> list[str]:
    """The released algorithm's way beside ours, where positions prefer groups of their own, and where all share them:
    its time depends on how many tokens their supports have together.
    """
    lines = [
        "| groups | tokens of all supports | paper, released algorithm: ms | paper, kernels | semantic, kernels "
        "| released / paper | released / semantic |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in (bench, Bench(replace(bench.case, shared=True), bench.device, bench.repeats)):
        case, ours = one.case, penalties(one)
        kernel = random_kernel(one.groups, case.neighbours)
        works: dict[str, Work] = {
            "released": lambda: released_penalty(kernel, *one.inputs, case.k2, 100.0, case.iterations),  # noqa: B023
            "paper": ours["paper, kernels"],
            "semantic": ours["semantic, kernels"],
        }
        found = {name: result.median for name, result in one.measure(works).items()}
        with path(True):
            together = Wasserstein(one.geometry, "paper", k2=case.k2).support(*one.inputs).ids.unique()
        lines.append(
            f"| {'shared' if case.shared else 'own'} | {int((together >= 0).sum())} | {found['released']:.0f} | "
            f"{found['paper']:.2f} | {found['semantic']:.2f} | {found['released'] / found['paper']:.0f} | "
            f"{found['released'] / found['semantic']:.0f} |"
        )
    return lines


def stages(bench: Bench) -> list[str]:
    """Each kernel by itself, and its share of what the device can do."""
    from wpr.transport.kernels import cost, divergence, potentials, support, vocabulary

    case = bench.case
    n, rows = 2 * case.k2 + 2, case.positions
    both_logits = bench.policy, bench.reference
    of_blocks = vocabulary.block_statistics(*both_logits)
    tops = vocabulary.top_ids(*both_logits, k=case.k2, statistics=of_blocks)
    reduced = support.reduce_logits(*bench.inputs, case.k2).support
    some = reduced[: min(rows, 1024)]
    costs = cost.cost(bench.centred, some.ids, scaled=False)
    ids, sampled = torch.empty_like(reduced.ids), torch.empty_like(reduced.sampled)
    marks = support._merge(tops, bench.tokens, case.vocabulary, ids, sampled)
    masses, totals = torch.empty(2, rows, n, device=bench.device), torch.empty(2, rows, device=bench.device)
    masses_of = some.log_policy, some.log_reference
    semantic = solver_settings("semantic")
    out = potentials.debiased(*masses_of, costs, **semantic)
    both = 2 * rows * case.vocabulary * 2
    blocks = of_blocks.highest.numel()
    real = (some.ids >= 0).sum()
    tokens = float(real / len(some.ids))
    edges = float(((costs.isfinite().sum(-1) - 1) * (some.ids >= 0)).sum() / real)
    works: dict[str, tuple[Work, float, float]] = {
        "statistics": (lambda: vocabulary.block_statistics(*both_logits), both + 8 * blocks, 0),
        "top ids": (
            lambda: vocabulary.top_ids(*both_logits, k=case.k2, statistics=of_blocks),
            blocks * 4 + 2 * rows * case.k2 * 128,
            0,
        ),
        "merge": (
            lambda: support._merge(tops, bench.tokens, case.vocabulary, ids, sampled),
            blocks * 4 + rows * n * 24,
            0,
        ),
        "masses": (
            lambda: support._masses(both_logits, of_blocks, ids, marks, masses, totals),
            blocks * 16 + 2 * rows * n * 140,
            0,
        ),
        "support, all of it": (lambda: support.reduce_logits(*bench.inputs, case.k2), both, 0),
        f"cost, {len(some.ids)} positions": (
            lambda: cost.cost(bench.centred, some.ids, scaled=False, fill=False),
            len(some.ids) * (tokens * case.hidden * 2 + n * n * 4),
            len(some.ids) * tokens * tokens * case.hidden,  # half of the products: it is symmetric
        ),
        f"semantic potentials, {len(some.ids)} positions": (
            lambda: potentials.debiased(*masses_of, costs, **semantic),
            len(some.ids) * n * n * 4,
            0,
        ),
        f"paper potentials, {len(some.ids)} positions": (
            lambda: potentials.balanced(*masses_of, costs, lam=100.0, iterations=case.iterations, floor=1e-16),
            len(some.ids) * n * n * 4,
            0,
        ),
        "sums of a divergence (two reads)": (
            lambda: divergence.divergence_sums(bench.policy, bench.reference, "reverse-kl"),
            2 * both,
            0,
        ),
    }
    results = bench.measure({name: work for name, (work, _, _) in works.items()})
    lines = [
        f"Tokens in use of {n} entries: {tokens:.0f} on average, with {edges:.1f} neighbours each. Iterations: "
        f"{out.cross.iterations.float().mean():.1f}, at most {int(out.cross.iterations.max())}.",
        "",
        "| stage | ms | counted GB | share of 4.3 TB/s | counted TFLOP | share of 790 TFLOP/s | extra MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (_, moved, operations) in works.items():
        r = results[name]
        lines.append(
            f"| {name} | {r.median:.3f} | {moved / 1e9:.3f} | {moved / BANDWIDTH / r.median * 1e3:.0%} | "
            f"{operations / 1e12:.3f} | {operations / BF16 / r.median * 1e3:.0%} | {r.megabytes:.0f} |"
        )
    return lines


def scaling(base: Case, axes: dict[str, list[int]], device: torch.device, repeats: int) -> list[str]:
    """One size varied at a time."""
    lines = ["Of the torch path medians of 5."]
    for axis, values in axes.items():
        lines += [
            "",
            f"| {axis} | semantic ms, kernels | torch | paper ms, kernels | torch | semantic MB, kernels | torch |",
            "|---|---|---|---|---|---|---|",
        ]
        for value in values:
            bench = Bench(replace(base, **{axis: value}), device, repeats)
            r = bench.measure(penalties(bench), fewer=5)
            cells = [
                r[name].median for name in ("semantic, kernels", "semantic, torch", "paper, kernels", "paper, torch")
            ]
            lines.append(
                f"| {value} | "
                + " | ".join(f"{cell:.3f}" for cell in cells)
                + f" | {r['semantic, kernels'].megabytes:.0f} | {r['semantic, torch'].megabytes:.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


def check(bench: Bench, logits: Path | None) -> list[str]:
    """Agreement with float64 torch, costs included, on fresh random inputs, or on real ones: a file of a dictionary
    ``policy``, ``reference`` ``(P, V)``, ``tokens`` ``(P,)``, ``embeddings`` ``(V, d)``, written by `torch.save`.
    Relative errors are of penalties above a hundredth of the largest.
    """
    geometries, (policy, reference, tokens) = {"none": bench.geometry, "centre/unit": bench.centred}, bench.inputs
    if logits is not None:
        data = {name: x.to(bench.device) for name, x in torch.load(logits).items()}
        policy, reference, tokens = data["policy"], data["reference"], data["tokens"]
        geometries = {
            transform: TokenGeometry.from_embeddings(
                data["embeddings"], neighbours=bench.case.neighbours, transform=transform
            )
            for transform in geometries
        }
    rows = slice(0, 64)
    policy, reference, tokens = policy[rows], reference[rows], tokens[rows]
    exact_inputs = policy.double(), reference.double(), tokens
    lines = [
        "| penalty | error / largest penalty | largest relative error | of the divergence | ids of the support |",
        "|---|---|---|---|---|",
    ]
    for preset, transform in TRANSFORMS.items():
        geometry = geometries[transform]
        exact_geometry = replace(geometry, embeddings=geometry.embeddings.double())
        regularizer = Wasserstein(geometry, preset, k2=bench.case.k2)
        with path(True):
            ours = regularizer(policy, reference, tokens)
            ids = regularizer.support(policy, reference, tokens).ids
        with path(False):
            exact = regularizer.with_geometry(exact_geometry)(*exact_inputs)
        error = (ours.penalty - exact.penalty).abs()
        size = exact.penalty.abs()
        relative = (error / size)[size > size.max() / 100].max()
        of_divergence = (ours.divergence - exact.divergence).abs().max() / exact.divergence.abs().max()
        same = torch.equal(ids, truncate_by_torch(*exact_inputs, bench.case.k2).ids)
        cells = f"{float(error.max() / size.max()):.1e} | {float(relative):.1e} | {float(of_divergence):.1e}"
        lines.append(f"| {preset} | {cells} | {'identical' if same else 'DIFFERENT'} |")
    return lines


def hidden(bench: Bench) -> list[str]:
    """From hidden states: logits of both models made first, or slice by slice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from wpr import from_hidden

    case = bench.case
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    states = [torch.randn(case.positions, case.hidden, device=bench.device).to(dtype) for _ in range(2)]
    bench.policy = bench.reference = torch.empty(0)  # they are made again
    with bench.device:
        model = LlamaForCausalLM(config).to(dtype)
    model.get_input_embeddings().weight.data = bench.embeddings.to(dtype) / case.hidden**0.5 * 3
    head = model.get_output_embeddings()
    tokens = torch.randint(case.vocabulary, (case.positions,), device=bench.device)
    semantic = Wasserstein(bench.centred, "semantic", k2=case.k2)

    @torch.no_grad()
    def whole() -> object:
        return semantic(head(states[0]), head(states[1]), tokens)

    @torch.no_grad()
    def heads() -> object:
        return head(states[0]).shape, head(states[1]).shape

    works: dict[str, Work] = {
        "the two heads alone": heads,
        "logits of both, then the penalty": on(True, whole),
    }
    for memory in (128, 256, 512):
        works[f"from_hidden, {memory} MB of logits"] = on(
            True,
            lambda memory=memory: from_hidden(semantic, model, states[0], model, states[1], tokens, memory_mb=memory),
        )
    lines = ["| way | ms | extra MB at peak |", "|---|---|---|"]
    return lines + [f"| {name} | {r.median:.2f} | {r.megabytes:.0f} |" for name, r in bench.measure(works).items()]


def geometry(bench: Bench) -> list[str]:
    """The radii of the whole vocabulary."""
    results = []
    for _ in range(3):
        bench.sync()
        start = time.perf_counter()
        memory = bench.peak(
            lambda: TokenGeometry.from_embeddings(bench.embeddings, neighbours=bench.case.neighbours, progress=False)
        )
        results.append(time.perf_counter() - start)
    shape = " x ".join(f"{size:,}" for size in bench.embeddings.shape)
    found = ", ".join(f"{seconds:.2f}" for seconds in results)
    return [
        f"{shape}, {bench.case.neighbours} neighbours: {found} s in three builds, {memory:.0f} MB beyond the inputs."
    ]


def tune(bench: Bench) -> list[str]:
    """Block sizes of the three kernels that take the time."""
    from wpr.transport.kernels import cost, neighbour_lists, potentials, support, vocabulary

    reduced = support.reduce_logits(*bench.inputs, bench.case.k2).support
    some = reduced[: min(bench.case.positions, 1024)]
    costs = cost.cost(bench.centred, some.ids, scaled=False)
    lines = ["| kernel | setting | ms |", "|---|---|---|"]

    def record(kernel: str, setting: str, work: Work) -> None:
        try:
            result = f"{bench.measure({'': work})[''].median:.3f}"
        except Exception as error:
            result = type(error).__name__  # out of shared memory, for instance
        lines.append(f"| {kernel} | {setting} | {result} |")
        print(lines[-1], flush=True)

    chosen = vocabulary.BLOCKS_OF_A_PROGRAM, cost.PANEL_COLUMNS, cost.PANEL_STAGES, potentials.DEPTH, potentials.WARPS
    for at_once in (32, 64, 128, 256):
        vocabulary.BLOCKS_OF_A_PROGRAM = at_once
        record("statistics", f"{at_once} blocks", lambda: vocabulary.block_statistics(bench.policy, bench.reference))
    for columns, stages_ in ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3)):
        cost.PANEL_COLUMNS, cost.PANEL_STAGES = columns, stages_
        record("cost", f"{columns} columns, {stages_} stages", lambda: cost.cost(bench.centred, some.ids))
    settings = solver_settings("semantic")
    for depth, warps in ((8, 2), (8, 4), (16, 2), (16, 4), (16, 8)):
        potentials.DEPTH, potentials.WARPS = depth, warps
        record(
            "semantic potentials",
            f"{depth} deep, {warps} warps",
            lambda: potentials.debiased(some.log_policy, some.log_reference, costs, **settings),
        )
    vocabulary.BLOCKS_OF_A_PROGRAM, cost.PANEL_COLUMNS, cost.PANEL_STAGES, potentials.DEPTH, potentials.WARPS = chosen
    record("lists", "", lambda: neighbour_lists.neighbour_lists(some.log_policy, some.log_reference, costs))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=["micro", "released", "stages", "scaling", "check", "geometry", "hidden", "tune"]
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU under Triton's interpreter")
    parser.add_argument("--logits", type=Path, help="real logits for --only check")
    parser.add_argument("--out", type=Path, help="write the tables here, as markdown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("no CUDA device; add --tiny and set TRITON_INTERPRET=1 to see that it runs")
    case, repeats = (TINY, 1) if arguments.tiny else (Case(), arguments.repeats)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted: times mean nothing"
    lines = [f"{name}, torch {torch.__version__}, medians of {repeats} runs."]
    parts = arguments.only or ["check", "micro", "released", "stages", "geometry", "hidden", "scaling"]
    bench = Bench(case, device, repeats)
    for part in parts:
        if part == "scaling":
            table = scaling(case, TINY_SCALING if arguments.tiny else SCALING, device, repeats)
        elif part == "check":
            table = check(bench, arguments.logits)
        else:
            table = {
                "micro": micro,
                "released": released,
                "stages": stages,
                "geometry": geometry,
                "hidden": hidden,
                "tune": tune,
            }[part](bench)
        lines += ["", f"## {part}", "", *table]
        print("\n".join(["", f"## {part}", "", *table]), flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
