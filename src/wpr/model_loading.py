"""Loading models and tokenizers by name, and saving them as ordinary transformers folders."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from wpr.config.recipe import LoraSettings, ModelSettings
from wpr.damaged_files import refuse_damaged_model, refuse_unusable_weights
from wpr.errors import OptionError, UserError, first_line
from wpr.language_models import is_gathered_to_save, is_peft, plain_model, whole_state

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_tokenizer(name: str, revision: str | None = None, setting: str = "model.name") -> Any:
    """The tokenizer, with a padding token: models without one pad with end of sequence, which attention leaves out."""
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer, name, "tokenizer", setting, revision=revision)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end-of-sequence token, so that responses could not end; set eos_token in "
            "its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_any_tokenizer(name: str, setting: str = "model.name", revision: str | None = None) -> Any:
    """The tokenizer as it is, of an encoder too."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, name, "tokenizer", setting, revision=revision)


def load_any_model(name: str, setting: str) -> Any:
    """A language model or an encoder, without its head."""
    from transformers import AutoModel

    return _load(AutoModel, name, "model", setting, dtype="auto")


def load_causal(settings: ModelSettings, name: str | None = None) -> Any:
    """The language model in float32: bf16 is for products, not for weights that small updates are added to."""
    from transformers import AutoModelForCausalLM

    return _load(
        AutoModelForCausalLM,
        name or settings.name,
        "language model",
        revision=settings.revision if name is None else None,
        dtype=torch.float32,
        attn_implementation=settings.attention,
    )


def load_any_causal(name: str, dtype: str, device: torch.device) -> Any:
    """A language model to generate with. dtype: ``auto`` is bf16 on GPUs that have it and float32 elsewhere."""
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype} is not known; choose {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    model = _load(AutoModelForCausalLM, name, "language model", setting="--model", dtype=getattr(torch, dtype))
    return model.to(device).eval()


def load_scorer(settings: ModelSettings, name: str, pad_token_id: int) -> Any:
    """The same model with a score in place of the next token; its head is new and, for a seed, always the same."""
    from transformers import AutoModelForSequenceClassification

    model = _load(
        AutoModelForSequenceClassification,
        name,
        "reward model",
        num_labels=1,
        dtype=torch.float32,
        attn_implementation=settings.attention,
    )
    model.config.pad_token_id = pad_token_id
    return model


def _load(auto: Any, name: str, role: str, setting: str = "model.name", **options: Any) -> Any:
    options = {key: value for key, value in options.items() if value is not None}
    refuse_damaged_model(name, options.get("revision"))
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(name, role, setting, error) from error


def check_model(name: str, setting: str, revision: str | None = None) -> Any:
    """The model's configuration, which is small. A model that is neither here nor on the hub is refused, and one whose
    files are not whole.
    """
    from transformers import AutoConfig

    refuse_damaged_model(name, revision)
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(name, "model", setting, error) from error


def _not_loaded(name: str, role: str, setting: str, error: Exception) -> UserError:
    if Path(name).is_dir():
        return UserError(f"{setting}: {name} holds no {role} that transformers can load: {first_line(error)}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name of the hub
        return UserError(f"{setting}: there is no folder {name}, where the {role} was looked for; check the path")
    return UserError(
        f"{setting}: the {role} {name} is neither a folder nor to be had from the hub: {first_line(error)} Check the "
        f"name; for a gated model accept its terms and run `hf auth login`; without a network, fetch it elsewhere with "
        f"`hf download {name}` and set {setting} to the folder."
    )


def lora_config(lora: LoraSettings | None, task: str) -> Any:
    """PEFT's settings, for ``task`` CAUSAL_LM or SEQ_CLS; None where all weights are trained."""
    if lora is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("model.lora needs peft; install it with `pip install 'wpr[lora]'`") from None
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type=task,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


def save_model(model: Any, tokenizer: Any, folder: Path, card: str, *, writes: bool = True) -> None:
    """Write weights, tokenizer and card beside ``folder``, look at the weights, and move them there in one step. An
    adapter is merged in, and also kept by itself, in ``adapter/``.

    writes: whether this process does; all must call, since weights that are in parts are gathered from all.
    """
    from transformers.utils import logging as transformers_logging

    gathered = is_gathered_to_save(model)
    state = whole_state(model, keep=writes) if gathered else None
    if not writes:
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    transformers_logging.disable_progress_bar()
    if is_peft(model):
        model.save_pretrained(partial / "adapter", state_dict=state)
        model, state = (_merge_again(model, partial / "adapter") if gathered else model.merge_and_unload()), None
    model.save_pretrained(partial, state_dict=state)
    if state is not None:  # of what was gathered; it says how the model itself was held
        path, kind = partial / "config.json", str(next(iter(state.values())).dtype).removeprefix("torch.")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": kind}, indent=2) + "\n", encoding="utf-8")
    refuse_unusable_weights(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _merge_again(model: Any, adapter: Path) -> Any:
    """The model below an adapter, loaded again, whole, with the adapter merged in: below it nothing was trained."""
    from peft import PeftModel
    from transformers.integrations import deepspeed

    plain = plain_model(model)
    settings = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()  # it would have ZeRO-3 take the copy apart as well
    try:
        below = type(plain).from_pretrained(
            plain.name_or_path,
            config=plain.config,
            revision=getattr(plain.config, "_commit_hash", None) or "main",
            dtype=torch.float32,
        )
        if plain.can_generate():
            below.generation_config = plain.generation_config
        return PeftModel.from_pretrained(below, adapter).merge_and_unload()
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = settings
