"""TRL's GRPO and RLOO under any regularizer, the exact penalty in the reward or the exact divergence in the loss.

Notation for shapes: ``B`` completions of this process, ``T`` completion tokens, padding included, ``H`` hidden size,
``G`` completions per prompt, ``P`` completion tokens that the policy drew, without padding.

Reward functions may give a number per token: then advantage_t has what is still to come of the reward in the place of
all of it, less its mean over the group.

In the reward, for penalties c_t, divergences D_t and C_t = c_t + D_{t+1} + D_{t+2} + ... to the completion's end,

    advantage_t  =  TRL's advantage  -  beta k (C_t - mean of C_t over the group's others that have a token t)

with k = (G-1)/G for GRPO, whose baseline scales the reward's gradient by that, and 1 for RLOO. Where TRL has one ratio
for a sequence, its tokens share the advantage with c_1 + c_2 + ... In the loss: TRL's loss + beta D_t, averaged as
TRL's own. See docs/trl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import trl
from torch import Tensor

from wpr.language_models import as_reference, evaluating, is_peft, pad, plain_model, starting_point
from wpr.ppo.advantages import beyond_the_others, costs_to_go, earned_before, group_scale
from wpr.ppo.distributed import max_over_processes, place_reference
from wpr.ppo.generation import Generation
from wpr.ppo.rollout import Prompts
from wpr.ppo.scoring import from_hidden
from wpr.regularizers.spec import RECOMMENDED
from wpr.rewards.function import for_trl, sum_placed
from wpr.trl.measuring import AnyRegularizer, Measuring, drawn, sequences, states_before
from wpr.trl_settings import check_settings, not_drawn, refuse, sampling_of


class Regularized(Measuring):
    """What both trainers have beside TRL's own.

    regularizer: a name with settings, or a sum of them (`wpr.regularizers.spec`); the same as a mapping or a list; or
        an object. Its geometry, if it has one, is measured once, on the embeddings of the model before training.
    regularizer_in: ``reward`` or ``loss``.
    regularizer_beta: weight of the penalty; 0 only logs the divergence.
    regularizer_future: what a token pays for those after it in the reward form: their exact ``divergence``, or the
        ``penalty`` of the tokens drawn, which has the same mean and more variance.
    regularizer_memory_mb: for the logits of both models that exist at a time.
    generation: a back end of `wpr.ppo` that draws completions (docs/generation-back-ends.md); None: TRL does.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *others: Any,
        regularizer: AnyRegularizer = RECOMMENDED,
        regularizer_in: Literal["reward", "loss"] = "reward",
        regularizer_beta: float = 0.05,
        regularizer_future: Literal["divergence", "penalty"] = "divergence",
        regularizer_memory_mb: float = 256.0,
        generation: Generation | None = None,
        **options: Any,
    ) -> None:
        self.generation = generation
        self.regularizer_in, self.regularizer_beta = regularizer_in, regularizer_beta
        self.regularizer_future, self.regularizer_memory_mb = regularizer_future, regularizer_memory_mb
        if args is not None:  # before a model is loaded
            check_settings(args, regularizer_in, regularizer_beta, regularizer_future)
        super().__init__(model, reward_funcs, args, *others, **options)
        policy = self.accelerator.unwrap_model(self.model)
        check_settings(self.args, regularizer_in, regularizer_beta, regularizer_future)
        refuse(self._faults(policy) | ({} if generation is None else not_drawn(self.args)))
        self.reward_funcs: list[Any] = for_trl(self.reward_funcs, self.processing_class)
        theirs = getattr(self, "ref_model", None)  # TRL's, for a KL of its own
        before = starting_point(policy, adapter_is_new=not is_peft(model)) if theirs is None else theirs
        before = before if before is None else self.accelerator.unwrap_model(before)
        self.reference = before
        if before is not None:
            self.reference = place_reference(before, self.accelerator, ours=theirs is None)
        self._place(regularizer, policy if before is None else before)

    @torch.no_grad()
    def _draw(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Completions by the back end. Seeds come from torch's generator, as TRL's draws do."""
        assert self.generation is not None
        policy = self.accelerator.unwrap_model(self.model)
        seeds = torch.randint(2**63 - 1, (len(prompt_ids),)).tolist()
        prompts = Prompts(*pad(prompt_ids, left=True, device=self.accelerator.device))
        ends = getattr(self, "eos_token_ids", None) or [self._tokenizer.eos_token_id]  # TRL before 1.15 has one
        with evaluating(policy), self.accelerator.autocast():
            responses = self.generation.generate(policy, prompts, sampling_of(self.args, ends), seeds)
        return [tokens[real].tolist() for tokens, real in zip(responses.tokens, responses.mask, strict=True)]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with rewards of tokens and penalties in the advantages: ``(B, T)``, or ``(B,)`` where a sequence has
        one ratio.
        """
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode, mask = "train" if self.model.training else "eval", drawn(batch)
        group = self.num_generations if mode == "train" else self.num_generations_eval
        if not self._one_ratio_per_sequence:
            batch["advantages"] = self._place_rewards(batch["advantages"], mask, group)
        if self.regularizer_in == "loss":
            return batch
        penalty, divergence = self._penalties(batch, mask, mode)
        if self._one_ratio_per_sequence:
            to_go, present = penalty.sum(-1, keepdim=True), mask.any(-1, keepdim=True)
        else:
            to_go = costs_to_go(penalty, divergence if self.regularizer_future == "divergence" else penalty)
            present = mask
        everyone = self._of_all(torch.stack([to_go, present.to(to_go)], -1))
        beyond = self._own(beyond_the_others(everyone[..., 0], everyone[..., 1], group), to_go)
        factor = 0.0 if group == 1 else self._baseline_factor(group)  # TRL's advantages are 0 without others, too
        advantages = batch["advantages"].view(len(mask), -1) - self.regularizer_beta * factor * beyond
        batch["advantages"] = advantages.squeeze(-1) if self._one_ratio_per_sequence else advantages
        return batch

    def _of_all(self, values: Tensor) -> Tensor:
        """Values ``(B, T, ...)`` of all processes: a group may be spread over them, each with a T of its own."""
        everyone: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))
        return everyone

    def _own(self, everyone: Tensor, like: Tensor) -> Tensor:
        """This process's part of what `_of_all` gave, ``(B, T)`` as ``like``."""
        part: Tensor = everyone[self.accelerator.process_index * len(like) :][: len(like), : like.shape[1]]
        return part

    def _calculate_rewards(self, *given: Any) -> Any:
        """TRL's, of all processes ``(completions, functions)``; kept."""
        self._scores = super()._calculate_rewards(*given)
        return self._scores

    def _place_rewards(self, advantages: Tensor, mask: Tensor, group: int) -> Tensor:
        """Advantages ``(B,)``, less what a completion earned before each of its tokens ``(B, T)``; as they are where
        rewards know nothing of tokens.
        """
        weights = self.reward_weights.to(mask.device)
        placed = sum_placed(self.reward_funcs, weights.tolist(), mask)
        if group == 1 or not max_over_processes(self.accelerator, int(placed.any())):
            return advantages
        way = getattr(self, "multi_objective_aggregation", "sum_then_normalize")
        refused = (
            f"multi_objective_aggregation={way!r} scales every reward by itself, which those of tokens cannot follow"
        )
        refuse({f"{refused}; set it to 'sum_then_normalize', or place rewards at the end": "sum_then" not in way})
        rewards = (self._scores * weights).nansum(-1).masked_fill(self._scores.isnan().all(-1), torch.nan)
        past = earned_before(self._of_all(placed), ~rewards.isnan(), group)
        if self.scale_rewards != "none":
            past *= group_scale(self.accelerator.gather(advantages), rewards, past, group).unsqueeze(-1)
        return advantages.unsqueeze(-1) - self._own(past, mask) * mask

    @torch.no_grad()
    def _penalties(self, batch: Mapping[str, Any], mask: Tensor, mode: str) -> list[Tensor]:
        """Penalties and divergences of completion tokens ``(B, T)``, 0 where the mask is; both models run without
        dropout.
        """
        policy = self.accelerator.unwrap_model(self.model)
        whole = sequences(batch)
        size, labels = getattr(self.args, f"per_device_{mode}_batch_size"), self.regularizer.labels
        found = [torch.zeros(2 + len(labels), 0, device=mask.device)]
        for rows in torch.arange(len(mask), device=mask.device).split(size):
            here = mask[rows]
            given = {**{name: values[rows] for name, values in whole.items()}, "use_cache": False}
            with evaluating(policy), self.accelerator.autocast():
                own = states_before(plain_model(policy).base_model(**given), here)
            other = self._reference_states(given, here)
            with self._head_context():
                out = from_hidden(
                    self.regularizer, policy, own, self.reference, other, batch["completion_ids"][rows][here],
                    temperature=self.temperature, memory_mb=self.regularizer_memory_mb,
                )  # fmt: skip
            parts = [out.diagnostics[f"{label}.divergence"] for label in labels]
            found.append(torch.stack([out.penalty, out.divergence, *parts]).float())
        values = torch.cat(found, -1)
        self._log_means(["penalty", "divergence", *labels], values, mode)
        return [torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, row) for row in values[:2]]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        """TRL's, with the divergence on top in the loss form."""
        given = (model, inputs, return_outputs, num_items_in_batch)
        if self.regularizer_in == "reward":
            return super().compute_loss(*given)
        policy, mask = self.accelerator.unwrap_model(self.model), drawn(inputs)
        calls: list[tuple[Any, Any]] = []
        hook = plain_model(policy).base_model.register_forward_hook
        keep = hook(lambda _, __, options, out: calls.append((options, out)), with_kwargs=True)
        try:
            loss = super().compute_loss(*given)
        finally:
            keep.remove()
        length = inputs["prompt_ids"].shape[1] + mask.shape[1]
        if [getattr(out, "last_hidden_state", mask).shape[:2] for _, out in calls] != [(len(mask), length)]:
            raise RuntimeError(
                f"TRL {trl.__version__} ran the model {len(calls)} time(s) for its loss, not once over {len(mask)} x "
                f"{length} tokens, so that no hidden states are known; use regularizer_in='reward', or TRL 1.16"
            )
        own, other = states_before(calls[0][1], mask), self._reference_states(calls[0][0], mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.regularizer_beta > 0):
            divergence = self._divergence(policy, own, self.reference, other)
        self._log_measured()
        if self.regularizer_beta == 0:  # also where the divergence is infinite
            return loss
        placed = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, divergence)
        return loss + self.regularizer_beta * self._average(placed, mask, inputs)

    @torch.no_grad()
    def _reference_states(self, options: Mapping[str, Any], mask: Tensor) -> Tensor:
        """The reference's hidden states ``(P, H)``, from what the policy's body was called with."""
        policy = self.accelerator.unwrap_model(self.model)
        with as_reference(policy, self.reference) as model, evaluating(model), self.accelerator.autocast():
            return states_before(plain_model(model).base_model(**options), mask)


class GRPOTrainer(Regularized, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` under a regularizer; what it takes beside TRL's arguments is with `Regularized`."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **options: Any) -> Any:
        if self.generation is None:
            return super()._generate_single_turn(prompt_ids, *others, **options)
        return self._draw(prompt_ids), None  # no log-probabilities: the policy's own are computed

    @property
    def _one_ratio_per_sequence(self) -> bool:
        return bool(self.importance_sampling_level == "sequence")

    def _baseline_factor(self, group: int) -> float:
        return (group - 1) / group

    def _average(self, values: Tensor, mask: Tensor, inputs: Mapping[str, Any]) -> Any:
        """TRL's average over completion tokens ``(B, T)`` by ``loss_type``, scaled for accumulation as there."""
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type in ("dapo", "cispo", "vespo"):  # num_items_in_batch: of all processes, since generation
            share = steps / self.args.steps_per_generation if training else 1
            return values.sum() / (inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes * share)
        if self.loss_type in ("grpo", "sapo"):
            return (values.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / steps
        if self.loss_type == "bnpo":
            return values.sum() / mask.sum().clamp(min=1) / steps
        return values.sum(-1).mean() / (self.max_completion_length if self.loss_type == "dr_grpo" else 1) / steps


class RLOOTrainer(Regularized, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's `RLOOTrainer` under a regularizer; what it takes beside TRL's arguments is with `Regularized`."""

    _one_ratio_per_sequence = True

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **options: Any) -> Any:
        if self.generation is None:
            return super()._generate_single_turn(prompt_ids, *others, **options)
        return self._draw(prompt_ids)

    def _baseline_factor(self, group: int) -> float:
        return 1.0

    def _average(self, values: Tensor, mask: Tensor, inputs: Mapping[str, Any]) -> Any:
        return values.sum(-1).mean()  # a sequence's log-probabilities are summed there; the Trainer divides by steps
