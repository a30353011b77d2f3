"""The same numbers on a GPU: everything that takes tensors, against the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.problems import clustered_embeddings
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers.registry import REGULARIZERS
from wpr.transport.support import truncate

pytestmark = pytest.mark.needs("gpu")

V = 900


@pytest.fixture(scope="module")
def geometry() -> TokenGeometry:
    return TokenGeometry.from_embeddings(clustered_embeddings(words=300, size=64).bfloat16(), neighbours=40)


def logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, reference = 3 * torch.randn(2, 150, V, generator=generator)
    return policy.to(dtype), reference.to(dtype), torch.randint(V, (150,), generator=generator)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_geometry(metric: str, dtype: torch.dtype, tmp_path: object) -> None:
    weight = clustered_embeddings(words=300, size=64).to(dtype)
    cpu, gpu = (TokenGeometry.from_embeddings(w, metric, neighbours=40) for w in (weight, weight.cuda()))
    torch.testing.assert_close(gpu.radius.cpu(), cpu.radius, rtol=1e-5, atol=1e-6)
    assert torch.equal(gpu.alive.cpu(), cpu.alive)
    ids = torch.randint(-1, V, (20, 66), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gpu.cost(ids.cuda()).cpu(), cpu.cost(ids), rtol=2e-5, atol=1e-6)
    gpu.save(f"{tmp_path}/g")
    assert TokenGeometry.load(f"{tmp_path}/g", weight).scale == gpu.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_support(dtype: torch.dtype) -> None:
    arguments = logits(dtype)
    cpu, gpu = truncate(*arguments, 32), truncate(*(x.cuda() for x in arguments), 32)
    assert torch.equal(gpu.ids.cpu(), cpu.ids)
    torch.testing.assert_close(gpu.log_policy.cpu(), cpu.log_policy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["paper", "unbalanced"])
def test_wasserstein(preset: str, dtype: torch.dtype, geometry: TokenGeometry) -> None:
    arguments = logits(dtype)
    cpu = Wasserstein(geometry, preset, k2=32)(*arguments)
    gpu = Wasserstein(geometry.to("cuda"), preset, k2=32)(*(x.cuda() for x in arguments))
    torch.testing.assert_close(gpu.penalty.cpu(), cpu.penalty, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gpu.divergence.cpu(), cpu.divergence, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in REGULARIZERS if name != "wasserstein"])
def test_f_divergences(name: str) -> None:
    arguments = logits(torch.bfloat16)
    cpu, gpu = make_regularizer(name)(*arguments), make_regularizer(name)(*(x.cuda() for x in arguments))
    torch.testing.assert_close(gpu.penalty.cpu(), cpu.penalty, rtol=1e-3, atol=1e-3)


def test_devices_that_do_not_fit(geometry: TokenGeometry) -> None:
    policy, reference, tokens = logits(torch.float32)
    with pytest.raises(ValueError, match="cuda:0, cpu and cpu"):
        ReverseKL()(policy.cuda(), reference, tokens)
    with pytest.raises(ValueError, match="geometry is on cpu"):
        Wasserstein(geometry, "unbalanced", k2=32)(policy.cuda(), reference.cuda(), tokens.cuda())


def test_a_recipe_s_geometry_is_measured_on_the_gpu() -> None:
    from tests.ppo import tiny
    from wpr.model_geometry import regularizer_on
    from wpr.regularizers.spec import RegularizerSpec

    settings = RegularizerSpec.from_settings("semantic", neighbours=20, k2=16)
    model = tiny.policy()
    there, here = (regularizer_on(model, settings, device).geometry for device in (torch.device("cuda"), None))
    assert (there.embeddings.device.type, there.radius.device.type) == ("cuda", "cuda")
    torch.testing.assert_close(there.radius.cpu(), here.radius, rtol=1e-5, atol=1e-6)
