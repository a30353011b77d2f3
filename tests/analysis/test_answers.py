"""Positions of responses: the same logits as the models give by themselves, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from tests.ppo import tiny
from wpr import ReverseKL, SquaredHellinger
from wpr.analysis import answers as module
from wpr.analysis.answers import positions, token_penalties
from wpr.runs.responses import Response


def some_answers() -> list[Response]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, (prompt, response) in enumerate([(3, 5), (7, 1), (2, 9), (4, 4), (1, 2)]):
        ids = torch.randint(3, tiny.TOKENS, (prompt + response,), generator=generator).tolist()
        made.append(Response(str(number), "", "", number, prompt_ids=ids[:prompt], response_ids=ids[prompt:]))
    return made


@torch.no_grad()
def by_itself(model: torch.nn.Module, answer: Response) -> torch.Tensor:
    ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
    return model(ids).logits[0, len(answer.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_logits_are_the_models_own(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.LOGITS_MB, "cpu", 3 * tiny.TOKENS * 4 / 2**20)  # slices of three positions
    policy, reference, answers = tiny.policy(0), tiny.policy(1), some_answers()
    parts = list(positions(policy, reference, answers, temperature=0.7, batch_size=batch_size))
    assert max(len(part.tokens) for part in parts) == 3 if batch_size > 1 else True
    where = torch.cat([part.answer for part in parts])
    for index, answer in enumerate(answers):
        of = where == index
        assert torch.cat([part.tokens for part in parts])[of].tolist() == answer.response_ids
        for name, model in (("policy", policy), ("reference", reference)):
            found = torch.cat([getattr(part, name) for part in parts])[of]
            torch.testing.assert_close(found, by_itself(model, answer) / 0.7, rtol=1e-4, atol=1e-5)


def test_penalties_are_those_of_the_regularizers() -> None:
    policy, reference, answers = tiny.policy(0), tiny.policy(1), some_answers()
    found = token_penalties(policy, reference, answers, {"kl": ReverseKL(), "h": SquaredHellinger()}, batch_size=2)
    for index, answer in enumerate(answers):
        logits = by_itself(policy, answer), by_itself(reference, answer)
        out = ReverseKL()(*logits, torch.tensor(answer.response_ids))
        of = found.answer == index
        torch.testing.assert_close(found.penalty["kl"][of], out.penalty, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.divergence["kl"][of], out.divergence, rtol=1e-3, atol=1e-6)
    means = found.means(found.penalty["h"], len(answers))
    assert float(means[1]) == pytest.approx(float(found.penalty["h"][found.answer == 1].mean()))
    assert found.joined(found).penalty.keys() == {"kl", "h"}


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(ValueError, match="no response tokens"):
        token_penalties(tiny.policy(0), tiny.policy(1), [], {"kl": ReverseKL()})
