"""Which tokens of a response are real, and what is cut off."""

from __future__ import annotations

import torch

from wpr.ppo.rollout import Prompts, Responses, Rollout, join, last_token, responses_from_tokens, trim


def test_real_tokens_end_with_the_first_end_of_sequence() -> None:
    tokens = torch.tensor([[5, 1, 0, 0], [5, 6, 7, 8], [1, 0, 0, 0], [5, 0, 0, 1], [0, 0, 0, 0]])
    found = responses_from_tokens(tokens, eos=[1])
    assert found.mask.sum(-1).tolist() == [2, 4, 1, 4, 4]  # a sampled padding token (0) is a token like any other
    assert found.finished.tolist() == [True, False, True, True, False]


def test_padding_may_be_the_end_of_sequence() -> None:
    found = responses_from_tokens(torch.tensor([[5, 1, 1, 1], [5, 6, 7, 1], [5, 6, 7, 8]]), eos=[1])
    assert found.mask.sum(-1).tolist() == [2, 4, 4]
    assert found.finished.tolist() == [True, True, False]


def test_several_ends_and_none() -> None:
    tokens = torch.tensor([[5, 9, 1], [5, 1, 9]])
    assert responses_from_tokens(tokens, eos=[1, 9]).mask.sum(-1).tolist() == [2, 2]
    none = responses_from_tokens(tokens, eos=[])
    assert none.mask.all()
    assert not none.finished.any()


def test_last_token_of_empty_and_full_responses() -> None:
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    assert last_token(3, mask).tolist() == [2, 3, 4]


def rollout() -> Rollout:
    prompts = Prompts(torch.tensor([[0, 0, 5], [0, 6, 7], [8, 9, 4]]), torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]))
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    ids, attention = join(prompts, Responses(torch.full((3, 3), 3), mask, torch.ones(3)))
    numbers = torch.arange(9.0).reshape(3, 3)
    return Rollout(ids, attention, mask, numbers, numbers + 10, numbers + 20, numbers + 30)


def test_join_hides_padding() -> None:
    made = rollout()
    assert made.input_ids.tolist() == [[0, 0, 5, 3, 0, 0], [0, 6, 7, 3, 3, 0], [8, 9, 4, 0, 0, 0]]
    assert made.attention_mask.tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]


def test_take_cuts_common_padding_on_both_sides() -> None:
    part = rollout().take(torch.tensor([1, 0]))
    assert part.input_ids.tolist() == [[6, 7, 3, 3], [0, 5, 3, 0]]
    assert part.mask.tolist() == [[True, True], [True, False]]
    assert part.log_probs.tolist() == [[3.0, 4.0], [0.0, 1.0]]
    assert part.returns.tolist() == [[33.0, 34.0], [30.0, 31.0]]


def test_take_of_only_empty_responses_leaves_a_column() -> None:
    part = rollout().take(torch.tensor([2]))
    assert part.input_ids.shape == (1, 4)
    assert part.mask.tolist() == [[False]]


def test_trim_keeps_what_any_row_has() -> None:
    made = rollout()
    ids, attention, mask = trim(made.input_ids, made.attention_mask, made.mask)
    assert ids.shape == attention.shape == (3, 5)
    assert mask.shape == (3, 2)


def test_state_survives() -> None:
    made = rollout()
    again = Rollout.from_state_dict(made.state_dict(), torch.device("cpu"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in made.state_dict().items())
