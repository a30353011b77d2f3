"""`PPOTrainer`: PPO with a critic, under any policy regularizer, as a transformers Trainer.

Responses are drawn and measured by `collect.Collector`, advantages and losses are pure functions, and `RolloutTrainer`
fits rollouts into the Trainer's loop. `docs/ppo.md` has the formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from wpr.ppo.advantages import assemble_rewards, explained_variance, generalized_advantages, whiten
from wpr.ppo.beta import AdaptiveBeta, BetaController, ScheduledBeta
from wpr.ppo.collect import Collector, Experience
from wpr.ppo.config import PPOConfig, accepts_trl_names
from wpr.ppo.console import report_completions, write_completions
from wpr.ppo.distributed import is_sharded, max_over_processes, place_reference
from wpr.ppo.evaluation import HeldOutEvaluation
from wpr.ppo.faults import Fault, describe_loss
from wpr.ppo.generation import Generation
from wpr.ppo.losses import policy_loss, value_loss
from wpr.ppo.metrics import scored
from wpr.ppo.parts import (
    check_actor_critic,
    check_reference,
    load_models,
    load_tokenizer_of,
    make_monitors,
    place_regularizer,
    place_reward,
    sampling_of,
    use_one_gpu,
)
from wpr.ppo.prompts import PromptCollator
from wpr.ppo.rollout import Rollout
from wpr.ppo.rollout_log import completion_rows, note_rollout
from wpr.ppo.rollout_trainer import LossFaultError, RolloutTrainer
from wpr.regularizers import Regularizer
from wpr.regularizers.spec import RECOMMENDED
from wpr.rewards import Reward, ScoreShaping

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig, PeftModel

logger = logging.getLogger(__name__)

Model: TypeAlias = "PreTrainedModel | PeftModel | str | Path"
Rows: TypeAlias = "Dataset | Sequence[Mapping[str, Any]]"
RewardSource: TypeAlias = "Reward | Model | Callable[..., Sequence[float]] | Sequence[Any]"


class PPOTrainer(HeldOutEvaluation, RolloutTrainer):
    """Algorithm 2 of the paper, for any `Regularizer`.

    Example::

        trainer = PPOTrainer(
            model="path/to/sft", critic="path/to/reward-model", reward="path/to/reward-model",
            regularizer="reverse-kl + 4*semantic", args=PPOConfig("out", beta=0.05), train_dataset=prompts,
        )
        trainer.train()

    Args:
        model (`PreTrainedModel`, `PeftModel`, `str` or `Path`): the policy: a causal LM, or its folder or hub name.
        args (`PPOConfig`): the settings.
        reward (`PreTrainedModel`, `str`, `Path`, `Callable`, `Reward`, or a `list` of these): what scores responses: a
            sequence-classification model or its folder, a function ``f(prompts, responses, **columns) -> list[float]``
            or one for TRL's trainers, or several of these, with or without weights; see `wpr.rewards.as_reward`. Also
            ``reward_funcs``.
        regularizer (`Regularizer` or `str`, defaults to `"reverse-kl + 4*semantic"`): one of `wpr.regularizers`, or its
            name, settings and sums in the grammar of `wpr.regularizers.spec`, on the reference's own embeddings.
        reference (`PreTrainedModel`, `PeftModel`, `str` or `Path`, *optional*): what the policy is compared with. None
            is the policy with its adapter off for a PEFT model, else a frozen copy of the policy. Also ``ref_model``.
        critic (`PreTrainedModel`, `PeftModel`, `str` or `Path`, *optional*): a sequence-classification model with one
            label, or its folder; None with ``args.share_backbone``.
        train_dataset (`Dataset` or a sequence of rows, *optional*): rows with ``prompt`` (text or chat messages) or
            ``input_ids``; other columns reach reward functions.
        eval_dataset (`Dataset`, a sequence of rows, or a `dict` of these, *optional*): the same, for `evaluate`.
        processing_class (`PreTrainedTokenizerBase`, *optional*): the tokenizer; by default that of ``model``'s folder.
        peft_config (`PeftConfig`, *optional*): gives the policy an adapter, which is then all of it that is trained.
        generation (`Generation`, *optional*): where responses come from; by default what ``args.generation`` names.
        monitors (`dict` from `str` to rewards, *optional*): scores that are logged and never learned from: what tells
            whether a reward model is being fooled.
        eval_regularizers (`dict` from `str` to `Regularizer` or `str`, *optional*): regularizers whose divergence
            evaluations measure beside the own one's, so that policies under different ones can be compared.
        callbacks (`list` of `TrainerCallback`, *optional*): the Trainer's.
        optimizers (`tuple` of `Optimizer` and `LRScheduler`, *optional*): the Trainer's; by default made of ``args``,
            with a learning rate of its own for the critic.
    """

    @accepts_trl_names
    def __init__(
        self,
        model: Model,
        args: PPOConfig,
        *,
        reward: RewardSource,
        regularizer: Regularizer | str = RECOMMENDED,
        reference: Model | None = None,
        critic: Model | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        generation: Generation | None = None,
        monitors: Mapping[str, RewardSource] | None = None,
        eval_regularizers: Mapping[str, Regularizer | str] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    ) -> None:
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; pass a PPOConfig")
        if processing_class is None and isinstance(model, str | Path):
            processing_class = load_tokenizer_of(model)
        given = reference
        actor_critic, reference = load_models(model, critic, reference, peft_config, args)
        use_one_gpu(args)
        super().__init__(
            model=actor_critic,
            args=args,
            data_collator=PromptCollator(processing_class, args.max_prompt_length),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_actor_critic(actor_critic)
        self.reference = None
        if reference is not None:
            self.reference = place_reference(reference, self.accelerator, ours=reference is not given)
            check_reference(actor_critic.policy, self.reference)
        self.reward = place_reward(reward, args.reward_weights, actor_critic, self.accelerator, processing_class)
        anchor = actor_critic.policy if self.reference is None else self.reference
        self.regularizer = place_regularizer(regularizer, anchor, self.accelerator)
        self.eval_regularizers = {
            name: place_regularizer(other, anchor, self.accelerator)
            for name, other in (eval_regularizers or {}).items()
        }
        self.monitors = make_monitors(monitors or {}, actor_critic.policy, self.accelerator)
        self.collector = Collector(
            args, self.accelerator, processing_class, self.reference, self.reward, self.regularizer,
            self._back_end(generation),
            sampling_of(args, actor_critic.policy, processing_class), self.stopwatch, self.monitors,
            self.eval_regularizers,
        )  # fmt: skip

    def _back_end(self, given: Generation | None) -> Generation:
        args = self.args
        if given is None:
            return args.back_end.make(
                self.accelerator.device, synced=is_sharded(self.accelerator),
                processes=self.accelerator.num_processes, stopwatch=self.stopwatch,
            )  # fmt: skip
        if args.generation != "auto":
            raise ValueError(f"generation is given, and args.generation={args.generation!r} names one; leave one out")
        return given

    def _reset(self) -> None:
        super()._reset()
        args = self.args
        self.beta: BetaController = (
            AdaptiveBeta(args.beta, args.target_divergence, args.beta_rate, args.beta_gain)
            if args.target_divergence is not None
            else ScheduledBeta(args.beta, args.beta if args.beta_end is None else args.beta_end, args.beta_schedule)
        )
        self.shaping = ScoreShaping(args.missing_eos_penalty, args.normalize_rewards, args.reward_clip)
        self.update_sums: dict[str, float] = {}
        self.update_tokens = 1.0

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
        """The PPO loss of one micro-batch, as its share of the mean over all tokens of the update."""
        batch: Rollout = inputs["micro_batch"]
        args = self.args
        slices = self.collector.slices(int(batch.mask.sum()), self.actor_critic)
        log_probs, values = model(
            batch.input_ids, batch.attention_mask, batch.mask, temperature=args.logprob_temperature, slices=slices
        )
        policy, sums = policy_loss(log_probs, batch.log_probs, batch.advantages, batch.mask, args.clip_range)
        value, value_sums = value_loss(values, batch.values, batch.returns, batch.mask, args.value_clip_range)
        total = (policy + args.value_coefficient * value) / self.update_tokens
        if max_over_processes(self.accelerator, int(not torch.isfinite(total))):
            raise LossFaultError(describe_loss(batch, log_probs, values, policy, value, self._text))
        count = float(batch.mask.sum())
        sums = {**sums, **value_sums, "policy_loss": policy.detach(), "value_loss": value.detach()}
        for name, summed in sums.items():
            self.metrics.add(name, float(summed), count)
        self.update_sums["approx_kl"] = self.update_sums.get("approx_kl", 0.0) + float(sums["approx_kl"])
        # Processes' gradients are averaged and the Trainer divides by the micro-batches: both are undone here.
        scale = self.accelerator.num_processes * self.current_gradient_accumulation_steps
        scaled: Tensor = total * scale
        return scaled

    def _begin_rollout(self, inputs: dict[str, Any]) -> None:
        """Draw responses, measure them, and turn scores and penalties into advantages."""
        self.idle = False
        args = self.args
        number = self.rollouts
        self.rollouts += 1
        inputs = self._prepare_inputs(inputs)
        first = self.accelerator.process_index * args.responses_per_device
        result = self.collector.collect(self.actor_critic, inputs, number, first, trainer_state=self.state)
        if self._refuse(result if isinstance(result, Fault) else None):
            return
        assert isinstance(result, Experience)
        beta = self.beta.beta(self.state.global_step / self.state.max_steps)
        scores = self.shaping(result.scores, result.finished, self.sum)
        penalties = result.scatter_to_mask(result.measures.penalty)
        mask = result.mask & ~scores.isnan().unsqueeze(-1)  # what was not scored teaches nothing
        placed = self.shaping.scale * result.placed
        rewards = assemble_rewards(scores, penalties, mask, beta, placed, args.penalty_clip)
        advantages, returns = generalized_advantages(rewards, result.values, mask, args.gamma, args.gae_lambda)
        explained = float(explained_variance(result.values, returns, mask, self.sum))
        note_rollout(self.metrics, result, rewards, beta, explained)
        if scores is not result.scores:
            self.metrics.add("score_shaped", scored(scores))
        if args.whiten_advantages:
            advantages = whiten(advantages, mask, self.sum)
        self.rollout = Rollout(
            result.input_ids, result.attention_mask, mask,
            result.scatter_to_mask(result.measures.log_prob), result.values, advantages, returns,
        )  # fmt: skip
        measured = getattr(result.measures, args.target_measure)
        total, count = self.sum(torch.stack([measured.sum(), measured.new_tensor(len(measured))]).double()).tolist()
        self.beta.update(total / max(count, 1))
        if args.log_completions and number % args.log_completions_steps == 0:
            self._log_completions(completion_rows(result, advantages, args.log_completions, self.state.global_step))

    def _begin_update(self, number: int) -> None:
        """Count the tokens of the whole update, over its micro-batches and processes."""
        assert self.rollout is not None
        steps = range(number, number + self.args.gradient_accumulation_steps)
        tokens = torch.stack([self.rollout.mask[self._rows(step)].sum() for step in steps]).sum()
        self.update_tokens = float(self.sum(tokens.double()).clamp_min(1))
        self.update_sums = {}

    def _end_update(self) -> None:
        limit = self.args.update_kl_limit
        if limit is None:
            return
        total = torch.tensor(self.update_sums.get("approx_kl", 0.0), dtype=torch.float64, device=self.args.device)
        far = float(self.sum(total)) / self.update_tokens > limit
        self.metrics.add("early_stop", float(far))
        self.idle = far

    def _text(self, tokens: Tensor) -> str:
        if self.processing_class is None:
            return str(tokens.tolist())
        return str(self.processing_class.decode(tokens.tolist()))

    def _log_completions(self, rows: list[dict[str, Any]]) -> None:
        """Sampled responses of the main process, as a table and as a file."""
        if not self.is_world_process_zero():
            return
        write_completions(rows, self.folder, self.state.global_step)
        self.console.show(rows, self.state.global_step)
        report_completions(rows, self.args.report_to)

    def own_state(self) -> dict[str, Any]:
        """The rollout's state, beta and moments."""
        kind = type(self.beta).__name__
        own = {"beta_kind": kind, "beta": self.beta.state_dict(), "moments": self.shaping.moments.state_dict()}
        return super().own_state() | own

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        super().restore(state)
        if state["beta_kind"] == type(self.beta).__name__:
            self.beta.load_state_dict(state["beta"])
        else:
            logger.warning(
                "beta was set by %s, now by %s: it starts again", state["beta_kind"], type(self.beta).__name__
            )
        self.shaping.moments.load_state_dict(state["moments"])
