"""Triton's interpreter, put right where it would keep the kernels' tests from seeing anything, and made faster."""

from __future__ import annotations

from typing import Any

import numpy as np


def improve_interpreter() -> None:
    """Another Triton than the one known here is left alone."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    _multiply_bf16(language, interpreter)
    _patch_language_once(language, interpreter)


def _multiply_bf16(language: Any, interpreter: Any) -> None:
    """The interpreter has no bf16; its `tl.dot` multiplies the 16 bits of each number as if they were an integer. The
    cost kernel then takes all pairs for near ones, computes them again one by one, and is right whatever the products
    were. Numbers of bf16 are the upper halves of float32.

    Their products are summed in float64, where no bit of numbers like the tests' is lost: in float32 the sum depends on
    the order, which some CPUs' libraries take otherwise above the diagonal of x xᵀ than below it. Tensor cores do not.
    """
    builder = getattr(interpreter, "InterpreterBuilder", None)
    original = getattr(builder, "create_dot", None)
    if original is None:
        return

    def exact(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        if any(x.dtype.scalar != language.bfloat16 or x.data.dtype != np.uint16 for x in (a, b)):
            return original(self, a, b, total, *rest)
        return interpreter.TensorHandle((exact(a) @ exact(b)).astype(np.float32) + total.data, language.float32)

    builder.create_dot = dot


def _patch_language_once(language: Any, interpreter: Any) -> None:
    """A kernel under the interpreter sees a patched `triton.language`. The interpreter searches that module for what to
    patch in every call of a device function too, be it `tl.sum`, where all is patched since the kernel was launched.
    Then there is nothing to do.
    """
    original, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if original is None or scope is None:
        return

    def patch(fn: Any) -> Any:
        modules = [x for x in (language, language.core) if any(x is value for value in fn.__globals__.values())]
        if modules and not any(language.core.is_builtin(module.load) for module in modules):
            return scope()
        return original(fn)

    interpreter._patch_lang = patch
