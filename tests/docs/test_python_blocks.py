"""The Python of the pages runs as it is printed, on tiny models. The blocks of a page run one after the other, in one
namespace; what a page takes for granted (a model, a dataset, files) is what the test of that page puts there.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT, Block, all_blocks
from tests.pipeline.command import Here
from tests.ppo import tiny

VOCABULARY = 600  # more than the neighbours of a geometry
COVERED: list[str] = []
"""Pages that a test below runs."""


ON_A_CPU = {
    "README.md": {"bf16=True": "use_cpu=True"},
    "docs/trl.md": {
        'GRPOConfig("runs/grpo", beta=0.0)': 'GRPOConfig("runs/grpo", beta=0.0, use_cpu=True)',
        'DistillationConfig("runs/distilled")': 'DistillationConfig("runs/distilled", use_cpu=True)',
    },
}
"""What is changed where there is no GPU: bf16, which is also TRL's default, is refused there unless use_cpu is set."""


def page(name: str) -> Callable[[Any], Any]:
    """Mark a test as that of a page."""
    COVERED.append(name)
    return lambda test: test


def blocks_of(name: str) -> list[Block]:
    return [block for block in all_blocks("python") if block.page == name]


def execute(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Run a block; errors have the lines of the page, and functions their source."""
    file = folder / f"{Path(block.page).stem}-{block.line}.py"
    code = block.code
    if not torch.cuda.is_available():
        for printed, instead in ON_A_CPU.get(block.page, {}).items():
            code = code.replace(printed, instead)
    file.write_text("\n" * (block.line - 1) + code, encoding="utf-8")
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)


def run_page(name: str, folder: Path, **names: Any) -> dict[str, Any]:
    """All blocks of a page; returns the names that there are then."""
    names = {"__name__": "example", **names}
    for block in blocks_of(name):
        execute(block, names, folder)
    return names


def logits(seed: int, positions: int = 5) -> torch.Tensor:
    return torch.randn(positions, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def save(model: Any, path: Path) -> None:
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)


FIVE_LINES = {
    "policy_logits": logits(0),
    "reference_logits": logits(1),
    "tokens": torch.arange(5),
    "score": torch.zeros(5),
    "beta": 0.1,
}


def test_every_page_with_python_has_a_test() -> None:
    """Here, or in a file that names the page and executes its blocks."""
    others = [
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "docs"
    ]
    pages = {block.page for block in all_blocks("python")}
    assert {*COVERED} <= pages
    for name in pages - {*COVERED}:
        assert any(f'"{Path(name).name}"' in text and "exec(" in text for text in others), (
            f"{name}: no test runs its Python"
        )


def test_what_is_changed_is_there() -> None:
    for name, changes in ON_A_CPU.items():
        code = "".join(block.code for block in blocks_of(name))
        assert all(code.count(printed) == 1 for printed in changes)


@page("README.md")
def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    long_enough = {"max_position_embeddings": 512}
    save(tiny.policy(**long_enough), tmp_path / "path/to/sft-model")
    save(tiny.critic(**long_enough), tmp_path / "path/to/reward-model")
    names = run_page(
        "README.md", tmp_path, reference=tiny.policy(1, vocab_size=VOCABULARY), prompts=tiny.prompts(8), **FIVE_LINES
    )
    assert names["reward"].shape == (5,)
    assert names["trainer"].state.global_step == 3


@page("docs/index.md")
def test_index(tmp_path: Path) -> None:
    names = run_page("docs/index.md", tmp_path, reference=tiny.policy(1, vocab_size=VOCABULARY), **FIVE_LINES)
    assert torch.equal(names["reward"], -0.1 * names["out"].penalty)
    assert (names["out"].divergence > 0).all()


@page("docs/start.md")
def test_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page("docs/start.md", tmp_path)
    (printed,) = [block.code for block in all_blocks("text") if block.page == "docs/start.md"]
    assert capsys.readouterr().out == printed


@page("docs/analysis.md")
def test_analysis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page("docs/analysis.md", tmp_path)
    assert "0.8" in capsys.readouterr().out.splitlines()[0]  # two of three tokens are matched


@page("docs/code-rewards.md")
@pytest.mark.needs("bubblewrap")
def test_code_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tiny.policy(vocab_size=VOCABULARY), tmp_path / "models/coder")
    run_page("docs/code-rewards.md", tmp_path)
    assert "1.0 1.0" in capsys.readouterr().out


@page("docs/data.md")
def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path / "models/smollm2")
    (tmp_path / "hh/helpful-base").mkdir(parents=True)
    rows = [
        {kind: f"\n\nHuman: w{i + 3}\n\nAssistant: {answer}" for kind, answer in (("chosen", "w3"), ("rejected", "w4"))}
        for i in range(30)
    ]
    with gzip.open(tmp_path / "hh/helpful-base/train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    names = run_page("docs/data.md", tmp_path)
    assert len(names["rows"]) == len(names["split"].sft) > 0
    assert "held_out" in capsys.readouterr().out


@page("docs/evaluation.md")
def test_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(
        "docs/evaluation.md",
        tmp_path,
        policy=tiny.policy(0, vocab_size=VOCABULARY),
        reference=tiny.policy(1, vocab_size=VOCABULARY),
        tokenizer=tiny.tokenizer(),
        prompt_ids=[2, 5],
        response_ids=[7, 8],
    )
    assert "62% [" in capsys.readouterr().out
    assert len(names["study"]["tokens"]) == 2


@page("docs/generation.md")
def test_generation(
    tmp_path: Path, whole_run: Path, here: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole_run, tmp_path / "runs/tiny")
    here.succeeds("generate", "runs/tiny", "--limit", "2", "--max-new-tokens", "4")
    names = run_page("docs/generation.md", tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == len(names["rkl"].rows) == 2


@page("docs/judging.md")
def test_judging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page("docs/judging.md", tmp_path)
    assert capsys.readouterr().out == "[1, 2, 3]\n"


@page("docs/kernels.md")
def test_kernels(tmp_path: Path) -> None:
    """On a CPU the same lines go through torch's functions."""
    from wpr import Wasserstein

    policy, reference = (tiny.policy(seed, vocab_size=VOCABULARY) for seed in (0, 1))
    states = {
        name: torch.randn(5, 32, requires_grad=name == "policy_states")
        for name in ("policy_states", "reference_states")
    }
    given = {**FIVE_LINES, **states, "Wasserstein": Wasserstein, "policy": policy, "reference": reference}
    names = run_page("docs/kernels.md", tmp_path, **given)
    assert names["out"].penalty.shape == (5,)
    names["loss"].backward()
    assert states["policy_states"].grad is not None


@page("docs/ppo.md")
def test_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    monkeypatch.chdir(tmp_path)
    save(tiny.policy(vocab_size=200), tmp_path / "models/smollm2")
    names = run_page("docs/ppo.md", tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.policy(vocab_size=200), tmp_path / "runs/example")
    assert any("lora" in name for name, _ in loaded.named_parameters())
    said = [[{"role": "assistant", "content": "it is 4"}], [{"role": "assistant", "content": "5"}]]
    assert names["has_answer"](completions=said, answer=["4", None]) == [1.0, None]


@page("docs/report.md")
def test_report(tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole_run, tmp_path / "runs/tiny")
    run_page("docs/report.md", tmp_path)
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "tables/policies.csv").is_file()


@page("docs/rewards.md")
def test_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tiny.policy(vocab_size=VOCABULARY), tmp_path / "models/smollm2")
    (tmp_path / "avoid.txt").write_text("w7\n")
    (tmp_path / "prefer.txt").write_text("w8\n")
    names = run_page("docs/rewards.md", tmp_path, prompts=tiny.prompts(8), EXCLAMATION=7)
    assert names["reward"].score("w7 w8 w8") == 1
    assert names["no_exclamations"]([[3, 7], [7]]) == [[0.0, -1.0], [-1.0]]


@page("docs/trl.md")
def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.trl.tiny import counts_w7, prompts

    monkeypatch.chdir(tmp_path)
    for name in ("student", "teacher"):
        save(tiny.policy(max_position_embeddings=512), tmp_path / name)
    folder = str(tmp_path / "student")
    names = run_page(
        "docs/trl.md",
        tmp_path,
        model=folder,
        student=folder,
        teacher=str(tmp_path / "teacher"),
        reward_funcs=counts_w7,
        dataset=prompts(2),
        prompts=[row["prompt"] for row in tiny.prompts(2)],
    )
    assert names["trainer"].callback_handler.callbacks


@page("docs/verl.md")
def test_verl(tmp_path: Path) -> None:
    """Its second block; the first registers with verl: `make test-verl`."""
    registered, loss = blocks_of("docs/verl.md")
    assert "register(" in registered.code
    from wpr import ReverseKL

    likely = logits(1).log_softmax(-1).topk(8)
    names = {"ReverseKL": ReverseKL, "student_logits": logits(0)}
    names |= {"teacher_ids": likely.indices, "teacher_log_probs": likely.values}
    execute(loss, names, tmp_path)
    assert names["losses"].shape == (5,)


@pytest.mark.needs("verl")
def test_verl_registers(tmp_path: Path) -> None:
    execute(blocks_of("docs/verl.md")[0], {"__name__": "my_losses"}, tmp_path)


def test_errors_have_the_lines_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        execute(Block("docs/x.md", 7, "python", "1\n1 / 0\n"), {}, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 8
    assert (ROOT / "docs").is_dir()
