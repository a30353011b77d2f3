"""verl's on-policy distillation by a regularizer, through verl's own registry, engine functions and reduction.

Most tests need verl: `make test-verl` (docs/verl.md).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers.registry import REGULARIZERS
from wpr.verl import register, top_k_loss

K, TOKENS, PROMPT, RESPONSE = 4, 41, 5, 6
LENGTHS = [(3, 6), (5, 2), (1, 4)]
"""Of prompts and responses; the longest fill the batch."""
LOSS_MODES = {f"wpr-{name}" for name in REGULARIZERS if name != "wasserstein"}
needs_verl = pytest.mark.needs("verl")


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def losses() -> Any:
    """verl's module of distillation losses, with all of this package's f-divergences, and three more, registered."""
    from verl.trainer.distillation import losses

    if "wpr-reverse-kl" not in losses.DISTILLATION_LOSS_REGISTRY:
        for name in LOSS_MODES:
            register(name, name.removeprefix("wpr-"))
    register("mixed", "reverse-kl + 0.5*forward-kl")
    register("semantic", transport)
    register("summed", ReverseKL() + 4 * transport())
    return losses


@functools.cache
def transport() -> Wasserstein:
    geometry = TokenGeometry.from_embeddings(clustered_embeddings()[:TOKENS], neighbours=6, progress=False)
    return Wasserstein(geometry, "unbalanced", k2=8)


def micro_batch(**given: Any) -> Any:
    """Padded sequences with what a teacher's server says of them, brought into the form of verl's engines."""
    from tensordict import TensorDict
    from verl.experimental.teacher_loop.teacher_manager import _pad_teacher_outputs
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(len(LENGTHS), PROMPT + RESPONSE, dtype=torch.long)
    teacher = []
    for row, (prompt, response) in enumerate(LENGTHS):
        mask[row, PROMPT - prompt : PROMPT + response] = 1
        known = (2 * torch.randn(prompt + response, TOKENS, generator=generator)).log_softmax(-1).topk(K, -1)
        ids, log_probs = known.indices.int(), known.values
        ids[-1], log_probs[-1] = 0, 0  # verl has no prediction after the last token
        widths = {"prompt_width": PROMPT, "response_width": RESPONSE}
        lengths = {"prompt_length": prompt, "response_length": response, "pad_token_id": 3}
        teacher.append(_pad_teacher_outputs(ids, log_probs, **widths, **lengths))
    tokens = torch.randint(TOKENS, mask.shape, generator=generator)
    responses = torch.randn(3, len(LENGTHS), RESPONSE, generator=generator)
    batch = TensorDict(
        {
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": mask,
            "response_mask": mask[:, PROMPT:],
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
            "teacher_ids": torch.cat([ids for ids, _ in teacher]),
            "teacher_logprobs": torch.cat([log_probs for _, log_probs in teacher]),
            "old_log_probs": responses[0] - 4,
            "advantages": responses[1],
        },
        batch_size=len(LENGTHS),
    )
    batch = left_right_2_no_padding(batch)
    tu.assign_non_tensor(
        batch, dp_size=1, batch_num_tokens=int(mask[:, PROMPT:].sum()), global_batch_size=len(LENGTHS),
        distillation_use_topk=True, **({"temperature": 1.0} | given),
    )  # fmt: skip
    return batch


def step(losses: Any, loss_mode: str, batch: Any, logits: Tensor, strategy: str = "fsdp2", **settings: Any) -> Any:
    """Loss and metrics as the forward step of verl's FSDP engine computes them from a model's logits ``(1, N, V)``."""
    from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    settings = {"use_policy_gradient": False, "log_prob_min_clamp": None, "use_task_rewards": False} | settings
    distillation = DistillationLossConfig(loss_mode=loss_mode, topk=K, loss_max_clamp=None, **settings)
    actor = FSDPActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    loss_function = functools.partial(
        losses.distillation_ppo_loss,
        config=actor,
        distillation_config=DistillationConfig(distillation_loss=distillation),
    )
    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)  # its constructor asks for a GPU
    engine.use_ulysses_sp = engine.pad_to_length = False
    _, output_args = engine.prepare_model_inputs(batch)
    output = engine.prepare_model_outputs(SimpleNamespace(logits=logits), output_args, batch, loss_function)
    return loss_function(model_output=output, data=batch, dp_group=None)


def packed_logits() -> Tensor:
    total = sum(map(sum, LENGTHS))
    return (2 * torch.randn(1, total, TOKENS, generator=torch.Generator().manual_seed(1))).requires_grad_()


ROWS = [2, 3, 4, 5, 6, 7, 13, 14, 16, 17, 18, 19]
"""Packed positions that predict a token of a response: those before the tokens 3 to 8, 14 and 15, 17 to 20."""


def predictions(batch: Any, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What both models say of response tokens: logits, ids, log-probabilities."""
    return logits[0, ROWS], batch["teacher_ids"].values()[ROWS].long(), batch["teacher_logprobs"].values()[ROWS]


def expected(regularizer: Any, batch: Any, logits: Tensor) -> Tensor:
    """Losses of the response tokens, one after the other."""
    return top_k_loss(regularizer, *predictions(batch, logits))


@needs_verl
@pytest.mark.parametrize("loss_mode", [*sorted(LOSS_MODES), "mixed", "semantic", "summed"])
def test_loss_and_gradient_through_verl(losses: Any, loss_mode: str) -> None:
    regularizers = {
        "mixed": ReverseKL() + 0.5 * make_regularizer("forward-kl"),  # type: ignore[operator]
        "semantic": transport(),
        "summed": ReverseKL() + 4 * transport(),
    }
    regularizer = regularizers.get(loss_mode) or make_regularizer(loss_mode.removeprefix("wpr-"))
    batch, logits = micro_batch(distillation_only=True), packed_logits()
    loss, metrics = step(losses, loss_mode, batch, logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    each = expected(regularizer, batch, logits)
    assert len(each) == 12
    (slope,) = torch.autograd.grad(each.mean(), logits)
    torch.testing.assert_close(loss, each.mean())
    torch.testing.assert_close(gradient, slope)
    assert metrics["distillation/loss_max"].aggregate() == pytest.approx(each.max().item(), rel=1e-5)
    student, ids, log_probs = predictions(batch, logits)
    masses = [p.sum(-1).mean().item() for p in (student.softmax(-1).gather(-1, ids), log_probs.exp())]
    measured = [metrics[f"distillation/{one}_mass"] for one in ("student", "teacher")]
    assert measured == pytest.approx(masses, rel=1e-5)


@needs_verl
def test_forward_kl_beside_that_of_verl(losses: Any) -> None:
    """verl's leaves the rest out: forward KL is its sum over the k tokens and the rest's term."""
    batch, logits = micro_batch(distillation_only=True), packed_logits()
    ours, _ = step(losses, "wpr-forward-kl", batch, logits)
    its, _ = step(losses, "forward_kl_topk", batch, logits)  # its own function is still called
    student, ids, log_q = predictions(batch, logits)
    log_p = student.log_softmax(-1).gather(-1, ids)
    terms = (log_q.exp() * (log_q - log_p)).sum(-1)
    p, q = 1 - log_p.exp().sum(-1), 1 - log_q.exp().sum(-1)
    rest = q * (q / p).log()
    torch.testing.assert_close(its, terms.clamp_min(0).mean())
    torch.testing.assert_close(ours, (terms + rest).mean())


@needs_verl
def test_beside_task_rewards(losses: Any) -> None:
    """verl adds the loss, with its weight, to that of its policy gradient."""
    batch, logits = micro_batch(distillation_only=False), packed_logits()
    task = [
        step(losses, "wpr-reverse-kl", batch, logits, use_task_rewards=True, distillation_loss_coef=c)[0]
        for c in (0, 3)
    ]
    assert abs(task[0].item()) > 1e-3
    torch.testing.assert_close(task[1] - task[0], 3 * expected(ReverseKL(), batch, logits).mean())


@needs_verl
def test_student_at_a_temperature(losses: Any) -> None:
    """verl divides the student's logits by it, and the teacher is at 1."""
    batch, logits = micro_batch(distillation_only=True, temperature=0.5), packed_logits()
    loss, _ = step(losses, "wpr-reverse-kl", batch, logits.clone())
    torch.testing.assert_close(loss, expected(ReverseKL(), batch, 2 * logits).mean())


@needs_verl
def test_under_autocast(losses: Any) -> None:
    """verl's engines run losses under it; costs between tokens are not to be in bfloat16."""
    batch, logits = micro_batch(distillation_only=True), packed_logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = step(losses, "semantic", batch, logits)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected(transport(), batch, logits).mean())


def losses_of_half(rank: int, store: str, results: Any) -> None:
    """One of two processes that have half of each packed sequence's tokens, 21 and one of padding."""
    from verl.trainer.distillation import losses
    from verl.utils import ulysses
    from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ulysses.set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    register("wpr-reverse-kl", "reverse-kl")
    settings = {"use_policy_gradient": False, "log_prob_min_clamp": None}
    distillation = DistillationLossConfig(loss_mode="wpr-reverse-kl", topk=K, **settings)
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    logits = packed_logits()
    half = ulysses.slice_input_tensor(logits, dim=1)
    out = losses.distillation_ppo_loss(
        actor, DistillationConfig(distillation_loss=distillation), data=micro_batch(), student_logits=half
    )
    out["wpr_divergence"].sum().backward()
    results.put((rank, out["wpr_divergence"][0].tolist(), logits.grad[0].tolist()))


@needs_verl
def test_sequences_that_processes_share(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(losses_of_half, (str(tmp_path / "store"), results), nprocs=2)
    (_, first, own), (_, second, other) = sorted(results.get() for _ in range(2))
    batch, logits = micro_batch(), packed_logits()
    each = expected(ReverseKL(), batch, logits)
    together = torch.tensor(first + second)
    assert len(together) == 22
    torch.testing.assert_close(together[ROWS], each)
    assert together[[8, 15, 20, 21]].tolist() == [0.0] * 4  # after the last tokens
    (slope,) = torch.autograd.grad(each.sum(), logits)
    torch.testing.assert_close((torch.tensor(own) + torch.tensor(other))[ROWS], slope[0, ROWS])


@needs_verl
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_policy_gradient": True}, "use_policy_gradient=True .*set use_policy_gradient=False"),
        ({"log_prob_min_clamp": -10.0}, "log_prob_min_clamp=-10.0 .*=null"),
    ],
)
def test_settings_that_are_refused(losses: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(losses, "wpr-reverse-kl", micro_batch(distillation_only=True), packed_logits(), **settings)


@needs_verl
def test_losses_of_another_function_are_refused(losses: Any) -> None:
    """Where an engine computes verl's own loss beside the hook, as fused kernels and Megatron do."""
    from verl.workers.config import DistillationConfig, DistillationLossConfig, McoreActorConfig

    settings = {"use_policy_gradient": False, "use_task_rewards": False, "log_prob_min_clamp": None}
    distillation = DistillationConfig(
        distillation_loss=DistillationLossConfig(loss_mode="wpr-alpha", topk=K, **settings)
    )
    actor = McoreActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    row = torch.nested.nested_tensor_from_jagged(torch.zeros(21), torch.tensor([0, 9, 16, 21]))
    output = dict.fromkeys(("distillation_losses", "student_mass", "teacher_mass"), row)
    with pytest.raises(
        ValueError, match="strategy='megatron' did not ask loss_mode='wpr-alpha' .*use_fused_kernels=False"
    ):
        losses.distillation_ppo_loss(actor, distillation, output, micro_batch())


@needs_verl
def test_names_that_need_a_geometry_or_are_taken(losses: Any) -> None:
    with pytest.raises(ValueError, match="'reverse-kl \\+ 4\\*semantic' has costs .* lambda: Wasserstein.from_model"):
        register("theirs", "reverse-kl + 4*semantic")
    with pytest.raises(ValueError, match="'forward_kl_topk' is already registered"):
        register("forward_kl_topk", "forward-kl")


@needs_verl
@pytest.mark.parametrize("first", ["verl", "wpr.verl, verl"])
def test_verl_loads_it_by_an_environment_variable(first: str) -> None:
    code = (
        f"import {first}; from verl.workers.config import DistillationLossConfig as C; print(C(loss_mode='wpr-alpha'))"
    )
    loaded = run(code, VERL_USE_EXTERNAL_MODULES="wpr.verl")
    assert "loss_mode='wpr-alpha'" in loaded.stdout, loaded.stderr
    without = run(code, VERL_USE_EXTERNAL_MODULES="")
    assert "Unsupported loss mode: wpr-alpha" in without.stderr


@needs_verl
def test_the_settings_of_the_page() -> None:
    """docs/verl.md: its lines are settings of verl, and give what they say."""
    page = (Path(__file__).parent.parent / "docs" / "verl.md").read_text(encoding="utf-8")
    block = page.split("```bash")[1].split("```")[0]
    overrides = re.findall(r"^  (\S+=\S+)", block, re.MULTILINE)
    assert len(overrides) == 10
    code = f"""if True:
        import verl
        from pathlib import Path
        from hydra import compose, initialize_config_dir
        from verl.utils.config import omega_conf_to_dataclass
        with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            config = compose("ppo_trainer", overrides={[*overrides, "actor_rollout_ref.rollout.name=vllm"]})
        loss = omega_conf_to_dataclass(config.distillation).distillation_loss
        print(loss.loss_mode, loss.topk, loss.use_policy_gradient, loss.log_prob_min_clamp, loss.loss_settings.use_topk)
        print(config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.model.use_fused_kernels)
        print(config.ray_kwargs.ray_init.runtime_env.env_vars)
    """
    finished = run(code, VERL_USE_EXTERNAL_MODULES="wpr.verl")
    assert finished.stdout.splitlines() == [
        "wpr-reverse-kl 64 False None True",
        "fsdp False",
        "{'VERL_USE_EXTERNAL_MODULES': 'wpr.verl'}",
    ], finished.stderr


def test_without_verl() -> None:
    """The loss is there, and registering says what is missing."""
    hidden = "import sys; sys.modules['verl'] = None; "  # also where it is installed
    code = hidden + "import wpr.verl as w; print(w.top_k_loss.__name__); w.register('a', 'reverse-kl')"
    finished = run(code)
    assert finished.stdout.split() == ["top_k_loss"]
    assert "ImportError: wpr.verl.register needs verl" in finished.stderr
    assert "pip install verl==0.9.1" in finished.stderr
