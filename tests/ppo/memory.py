"""Memory of a run with 32 million parameters, in a process of its own: `python -m tests.ppo.memory FOLDER
lora|full`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import peft

from tests.ppo import tiny

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 8000}


def resident() -> int:
    """Bytes of this process in memory, once what was freed is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak(tiny.TrainerCallback):
    top = 0

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        Peak.top = max(Peak.top, resident())

    on_step_end = on_substep_end


def main(folder: str, kind: str) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    common: dict[str, Any] = {"regularizer": "semantic", "share_backbone": True}
    parts = {"peft_config": lora if kind == "lora" else None}
    tiny.trainer(folder, parts=parts, max_steps=1, **common).train()
    start = resident()  # once everything that is ever imported is
    policy = tiny.policy(**WIDE)
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    trainer = tiny.trainer(
        folder, build=lambda: policy, parts={**parts, "callbacks": [Peak()]}, max_steps=2, optim="sgd",
        per_device_train_batch_size=2, max_new_tokens=4, **common,
    )  # fmt: skip
    built = resident()
    trainer.train()
    print(json.dumps({"weights": size, "built": built - start, "trained": Peak.top - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
