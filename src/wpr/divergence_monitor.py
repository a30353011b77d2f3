"""How far a model in training is from where it began: exact divergences on a fixed set of prompts, for any Trainer.

Notation for shapes: ``B`` prompts, ``T`` measured tokens, ``H`` hidden size, ``P`` measured tokens without padding.

To each prompt the model draws a completion, always with the same seed; both models' next-token distributions are
compared at every token of it. Logged are means over all tokens, and the KL of a whole completion:

    monitor/kl            sum_v p_v log(p_v / q_v)
    monitor/entropy       of the model
    monitor/NAME          the divergence of each regularizer that is named
    monitor/sequence_kl   kl summed over a completion's tokens, mean over completions

These are sums over the vocabulary (transport over its support), not estimates from drawn tokens, and never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Trainer, TrainerCallback

from wpr.language_models import (
    Module,
    as_reference,
    check_split,
    evaluating,
    plain_model,
    position_limit,
    starting_point,
    states_before,
)
from wpr.ppo.collect import WORKING_COPIES
from wpr.ppo.distributed import is_sharded, place_reference
from wpr.ppo.measures import LogitsError
from wpr.ppo.parts import check_reference, place_regularizer
from wpr.ppo.prompts import PromptCollator
from wpr.ppo.scoring import PositionScorer, logits_in_slices, slice_count
from wpr.regularizers import ReverseKL

OWN = ("kl", "entropy", "sequence_kl")


class DivergenceMonitor(TrainerCallback):  # type: ignore[misc]
    """Measures and logs every so many steps, before the first, and at the end: ``trainer.add_callback(monitor)``.

    trainer: transformers' Trainer, one of TRL's or of `wpr.trl`, or `PPOTrainer`; make the monitor before training, for
        the model that it has now is the reference.
    prompts: texts, lists of chat messages, or rows with ``prompt`` or ``input_ids``.
    regularizers: names (`wpr.regularizers.spec`) or objects, beside KL and entropy.
    reference: what the model is compared with. Default: the trainer's own reference if it has one, with an adapter the
        model without it, else a frozen copy of the model.
    every: steps between measurements.
    max_new_tokens: of a completion. 0 measures on the prompts' own tokens, which takes no generation.
    batch_size: prompts at a time. memory_mb: for logits and what is computed from them. temperature: of drawing and of
        both distributions.
    """

    def __init__(
        self,
        trainer: Any,
        prompts: Sequence[Any],
        regularizers: Sequence[Any] = ("semantic",),
        *,
        reference: Module | None = None,
        every: int = 50,
        max_new_tokens: int = 64,
        batch_size: int = 8,
        memory_mb: float = 1024.0,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._check(every, max_new_tokens, batch_size, memory_mb, temperature)
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts={prompts!r} must be a list of prompts, with one at least")
        if is_sharded(trainer.accelerator):
            raise ValueError(
                "ZeRO-3 and FSDP hold weights in parts, which DivergenceMonitor does not gather; use ZeRO-2"
            )
        self.trainer, self.every, self.seed = trainer, every, seed
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.memory_mb, self.temperature = memory_mb, temperature
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self.prompts = [self._tokens(row) for row in prompts]
        self.reference = self._reference(reference)
        anchor = self.policy if self.reference is None else self.reference
        names = [one if isinstance(one, str) else getattr(one, "name", repr(one)) for one in regularizers]
        if len({*names, *OWN}) < len(names) + len(OWN):
            raise ValueError(
                f"regularizers {names} have one name twice, or one of {', '.join(OWN)}; name each once, with settings "
                "that tell them apart"
            )
        placed = [place_regularizer(one, anchor, trainer.accelerator) for one in regularizers]
        self.regularizers = dict(zip(names, placed, strict=True))
        self.logged_at: int | None = None

    @staticmethod
    def _check(every: int, max_new_tokens: int, batch_size: int, memory_mb: float, temperature: float) -> None:
        counts = {"every": every, "batch_size": batch_size, "max_new_tokens": max_new_tokens}
        for name, count in counts.items():
            least = 0 if name == "max_new_tokens" else 1
            if not isinstance(count, int) or count < least:
                raise ValueError(f"{name}={count} must be an integer of at least {least}")
        for name, value in {"memory_mb": memory_mb, "temperature": temperature}.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive")

    def _tokens(self, prompt: Any) -> list[int]:
        """Token ids, the last ones that leave room for a completion."""
        room = (position_limit(self.policy) or 1 << 30) - self.max_new_tokens
        if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Mapping):
            raise ValueError(f"the prompt {prompt!r} is no list of chat messages; give ids as {{'input_ids': ...}}")
        row = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        ids = PromptCollator(self.tokenizer, 1 << 30).tokens(row)[-room:] if room > 0 else []
        if len(ids) < (1 if self.max_new_tokens else 2):
            raise ValueError(
                f"the prompt {prompt!r} has {len(ids)} tokens to measure on beside max_new_tokens="
                f"{self.max_new_tokens}, within the model's positions; give a longer prompt, or draw fewer tokens "
                "(with 0 a prompt needs two)"
            )
        return ids

    @property
    def policy(self) -> Module:
        """The model that is trained."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return getattr(model, "policy", model)

    def _reference(self, given: Module | None) -> Module | None:
        """As given, the trainer's, or the model as it is now; None for the model with its adapter off."""
        trainer, policy = self.trainer, self.policy
        check_split(policy)
        known = given
        if known is None:
            known = getattr(trainer, "reference", None) or getattr(trainer, "ref_model", None)
        if known is None:
            before = starting_point(policy, adapter_is_new=True)
            return None if before is None else place_reference(before, trainer.accelerator, ours=True)
        if isinstance(known, str):
            raise ValueError(f"reference={known!r} is a name; load it, and pass the model")
        known = trainer.accelerator.unwrap_model(known)
        if known is policy:
            raise ValueError("the reference is the model that is trained; leave it out, or pass a copy")
        check_reference(policy, known)
        return place_reference(known, trainer.accelerator)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.measure()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self.every == 0:
            self.measure()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.logged_at != state.global_step:
            self.measure()

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Measure now and log."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        mine = self.prompts[accelerator.process_index :: accelerator.num_processes]
        names = ["kl", "entropy", *self.regularizers]
        totals = torch.zeros(len(names) + 3, dtype=torch.float64, device=accelerator.device)
        error: Exception | None = None
        for start in range(0, len(mine), self.batch_size):
            try:
                totals[:-1] += self._totals(mine[start : start + self.batch_size], start)
            except (LogitsError, ValueError) as fault:
                error, totals[-1] = fault, 1  # the other processes wait below
                break
        *sums, tokens, completions, faults = accelerator.reduce(totals, reduction="sum").tolist()
        if faults:
            raise error or RuntimeError("another process met a fault while it measured; see its error")
        found = {f"monitor/{name}": total / max(tokens, 1) for name, total in zip(names, sums, strict=True)}
        found["monitor/sequence_kl"] = sums[0] / completions
        self.logged_at = trainer.state.global_step
        due = trainer.control.should_log  # which logging takes back
        Trainer.log(trainer, dict(found))  # TRL's own would hand over what it gathers for its next log
        trainer.control.should_log = due
        return found

    def _totals(self, prompts: Sequence[list[int]], start: int) -> Tensor:
        """Sums over a batch's tokens, then how many tokens and completions there are."""
        device, policy = self.trainer.accelerator.device, self.policy
        batch = PromptCollator(None, max(map(len, prompts)))([{"input_ids": ids} for ids in prompts])
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        with evaluating(policy), self.trainer.accelerator.autocast():
            if self.max_new_tokens:
                ids, mask, length = self._drawn(policy, ids, mask, start)
            else:
                length = ids.shape[1] - 1
            wanted = mask[:, -length:].bool() & mask[:, -length - 1 : -1].bool()
            own = states_before(policy, ids, mask, length)[wanted]
            with as_reference(policy, self.reference) as model:
                other = states_before(model, ids, mask, length)[wanted]
            scorer = PositionScorer(ReverseKL(), self.reference, self.regularizers)
            vocabulary = plain_model(policy).get_output_embeddings().weight.shape[0]
            slices = slice_count(len(own), vocabulary, self.memory_mb, 4 * WORKING_COPIES)
            tokens = ids[:, -length:][wanted]
            for rows, policy_logits, reference_logits in logits_in_slices(
                policy, own, self.reference, other, slices, self.temperature
            ):
                scorer.add(tokens[rows], policy_logits, reference_logits)
                del policy_logits, reference_logits
        if scorer.error is not None:
            raise scorer.error
        measures = scorer.result()
        values = [measures.kl, measures.entropy, *measures.eval_regularizers.values()]
        counts = torch.tensor([len(own), len(prompts)], dtype=torch.float64, device=device)
        return torch.cat([torch.stack([value.double().sum() for value in values]), counts])

    def _drawn(self, policy: Module, ids: Tensor, mask: Tensor, start: int) -> tuple[Tensor, Tensor, int]:
        """Prompts with completions, which tokens are real, and how many of them were drawn; random numbers that the
        training draws are left as they were.
        """
        ends = getattr(policy.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        ends = [end for end in {*ends, getattr(self.tokenizer, "eos_token_id", None)} if end is not None]
        pad = getattr(self.tokenizer, "pad_token_id", None)
        plain = GenerationConfig(  # nothing of the model's own, such as a penalty on repetition
            do_sample=True, temperature=self.temperature, top_k=0, top_p=1.0, max_new_tokens=self.max_new_tokens,
            eos_token_id=ends or None, pad_token_id=0 if pad is None else pad,
        )  # fmt: skip
        seed = self.seed + start * self.trainer.accelerator.num_processes + self.trainer.args.process_index
        own, cuda = policy.generation_config, ids.device.type == "cuda"
        with torch.random.fork_rng(devices=[ids.device] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                with torch.cuda.device(ids.device):
                    torch.cuda.manual_seed(seed)
            try:
                policy.generation_config = plain
                made = policy.generate(input_ids=ids, attention_mask=mask, generation_config=plain)
            finally:
                policy.generation_config = own
        drawn = made[:, ids.shape[1] :]
        ended = torch.isin(drawn, torch.tensor(ends, device=ids.device)).long() if ends else torch.zeros_like(drawn)
        real = (ended.cumsum(-1) - ended) == 0  # the token that ends it belongs to it
        return made, torch.cat([mask, real.to(mask)], -1), drawn.shape[1]
