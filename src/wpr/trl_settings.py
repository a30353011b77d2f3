"""Settings of TRL's trainers: which of them `wpr.trl` takes, and how completions are drawn by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wpr.ppo.generation import Sampling

LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "luspo")  # whose averages are known here


def check_settings(
    args: Any, regularizer_in: str, regularizer_beta: float, regularizer_future: str = "divergence"
) -> None:
    """Refuse settings that cannot be, and those of TRL that would be doubled or ignored. ``args``: TRL's."""
    form, beta, quantile = regularizer_in, regularizer_beta, getattr(args, "top_entropy_quantile", 1.0)
    future = regularizer_future
    loss_type = getattr(args, "loss_type", "dapo")
    refuse(
        liger(args)
        | {
            f"regularizer_in={form!r} must be 'reward' or 'loss'": form not in ("reward", "loss"),
            f"regularizer_future={future!r} must be 'divergence' or 'penalty'": future not in ("divergence", "penalty"),
            f"regularizer_beta={beta} must be 0 or more; 0 only logs the divergence": not 0 <= beta < math.inf,
            f"beta={args.beta} of {type(args).__name__} is TRL's own KL penalty, which would come on top of the "
            "regularizer; set beta=0.0 there, or regularizer_beta=0 here, which only logs": args.beta != 0 and beta > 0,
            f"top_entropy_quantile={quantile} drops most tokens' advantages, and their penalties with them; set it to "
            "1.0, or regularizer_in='loss'": form == "reward" and quantile < 1,
            f"loss_type={loss_type!r} averages tokens in a way that is not known here; set it to one of "
            f"{', '.join(LOSS_TYPES)}, or regularizer_in='reward'": form == "loss" and loss_type not in LOSS_TYPES,
        }
    )


def refuse(faults: Mapping[str, bool]) -> None:
    """Raise the first message that is true."""
    for message in (message for message, found in faults.items() if found):
        raise ValueError(message)


def sampling_of(args: Any, eos: Sequence[int]) -> Sampling:
    """TRL's settings of drawing."""
    least = (args.generation_kwargs or {}).get("min_new_tokens", 0)
    return Sampling(args.temperature, args.top_k or 0, args.top_p, least, args.max_completion_length, tuple(eos))


def not_drawn(args: Any) -> dict[str, bool]:
    """What is true of TRL's settings of drawing that our back ends do not have."""
    others = {name: value for name, value in (args.generation_kwargs or {}).items() if name != "min_new_tokens"}
    return {
        "use_vllm=True has TRL draw completions; drop it, or generation": args.use_vllm,
        f"min_p={args.min_p} is not known to generation; drop one of them": bool(args.min_p),
        f"repetition_penalty={args.repetition_penalty} is not known to generation; drop one of them": (
            args.repetition_penalty != 1
        ),
        f"generation_kwargs={others} are not known to generation; drop one of them": bool(others),
    }


def liger(args: Any) -> dict[str, bool]:
    """What is true of settings that replace layers."""
    named = [name for name in ("use_liger_kernel", "use_liger_loss") if getattr(args, name, False)]
    return {f"{' '.join(named)}=True replaces layers that hidden states come from; set it to False": bool(named)}
