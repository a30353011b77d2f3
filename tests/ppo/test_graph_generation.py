"""Generation with a cache of fixed size, against transformers' own; graphs themselves need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ppo import tiny
from tests.ppo.test_generation import prompts, sampling
from wpr.ppo.generation import GenerationError, TransformersGeneration
from wpr.ppo.graph_generation import LOOK, GraphGeneration, why_not

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [[5, 9, 11, 4], [7], [12, 3, 8, 30, 31, 22, 17, 6, 5], [9, 9], [3, 4, 5, 6, 7], [20], [21, 22], [8, 8, 8]]
SEEDS = list(range(100, 100 + len(ROWS)))


def batch(rows: list[list[int]] = ROWS) -> Any:
    made = prompts(rows, 9)
    return type(made)(made.input_ids.to(DEVICE), made.attention_mask.to(DEVICE))


def same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.mask, theirs.mask)
    assert torch.equal(ours.finished, theirs.finished)
    assert torch.equal(ours.tokens[ours.mask], theirs.tokens[theirs.mask])


SETTINGS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "not before": {"min_new_tokens": 30},
    "no end": {"eos": ()},
    "one token": {"max_new_tokens": 1},
    "two ends": {"eos": (1, 7, 12)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_generate(name: str) -> None:
    model = tiny.policy(3).to(DEVICE)
    wanted = sampling(**{"max_new_tokens": 40, **SETTINGS[name]})
    theirs = TransformersGeneration().generate(model, batch(), wanted, SEEDS)
    generation = GraphGeneration(say=pytest.fail)
    for _ in range(2):  # the second time with what is there
        same(generation.generate(model, batch(), wanted, SEEDS), theirs)


def test_rows_that_ended_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many ends, of 8 rows some stay until the last token."""
    model = tiny.policy(3).to(DEVICE)
    wanted = sampling(max_new_tokens=6 * LOOK, eos=(1, 13))
    theirs = TransformersGeneration().generate(model, batch(), wanted, SEEDS)
    generation, rows = GraphGeneration(graphs=False), []
    from wpr.ppo import fixed_cache

    advance = fixed_cache.State.advance
    monkeypatch.setattr(
        fixed_cache.State, "advance", lambda self, count, given: (rows.append(count), advance(self, count, given))
    )
    same(generation.generate(model, batch(), wanted, SEEDS), theirs)
    rows = rows[3:]  # before them, the trial of the model
    assert rows[0] == 8
    assert rows[-1] < 8
    assert rows == sorted(rows, reverse=True)


def test_a_new_policy_is_seen() -> None:
    """An optimizer step changes weights in place; another batch, other lengths and another model come after it."""
    model, generation = tiny.policy(3).to(DEVICE), GraphGeneration(say=pytest.fail)
    wanted = sampling(max_new_tokens=20)
    before = generation.generate(model, batch(), wanted, SEEDS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE))
    after = generation.generate(model, batch(), wanted, SEEDS)
    same(after, TransformersGeneration().generate(model, batch(), wanted, SEEDS))
    assert not torch.equal(before.tokens, after.tokens)
    for rows, tokens, policy in ((ROWS[:3], 20, model), (ROWS * 2, 50, model), (ROWS, 8, tiny.policy(5).to(DEVICE))):
        wanted, seeds = sampling(max_new_tokens=tokens), list(range(len(rows)))
        theirs = TransformersGeneration().generate(policy, batch(rows), wanted, seeds)
        same(generation.generate(policy, batch(rows), wanted, seeds), theirs)


def test_with_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.policy(3), adapter).to(DEVICE).eval()
    theirs = TransformersGeneration().generate(model, batch(), sampling(max_new_tokens=20), SEEDS)
    same(GraphGeneration(say=pytest.fail).generate(model, batch(), sampling(max_new_tokens=20), SEEDS), theirs)


def test_logits_that_are_no_distribution() -> None:
    model = tiny.policy(3).to(DEVICE)
    with torch.no_grad():
        model.model.embed_tokens.weight[20] = torch.nan
    with pytest.raises(GenerationError, match="token 0 of response 5"):
        GraphGeneration().generate(model, batch(), sampling(), SEEDS)


def test_a_model_that_cannot_is_said_once() -> None:
    model, said = tiny.policy(3).to(DEVICE), []
    model.set_attn_implementation("eager")
    generation = GraphGeneration(say=said.append)
    for _ in range(2):
        ours = generation.generate(model, batch(), sampling(), SEEDS)
    same(ours, TransformersGeneration().generate(model, batch(), sampling(), SEEDS))
    assert said == ["responses are drawn by transformers' generate: its attention is eager, not sdpa"]


SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", {}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("Qwen3Config", {}),
        ("Gemma3TextConfig", {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
        ("MistralConfig", {"sliding_window": 6}),
    ],
)
def test_architectures(kind: str, settings: dict[str, Any]) -> None:
    """Responses are longer than the layers' windows, and so is a prompt."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SMALL, **settings))
    model = model.to(DEVICE).eval()
    for wanted in (sampling(max_new_tokens=24), sampling(max_new_tokens=24, top_k=1)):
        theirs = TransformersGeneration().generate(model, batch(), wanted, SEEDS)
        same(GraphGeneration(say=pytest.fail).generate(model, batch(), wanted, SEEDS), theirs)


@pytest.mark.parametrize("settings", [{"multi_query": True}, {"alibi": True}])
def test_a_model_with_attention_of_its_own(settings: dict[str, Any]) -> None:
    """Falcon takes another way under another name of its attention: a trial shows it, and generate draws."""
    from transformers import AutoModelForCausalLM, FalconConfig

    torch.manual_seed(0)
    config = FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **settings)
    model, said = AutoModelForCausalLM.from_config(config).to(DEVICE).eval(), []
    for parameter in model.parameters():
        parameter.data.mul_(4)
    generation = GraphGeneration(say=said.append)
    theirs = TransformersGeneration().generate(model, batch(), sampling(), SEEDS)
    for _ in range(2):
        same(generation.generate(model, batch(), sampling(), SEEDS), theirs)
    assert len(said) == 1
    assert "FalconForCausalLM" in said[0]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_change_with_the_length(kind: str) -> None:
    model = tiny.policy(3)
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    assert why_not(model, 8) == f"its positions ({kind}) change with the length of a sequence"


@pytest.mark.parametrize("eos", [(), (1,)])
def test_fewer_tokens_than_before(eos: tuple[int, ...]) -> None:
    model, generation = tiny.policy(3).to(DEVICE), GraphGeneration(say=pytest.fail)
    for tokens in (40, 5, 1, 12):
        wanted = sampling(max_new_tokens=tokens, eos=eos)
        theirs = TransformersGeneration().generate(model, batch(), wanted, SEEDS)
        same(generation.generate(model, batch(), wanted, SEEDS), theirs)


def test_after_logits_that_were_no_distribution() -> None:
    """What was NaN in the cache is not seen by the next rollout."""
    model, generation = tiny.policy(3).to(DEVICE), GraphGeneration()
    theirs = TransformersGeneration().generate(model, batch(), sampling(), SEEDS)
    row = model.model.embed_tokens.weight[20].clone()
    with torch.no_grad():
        model.model.embed_tokens.weight[20] = torch.nan
        with pytest.raises(GenerationError):
            generation.generate(model, batch(), sampling(), SEEDS)
        model.model.embed_tokens.weight[20] = row
    same(generation.generate(model, batch(), sampling(), SEEDS), theirs)


def test_an_adapter_that_is_switched_off() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model, generation = peft.get_peft_model(tiny.policy(3), adapter).to(DEVICE).eval(), GraphGeneration(say=pytest.fail)
    generation.generate(model, batch(), sampling(), SEEDS)
    state = generation.drawer.state
    with model.disable_adapter():
        ours = generation.generate(model, batch(), sampling(), SEEDS)
        same(ours, TransformersGeneration().generate(model, batch(), sampling(), SEEDS))
    assert generation.drawer.state is not state


def test_layers_of_another_kind() -> None:
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(**SMALL, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=64)
    model = AutoModelForCausalLM.from_config(config)
    assert "chunked_attention" in config.layer_types
    assert why_not(model, 16) is None
    assert why_not(model, 17) == "Llama4ForCausalLM has layers of another kind (chunked_attention)"


def test_what_does_not_fit_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has room for three rows; the next rollout begins with what fitted."""
    model, said, sizes = tiny.policy(3).to(DEVICE), [], []
    generation = GraphGeneration(say=said.append)
    draw = generation.drawer.generate

    def crowded(runs: Any, rows: Any, *others: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError
        return draw(runs, rows, *others)

    monkeypatch.setattr(generation.drawer, "generate", crowded)
    theirs = TransformersGeneration().generate(model, batch(), sampling(), SEEDS)
    for _ in range(2):
        same(generation.generate(model, batch(), sampling(), SEEDS), theirs)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert said == [f"8 responses do not fit the GPU's memory at a time; {rows} are drawn instead" for rows in (4, 2)]


@pytest.mark.parametrize(("kept", "stays"), [(0, False), (1e9, True), (None, True)])
def test_memory_between_rollouts(kept: float | None, stays: bool) -> None:
    generation = GraphGeneration(kept_bytes=kept)
    generation.generate(tiny.policy(3).to(DEVICE), batch(), sampling(), SEEDS)
    assert (generation.drawer.state is not None) == stays


def test_compiled() -> None:
    """What torch.compile makes of the model; here without a compiler, by its tracing alone."""
    import functools

    from wpr.ppo import fixed_cache

    model, compiling = tiny.policy(3).to(DEVICE), functools.partial(torch.compile, backend="eager", fullgraph=True)
    theirs = TransformersGeneration().generate(model, batch(), sampling(), SEEDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_cache.torch, "compile", compiling)
        same(GraphGeneration(compiled=True, graphs=False).generate(model, batch(), sampling(), SEEDS), theirs)
