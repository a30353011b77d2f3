"""Slices give what whole logits give, for heads of every kind; only one slice exists at a time."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.ppo import tiny
from wpr import ReverseKL, TokenGeometry, Wasserstein, from_hidden, loss_from_hidden
from wpr.language_models import hidden_states, logits_of
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.measures import LogitsError
from wpr.ppo.scoring import PositionScorer, logits_in_slices, slice_count, slices_of
from wpr.transport.kernels import VARIABLE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "soft-capped": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "scaled": ("Granite", {"logits_scaling": 3.0}),
}


def model(kind: str, seed: int) -> Any:
    name, extra = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # far from uniform, so that the cap and the scale matter
        made.get_output_embeddings().weight.mul_(20)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_mb", [256.0, 0.004])
@pytest.mark.parametrize("name", ["semantic", "reverse-kl"])
def test_the_same_as_from_logits(kind: str, memory_mb: float, name: str) -> None:
    policy, reference = model(kind, 0), model(kind, 1)
    ids = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    tokens = ids[:, 1:].flatten()
    geometry = TokenGeometry.from_embeddings(reference.get_input_embeddings().weight.detach(), neighbours=20)
    regularizer = ReverseKL() if name == "reverse-kl" else Wasserstein(geometry, "unbalanced", k2=10)
    with torch.no_grad():
        states = [hidden_states(each, ids, mask)[:, :-1].flatten(0, 1) for each in (policy, reference)]
        logits = [each(input_ids=ids).logits[:, :-1].flatten(0, 1) for each in (policy, reference)]
    ours = from_hidden(regularizer, policy, states[0], reference, states[1], tokens, memory_mb=memory_mb)
    whole = regularizer(*logits, tokens)
    torch.testing.assert_close(ours.penalty, whole.penalty, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.divergence, whole.divergence, rtol=1e-4, atol=1e-5)
    assert ours.diagnostics.keys() == whole.diagnostics.keys()


def test_refusals() -> None:
    policy = model("tied", 0)
    states, tokens = torch.zeros(5, 32), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(5, 32\) and \(4, 32\)"):
        from_hidden(ReverseKL(), policy, states, policy, states[:4], tokens)
    with pytest.raises(ValueError, match=r"tokens of shape \(4,\) for 5 positions"):
        from_hidden(ReverseKL(), policy, states, policy, states, tokens[:4], memory_mb=0.003)  # 4 positions a slice
    with pytest.raises(ValueError, match="memory_mb=0"):
        from_hidden(ReverseKL(), policy, states, policy, states, tokens, memory_mb=0)
    broken = states.clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match=r"position.* 0 .*counted from 3"):
        from_hidden(ReverseKL(), policy, broken, policy, states, tokens, memory_mb=0.001)


def test_no_positions() -> None:
    policy = model("tied", 0)
    nothing = torch.zeros(0, 32)
    out = from_hidden(ReverseKL(), policy, nothing, policy, nothing, torch.zeros(0, dtype=torch.long))
    assert out.penalty.shape == (0,)


def test_slices_cover_everything_once() -> None:
    for count in (0, 1, 5, 17):
        for slices in (1, 3, 17, 30):
            parts = list(slices_of(count, slices))
            assert len(parts) == slices
            assert [i for part in parts for i in range(count)[part]] == list(range(count))


def test_the_budget_sets_the_slices() -> None:
    for positions in (1, 5_000, 100_000):
        slices = slice_count(positions, 256_000, 1024, 4)
        assert max(part.stop - part.start for part in slices_of(positions, slices)) * 256_000 * 4 <= 2**30
        assert slice_count(positions, 256_000, 2048, 8) == slices
    assert slice_count(7, 10**9, 1, 4) == 7  # a position at a time, at least
    assert slice_count(0, 100, 1, 4) == 1


def logits(rows: int = 7, tokens: int = 23, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = 3 * torch.randn(2, rows, tokens, generator=generator)
    return policy, reference, torch.randint(tokens, (rows,), generator=generator)


@pytest.mark.parametrize("kind", ["reverse-kl", "semantic"])
def test_slices_are_the_whole(kind: str) -> None:
    """Also for a regularizer that reduces each slice and works on all of them together, and with empty slices."""
    policy, reference, tokens = logits()
    weight = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
    geometry = TokenGeometry.from_embeddings(weight, neighbours=5)
    regularizer = ReverseKL() if kind == "reverse-kl" else Wasserstein(geometry, "unbalanced", k2=9)
    found = []
    for parts in ((slice(0, 7),), (slice(0, 3), slice(3, 3), slice(3, 7))):
        scorer = PositionScorer(regularizer, eval_regularizers={"other": ReverseKL()})
        for rows in parts:
            scorer.add(tokens[rows], policy[rows], reference[rows])
        assert (scorer.positions, scorer.error) == (7, None)
        found.append(scorer.result())
    whole, joined = found
    for name in ("log_prob", "penalty", "divergence", "kl", "entropy"):
        assert torch.equal(getattr(whole, name), getattr(joined, name))
    direct = regularizer(policy, reference, tokens)
    assert torch.equal(direct.penalty, whole.penalty)
    assert direct.diagnostics.keys() == whole.diagnostics.keys()
    assert torch.equal(joined.eval_regularizers["other"], ReverseKL()(policy, reference, tokens).divergence)


def test_errors_are_noted_and_the_slices_go_on() -> None:
    """The first one, by its position among all; other processes wait for the layers of the slices that follow."""
    policy, reference, tokens = logits()
    policy[5, 2] = torch.nan
    reference[6, 2] = torch.inf
    scorer = PositionScorer(ReverseKL())
    for rows in slices_of(7, 3):
        scorer.add(tokens[rows], policy[rows], reference[rows])
    assert isinstance(scorer.error, LogitsError)
    assert (scorer.error.model, scorer.error.position, scorer.positions) == ("policy", 5, 7)
    policy, reference, tokens = logits()
    policy[2, tokens[2]] = -torch.inf
    scorer = PositionScorer(ReverseKL())
    scorer.add(tokens, policy, reference)
    assert "has probability 0 under the policy" in str(scorer.error)


def test_without_a_reference_it_is_the_policy_with_its_adapter_off() -> None:
    peft = pytest.importorskip("peft")
    base = tiny.policy(0)
    adapted = peft.get_peft_model(
        tiny.policy(0), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        off = list(logits_in_slices(adapted, states, None, states, 2))
        other = list(logits_in_slices(adapted, states, base, states, 2))
    for this, that in zip(off, other, strict=True):
        assert this[0] == that[0]
        assert torch.equal(this[1], that[1])
        assert torch.equal(this[2], that[2])
        assert not torch.equal(this[1], this[2])


def losses(
    regularizer: Any, policy: Any, reference: Any, states: list[torch.Tensor], memory_mb: float | None, **settings: Any
) -> list[torch.Tensor]:
    """Losses, and their weighted sum's gradients in the policy's states and head; of whole logits without a memory."""
    mine = states[0].clone().requires_grad_()
    head = policy.get_output_embeddings().weight
    if memory_mb is None:
        temperature = settings.get("temperature", 1.0)
        whole = [logits_of(one, each, temperature) for one, each in ((policy, mine), (reference, states[1]))]
        found = regularizer.loss(whole[0], whole[1].detach())
    else:
        found = loss_from_hidden(regularizer, policy, mine, reference, states[1], memory_mb=memory_mb, **settings)
    weights = torch.linspace(-1, 2, len(found)).to(found)  # a loss may weigh positions
    return [found.detach(), *torch.autograd.grad((weights * found).sum(), [mine, head])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["reverse-kl", "semantic"])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(kind: str, name: str, dtype: torch.dtype) -> None:
    policy, reference = model(kind, 0).to(dtype), model(kind, 1).to(dtype)
    geometry = TokenGeometry.from_embeddings(reference.get_input_embeddings().weight.detach().float(), neighbours=20)
    regularizer = ReverseKL() if name == "reverse-kl" else Wasserstein(geometry, "unbalanced", k2=10)
    generator = torch.Generator().manual_seed(3)
    states = [0.3 * torch.randn(11, 32, generator=generator, dtype=dtype) for _ in range(2)]
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    size = 2 * 97 * states[0].element_size() / 2**20  # of the logits of one position
    for temperature in (1.0, 0.7):
        whole = losses(regularizer, policy, reference, states, None, temperature=temperature)
        for positions in (1, 4, 11, 100):
            sliced = losses(regularizer, policy, reference, states, positions * size, temperature=temperature)
            for ours, theirs in zip(sliced, whole, strict=True):
                torch.testing.assert_close(ours, theirs, **tolerance)
    assert whole[1].abs().max() > 1e-3
    assert whole[2].abs().max() > 1e-3


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.needs("triton"))])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, "1" if request.param == "kernels" else "0")
    return str(request.param)


@pytest.mark.needs("triton")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_by_the_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum and of its parts, against whole logits in float64."""
    pair = [model(kind, seed).to(DEVICE) for seed in (0, 1)]
    geometry = TokenGeometry.from_embeddings(pair[1].get_input_embeddings().weight.detach().float(), neighbours=20)
    settings: dict[str, Any] = {"k2": 10, "iterations": 8, "tolerance": 0.0}
    regularizer = ReverseKL() + 2 * Wasserstein(geometry, "unbalanced", **settings)
    generator = torch.Generator().manual_seed(3)
    states = [(0.3 * torch.randn(5, 32, generator=generator)).to(DEVICE) for _ in range(2)]
    exact = [copy.deepcopy(one).double() for one in pair]
    whole = losses(regularizer, *exact, [each.double() for each in states], None, temperature=0.7)
    monkeypatch.setenv(VARIABLE, "1")
    two_positions = 2 * 2 * 97 * 4 / 2**20
    sliced = losses(regularizer, *pair, states, two_positions, temperature=0.7)
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=1e-5)
    parts = loss_from_hidden(
        regularizer, pair[0], states[0], pair[1], states[1], memory_mb=two_positions, temperature=0.7, by_part=True
    )
    assert parts.shape == (5, 2)
    torch.testing.assert_close(parts[:, 0] + 2 * parts[:, 1], sliced[0], rtol=1e-6, atol=1e-7)


@pytest.mark.needs("triton")
def test_what_a_loss_holds_goes_with_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is torch that holds it: as long as the backward pass may be repeated, and no longer."""
    monkeypatch.setenv(VARIABLE, "1")
    policy, reference = model("tied", 0).to(DEVICE), model("tied", 1).to(DEVICE)
    geometry = TokenGeometry.from_embeddings(reference.get_input_embeddings().weight.detach(), neighbours=20)
    regularizer = ReverseKL() + 2 * Wasserstein(geometry, "unbalanced", k2=10, iterations=8)
    mine, other = (torch.randn(5, 32, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2))
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_from_hidden(regularizer, policy, mine.requires_grad_(), reference, other, memory_mb=1).sum()
    assert saved.count(torch.Size([5, 22])) == 3  # ids, masses and penalties of the support
    gradients = [torch.autograd.grad(loss, mine, retain_graph=again)[0] for again in (True, False)]
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, mine)


@pytest.mark.needs("triton")
def test_a_loss_by_the_kernels_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in bf16, gradients in the type of the weights, the same as through the graph."""
    policy, reference = model("tied", 0).to(DEVICE), model("tied", 1).to(DEVICE)
    states = [torch.randn(6, 32, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    found = []
    for wish in ("0", "1"):
        monkeypatch.setenv(VARIABLE, wish)
        with torch.autocast(DEVICE, torch.bfloat16):
            found.append(losses(ReverseKL(), policy, reference, states, 2 * 2 * 97 * 4 / 2**20))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_the_gradient_is_that_of_finite_differences() -> None:
    policy, reference = model("tied", 0).double(), model("tied", 1).double()
    generator = torch.Generator().manual_seed(4)
    states = [0.2 * torch.randn(3, 32, generator=generator, dtype=torch.float64) for _ in range(2)]
    head = policy.get_output_embeddings().weight

    def loss(mine: torch.Tensor) -> torch.Tensor:
        return loss_from_hidden(ReverseKL(), policy, mine, reference, states[1], memory_mb=1e-6)

    assert torch.autograd.gradcheck(loss, states[0].clone().requires_grad_(), eps=1e-6, atol=1e-6, rtol=1e-4)
    (gradient,) = torch.autograd.grad(loss(states[0]).sum(), head)
    step = 1e-6
    for row, column in ((0, 0), (5, 17), (96, 31)):
        around = []
        for sign in (1, -1):
            with torch.no_grad():
                head[row, column] += sign * step
                around.append(float(loss(states[0]).sum()))
                head[row, column] -= sign * step
        assert (around[0] - around[1]) / (2 * step) == pytest.approx(float(gradient[row, column]), rel=1e-4, abs=1e-7)


def test_the_reference_of_a_loss_gets_no_gradient_and_may_be_the_adapter_off(path: str) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny.policy(0), peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    ).to(DEVICE)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    base = tiny.policy(0).to(DEVICE)
    states = [torch.randn(6, 32).to(DEVICE).requires_grad_() for _ in range(2)]
    results = []
    for reference in (None, base):
        loss = loss_from_hidden(ReverseKL(), adapted, states[0], reference, states[1], memory_mb=1e-6)
        loss.sum().backward()
        results.append([loss.detach(), states[0].grad, *(parameter.grad for parameter in trained)])
        states[0].grad, trained[0].grad, trained[1].grad = None, None, None
    for off, other in zip(*results, strict=True):
        assert torch.equal(off, other)
        assert off.abs().max() > 0
    assert states[1].grad is None
    assert all(parameter.grad is None for parameter in base.parameters())
    assert all(parameter.requires_grad for parameter in trained)


@pytest.mark.needs("triton")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters_of_a_head_by_the_kernels(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, one in use; with dropout the backward pass has to draw what the forward pass drew."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=dropout, init_lora_weights=False)
    adapted = peft.get_peft_model(model("tied", 0), settings).to(DEVICE)
    adapted.add_adapter("other", settings)
    adapted.train().requires_grad_(True)
    states = [torch.randn(6, 32, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    found = []
    for wish in ("0", "1"):
        monkeypatch.setenv(VARIABLE, wish)
        torch.manual_seed(1)
        mine = states[0].clone().requires_grad_()
        loss = loss_from_hidden(ReverseKL(), adapted, mine, None, states[1], memory_mb=2 * 2 * 97 * 4 / 2**20)
        weights = list(adapted.get_base_model().lm_head.parameters())
        gradients = torch.autograd.grad(loss.sum(), [mine, *weights], allow_unused=True)
        found.append([loss, *(loss.new_zeros(1) if each is None else each for each in gradients)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * max(1, float(theirs.abs().max()))


def test_a_loss_refuses_what_it_cannot_compute(path: str) -> None:
    policy = model("tied", 0).to(DEVICE)
    states = torch.zeros(5, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"\(5, 32\) and \(4, 32\)"):
        loss_from_hidden(ReverseKL(), policy, states, policy, states[:4])
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature={wrong} must be a positive number"):
            loss_from_hidden(ReverseKL(), policy, states, policy, states, temperature=wrong)
        with pytest.raises(ValueError, match=f"memory_mb={wrong}"):
            loss_from_hidden(ReverseKL(), policy, states, policy, states, memory_mb=wrong)
    broken = states.clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match=r"position.* 0 .*counted from 3"):
        loss_from_hidden(ReverseKL(), policy, broken, policy, states, memory_mb=0.001)
    assert loss_from_hidden(ReverseKL(), policy, states[:0], policy, states[:0]).shape == (0,)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from /proc")
def test_one_slice_of_logits_exists_at_a_time() -> None:
    """Measured, in processes of their own: 64 slices need far less than the logits of one model, in the forward pass,
    between the passes (else the backward pass would start with it), and in the backward pass.
    """
    used = {}
    for kind in ("sliced", "whole"):
        command = [sys.executable, "-m", "tests.ppo.loss_memory", kind]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], text=True, capture_output=True, check=False,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back at once
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        used[kind] = json.loads(done.stdout.strip().splitlines()[-1])
    size = used["sliced"]["logits"]
    print({kind: {name: round(value / size, 2) for name, value in found.items()} for kind, found in used.items()})
    assert used["sliced"]["forward"] < 0.5 * size
    assert used["sliced"]["backward"] < 0.5 * size
    assert used["whole"]["forward"] > 2 * size
    assert used["whole"]["backward"] > 2 * size


@pytest.mark.parametrize("by", ["from_hidden", "scorer"])
def test_a_slice_is_gone_before_the_next_is_made(by: str) -> None:
    policy, reference = tiny.policy(0), tiny.policy(1)
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        alive.append(sum(logits() is not None for logits in made))
        made.append(weakref.ref(output))

    policy.lm_head.register_forward_hook(note)
    reference.lm_head.register_forward_hook(note)
    ids = torch.randint(3, tiny.TOKENS, (2, 6), generator=torch.Generator().manual_seed(0))
    if by == "scorer":
        with torch.no_grad():
            mask = torch.ones(2, 4, dtype=torch.bool)
            scorer = PositionScorer(ReverseKL(), reference)
            ActorCritic(policy, None)(ids, torch.ones_like(ids), mask, slices=4, scorer=scorer)
    else:
        states = torch.zeros(8, 32)
        from_hidden(ReverseKL(), policy, states, reference, states, ids[:, 2:].flatten(), memory_mb=2 * 320 / 2**20)
    assert alive == [0, 1] * 4  # the policy's logits are there when the reference's are made
