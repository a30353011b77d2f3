"""Which back end draws responses: one setting, wherever responses are drawn."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import torch

    from wpr.ppo.generation import Generation

logger = logging.getLogger(__name__)

BACK_ENDS = ("auto", "transformers", "graphs", "vllm")


@dataclass(frozen=True)
class BackEnd:
    """A choice of back end.

    generation: ``transformers``, its `generate` on the policy; ``graphs``, a cache of fixed size and CUDA graphs;
        ``vllm``; or ``auto``, which is ``graphs`` on a GPU, else ``transformers``.
    vllm_url: a server's; None: vLLM within this process. vllm_memory: share of the device's memory that it then takes.
    vllm_max_length: longest sequence that it then takes; None: what the model has positions for.
    vllm_folder: through which a server is sent weights, so that both must see it; None: the one for temporary files.
    """

    generation: str = "auto"
    vllm_url: str | None = None
    vllm_memory: float = 0.3
    vllm_max_length: int | None = None
    vllm_folder: str | None = None

    def __post_init__(self) -> None:
        if self.generation not in BACK_ENDS:
            raise ValueError(f"generation={self.generation!r} must be one of {', '.join(BACK_ENDS)}")
        usual = {one.name: one.default for one in fields(self)}
        for name in ("vllm_url", "vllm_memory", "vllm_folder"):
            if self.generation != "vllm" and (value := getattr(self, name)) != usual[name]:
                raise ValueError(
                    f"{name}={value!r} has no effect with generation={self.generation!r}; set generation='vllm', or "
                    "drop it"
                )
        if self.vllm_url is not None:
            parts = urlsplit(self.vllm_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"vllm_url={self.vllm_url!r} must begin with http:// or https:// and name a host, as "
                    "http://localhost:8000 does"
                )
        if not 0 < self.vllm_memory < 1:
            raise ValueError(f"vllm_memory={self.vllm_memory!r} must be between 0 and 1, a share of the memory")

    def resolve(self, device_type: str) -> str:
        """The back end's name, on such a device."""
        if self.generation != "auto":
            return self.generation
        return "graphs" if device_type == "cuda" else "transformers"

    def check(self, *, synced: bool = False, processes: int = 1) -> None:
        """Refuse vLLM where it cannot be had. synced, processes: as of `make`."""
        if self.generation != "vllm":
            return
        if synced or processes > 1:
            raise ValueError(
                f"generation='vllm' serves one process that has whole weights; here are {processes}"
                f"{', which hold parts of them' if synced else ''}; use one, or generation='auto'"
            )
        if self.vllm_url is None:
            from wpr.ppo.vllm_engines import check_installed

            check_installed()

    def make(
        self,
        device: torch.device,
        *,
        synced: bool = False,
        processes: int = 1,
        training: bool = True,
        stopwatch: Callable[[str], AbstractContextManager[None]] = lambda subject: nullcontext(),
    ) -> Generation:
        """The back end. synced: weights are held in parts, so that all processes take as many steps. training: memory
        is needed for other things between two calls. stopwatch: times what sending weights takes.
        """
        from wpr.ppo.generation import TransformersGeneration
        from wpr.ppo.graph_generation import GraphGeneration

        name = self.resolve(device.type)
        if name == "transformers":
            return TransformersGeneration(synced)
        if name == "graphs":
            if device.type != "cuda":
                logger.warning(
                    "generation='graphs': %s is no GPU, so that steps run one by one, without graphs", device
                )
            return GraphGeneration(TransformersGeneration(synced), kept_bytes=None if training else math.inf)
        self.check(synced=synced, processes=processes)
        from wpr.ppo.vllm_engines import LocalEngine, ServerEngine
        from wpr.ppo.vllm_generation import VLLMGeneration

        if self.vllm_url is not None:
            return VLLMGeneration(ServerEngine(self.vllm_url, self.vllm_folder), stopwatch=stopwatch)
        return VLLMGeneration(LocalEngine(self.vllm_memory, self.vllm_max_length), stopwatch=stopwatch)
