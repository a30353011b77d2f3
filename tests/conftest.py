"""One thread a worker: the problems are small, and pytest runs one worker a core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch

torch.set_num_threads(1)
