"""The kernels run on the GPU if there is one, else under Triton's interpreter on the CPU."""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
