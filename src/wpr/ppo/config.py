"""Every setting of `PPOTrainer`, on top of those of `transformers.TrainingArguments`."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from transformers import TrainingArguments

from wpr.ppo.back_ends import BackEnd


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


_INHERITED = {setting.name for setting in fields(TrainingArguments)}


Init = TypeVar("Init", bound=Callable[..., None])

TRL_NAMES = {
    "reward_funcs": "reward",
    "ref_model": "reference",
    "num_generations": "responses_per_prompt",
    "max_completion_length": "max_new_tokens",
}
"""Names of TRL's trainers that `PPOTrainer` and `PPOConfig` take for their own."""


def accepts_trl_names(init: Init) -> Init:
    """An ``__init__`` that also takes `TRL_NAMES`, where it has the arguments that they stand for."""
    own = inspect.signature(init).parameters
    other_names = {name: other for name, other in TRL_NAMES.items() if other in own}

    @wraps(init)
    def renamed(self: Any, *args: Any, **given: Any) -> None:
        for name in other_names.keys() & given.keys():
            own_name = other_names[name]
            if own_name in given:
                raise TypeError(f"{name} is TRL's name for {own_name}; give one of them, not both")
            given[own_name] = given.pop(name)
        init(self, *args, **given)

    return cast(Init, renamed)


def _name_the_nearest(init: Callable[..., None]) -> Callable[..., None]:
    """An ``__init__`` that answers an unknown setting with the known one that is spelled most like it."""

    @wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        known = [setting.name for setting in fields(self)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise TypeError(f"unknown setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        init(self, *args, **settings)

    return checked


@dataclass
class PPOConfig(TrainingArguments):  # type: ignore[misc]
    """Settings of PPO.

    Sizes. One optimizer step (the Trainer's ``global_step``) takes ``per_device_train_batch_size *
    gradient_accumulation_steps`` responses per process. A rollout holds ``num_minibatches`` times as many, and is gone
    through ``ppo_epochs`` times: ``ppo_epochs * num_minibatches`` optimizer steps per rollout.

    The defaults are the paper's, where it states one; but for its batch of 256, which is yours to make up.
    """

    # Departures from TrainingArguments' defaults
    learning_rate: float = _setting(1.5e-5, "Learning rate of the policy.")
    remove_unused_columns: bool | None = _setting(False, "Keep the dataset's columns: reward functions see them.")
    logging_steps: float = _setting(1, "Metrics every so many optimizer steps.")
    dataloader_pin_memory: bool = _setting(False, "Prompts are small, and pinning them warns where there is no GPU.")
    ddp_find_unused_parameters: bool | None = _setting(False, "Every parameter takes part in every step.")

    # The regularizer
    beta: float = _setting(0.05, "Weight of the penalty; where it changes, its first value.")
    beta_schedule: Literal["constant", "linear", "cosine"] = _setting(
        "constant", "How beta goes from `beta` to `beta_end` over training."
    )
    beta_end: float | None = _setting(None, "The last value of a scheduled beta.")
    target_divergence: float | None = _setting(
        None, "Steer beta so that the mean of `target_measure` per token stays at this value."
    )
    target_measure: Literal["divergence", "kl"] = _setting(
        "divergence", "What `target_divergence` is a value of: the regularizer's own divergence, or KL."
    )
    beta_rate: float = _setting(
        0.05, "Steering, integral part: the logarithm of beta moves by at most this much per rollout, and stays there."
    )
    beta_gain: float = _setting(
        2.0, "Steering, proportional part: its answer to the latest rollout, at most this much, which damps swings."
    )

    # Rollouts
    responses_per_prompt: int = _setting(1, "Responses drawn for each prompt of a rollout.")
    max_prompt_length: int = _setting(512, "Prompts keep at most their last so many tokens.")
    max_new_tokens: int = _setting(256, "Longest response, its end-of-sequence token included.")
    min_new_tokens: int = _setting(0, "Before so many tokens, end-of-sequence is not drawn.")
    temperature: float = _setting(0.8, "Logits are divided by this for sampling.")
    top_k: int = _setting(50, "Sample among the k most likely tokens; 0 for all.")
    top_p: float = _setting(1.0, "Sample among the most likely tokens that reach this probability together.")
    logprob_temperature: float = _setting(
        1.0,
        "Temperature of the distributions that are trained and compared. 1, as in the paper, trains the model's own "
        "distribution with samples of a sharper one; set it to `temperature` to train what is sampled.",
    )
    missing_eos_penalty: float | None = _setting(
        None, "Subtracted from the score of a response that did not end by itself."
    )
    stop_token_ids: list[int] | None = _setting(  # noqa: RUF009 (a field, by another name)
        None, "Tokens that end a response; by default the model's and the tokenizer's end-of-sequence tokens."
    )

    # Where responses come from
    generation: Literal["auto", "transformers", "graphs", "vllm"] = _setting(
        "auto",
        "What draws responses: `transformers`, `graphs` (CUDA graphs), `vllm`, or `auto`: graphs on a GPU, else "
        "transformers.",
    )
    vllm_url: str | None = _setting(None, "vLLM's server; None: vLLM within this process.")
    vllm_memory: float = _setting(0.3, "Share of the device's memory for vLLM within this process.")
    vllm_max_length: int | None = _setting(
        None, "Longest sequence of vLLM within this process; None: `max_prompt_length` + `max_new_tokens`."
    )
    vllm_folder: str | None = _setting(
        None, "Folder through which a vLLM server is sent weights: both see it; None: that for temporary files."
    )

    # Rewards
    reward_weights: list[float] | None = _setting(  # noqa: RUF009
        None, "Weights of several rewards, in their order; None: 1 each, or those of pairs (reward, weight)."
    )
    reward_clip: float | None = _setting(None, "Scores are held within plus and minus this, after normalisation.")
    penalty_clip: float | None = _setting(None, "Beta times the penalty of a token is held within plus and minus this.")
    normalize_rewards: bool = _setting(False, "Scores minus their running mean, over their running deviation.")

    # Learning
    ppo_epochs: int = _setting(1, "Passes over a rollout.")
    num_minibatches: int = _setting(1, "Optimizer steps per pass.")
    critic_learning_rate: float | None = _setting(None, "Learning rate of the critic; None: `learning_rate`.")
    share_backbone: bool = _setting(
        False, "No critic of its own: a linear value head on the policy's states. Meant for LoRA policies."
    )
    gamma: float = _setting(1.0, "Discount.")
    gae_lambda: float = _setting(0.95, "Decay of generalized advantage estimation.")
    clip_range: float = _setting(0.2, "Clip of the policy's probability ratio.")
    value_clip_range: float | None = _setting(0.2, "Clip of the critic's change; None: no clip.")
    value_coefficient: float = _setting(1.0, "Weight of the critic's loss.")
    whiten_advantages: bool = _setting(True, "Advantages to mean 0 and variance 1 over the rollout.")
    update_kl_limit: float | None = _setting(
        None, "Once a step's approximate KL to the sampling policy passes this, the rollout's other steps are left out."
    )
    disable_dropout: bool = _setting(True, "No dropout in policy and critic: probabilities must be comparable.")

    # Memory
    logits_memory_mb: float = _setting(
        2048.0, "Budget for full-vocabulary logits, of both models and all that is computed from them."
    )
    generation_batch_size: int | None = _setting(
        None, "Responses drawn at a time; None: all of a rollout, whose cache of keys and values must then fit."
    )
    scoring_batch_size: int | None = _setting(
        None, "Sequences per forward pass when a rollout is scored; None: `per_device_train_batch_size`."
    )

    # Faults and logs
    max_skipped_rollouts: int = _setting(
        0,
        "How many rollouts with a fault (non-finite numbers, a failing reward) may be left out; 0: stop at the first.",
    )
    log_completions: int = _setting(4, "Responses shown and written to `completions/` at a time; 0: none.")
    log_completions_steps: int = _setting(10, "Every so many rollouts.")

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model: str | None = "score"
            self.greater_is_better: bool | None = True
        super().__post_init__()
        self._check_types()
        self._check_limits()
        self._check_combinations()

    def _check_limits(self) -> None:
        """Settings by themselves."""
        for limit, fine, names in _LIMITS:
            for name in names:
                value = getattr(self, name)
                if not (fine(value) if value is not None else _is_optional(name)):
                    raise ValueError(f"{name}={value!r} must be {limit}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens!r} must be between 0 and max_new_tokens={self.max_new_tokens}"
            )

    def _check_combinations(self) -> None:
        """Settings that do not go together, and the Trainer's that rollouts cannot have."""
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True is not supported: a rollout's size is fixed; lower the batch size"
            )
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not supported; use 'random' or "
                "'sequential'"
            )
        _ = self.back_end  # its own checks
        if self.beta_schedule != "constant" and self.beta_end is None:
            raise ValueError(f"beta_schedule={self.beta_schedule!r} needs beta_end, the value that beta ends at")
        if self.beta_schedule == "constant" and self.beta_end is not None:
            raise ValueError(f"beta_end={self.beta_end} has no effect with beta_schedule='constant'; use 'linear'")
        if self.target_divergence is not None and self.beta_schedule != "constant":
            raise ValueError("beta is either scheduled or steered; set beta_schedule or target_divergence, not both")
        if self.responses_per_device % self.responses_per_prompt:
            raise ValueError(
                f"a rollout of {self.responses_per_device} responses a process cannot hold "
                f"responses_per_prompt={self.responses_per_prompt} of every prompt; make per_device_train_batch_size * "
                "gradient_accumulation_steps * num_minibatches a multiple of it"
            )

    def _check_types(self) -> None:
        """Numbers that are no numbers would fail later, in a comparison that does not say which setting it was."""
        for name, kind in _KINDS.items():
            value, optional = getattr(self, name), _is_optional(name)
            if optional and value is None:
                continue
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            wanted = {
                "bool": (isinstance(value, bool), "True or False"),
                "int": (number and isinstance(value, numbers.Integral), "an integer"),
                "float": (number and math.isfinite(value), "a finite number"),
                "list[int]": (_is_list_of(value, numbers.Integral), "a list of integers"),
                "list[float]": (_is_list_of(value, numbers.Real), "a list of numbers"),
            }
            fine, limit = wanted.get(kind.removesuffix(" | None"), (True, ""))
            if not fine:
                raise ValueError(f"{name}={value!r} must be {limit}" + (", or None" if optional else ""))

    @property
    def back_end(self) -> BackEnd:
        """What draws responses."""
        longest = self.vllm_max_length or self.max_prompt_length + self.max_new_tokens
        return BackEnd(self.generation, self.vllm_url, self.vllm_memory, longest, self.vllm_folder)

    @property
    def responses_per_device(self) -> int:
        """Responses of a rollout on each process."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_minibatches)

    @property
    def prompts_per_device(self) -> int:
        """Prompts of a rollout on each process."""
        return self.responses_per_device // self.responses_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout is used for."""
        return self.ppo_epochs * self.num_minibatches

    @property
    def fixed_in_rollout(self) -> dict[str, float]:
        """Settings that must not change in the middle of a rollout, by name."""
        names = (
            "world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "num_minibatches", "ppo_epochs",
            "responses_per_prompt", "seed", "logprob_temperature",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


_KINDS = {setting.name: str(setting.type) for setting in fields(PPOConfig) if setting.name not in _INHERITED}
"""Types of our own settings as they are written above: argument parsers replace those in the fields."""


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, kind) and math.isfinite(part) for part in value)


def _is_optional(name: str) -> bool:
    return _KINDS[name].endswith("| None")


_LIMITS: list[tuple[str, Callable[[Any], bool], tuple[str, ...]]] = [
    ("0 or more", lambda value: value >= 0,
     ("beta", "beta_gain", "max_skipped_rollouts", "log_completions", "value_coefficient")),
    ("a positive number", lambda value: value > 0, ("beta_rate", "logprob_temperature", "logits_memory_mb")),
    ("a positive number; for nearly greedy sampling use a small one", lambda value: value > 0, ("temperature",)),
    ("an integer of at least 1", lambda value: value >= 1,
     ("responses_per_prompt", "max_prompt_length", "max_new_tokens", "ppo_epochs", "num_minibatches",
      "generation_batch_size", "scoring_batch_size", "log_completions_steps", "vllm_max_length")),
    ("0 (all tokens) or more", lambda value: value >= 0, ("top_k",)),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, ("top_p",)),
    ("between 0 and 1", lambda value: 0 <= value <= 1, ("gamma", "gae_lambda")),
    ("between 0 and 1", lambda value: 0 < value < 1, ("clip_range",)),
    ("positive, or None", lambda value: value > 0,
     ("value_clip_range", "target_divergence", "update_kl_limit", "reward_clip", "penalty_clip")),
    ("0 or more, or None", lambda value: value >= 0, ("critic_learning_rate",)),
    ("constant, linear or cosine", lambda value: value in ("constant", "linear", "cosine"), ("beta_schedule",)),
    ("divergence or kl", lambda value: value in ("divergence", "kl"), ("target_measure",)),
]  # fmt: skip
"""What a setting must be, how that is seen, and of which settings it is asked. (Not in the fields' metadata, which
argument parsers take for their own.)
"""

PPOConfig.__init__ = accepts_trl_names(_name_the_nearest(PPOConfig.__init__))  # type: ignore[method-assign]
