"""What a generated program may use: time, memory, processes, output, files."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Limits of one test, except where it says otherwise. All are enforced by the kernel or from outside the sandbox.

    wall_seconds: from sending a test's input to its result. A program that sleeps or waits is stopped by this one.
    cpu_seconds: processor time of all threads together, in whole seconds upwards.
    memory_mb: address space beyond the interpreter's own, in MiB. What is reserved counts: a thread's stack counts in
        full.
    processes: processes and threads at once, with the program itself. Further *processes* are refused in any case.
    output_bytes: standard output, standard error and a returned value together.
    tmp_mb: what fits into the private ``/tmp``, in MiB; all tests of a program share it.
    files: files and folders in ``/tmp``.
    open_files: open file descriptors.
    """

    wall_seconds: float = 4.0
    cpu_seconds: float = 4.0
    memory_mb: int = 256
    processes: int = 16
    output_bytes: int = 4 * 2**20
    tmp_mb: int = 16
    files: int = 1000
    open_files: int = 64

    def __post_init__(self) -> None:
        # Below these the interpreter itself does not get far enough to run an empty program.
        least = {"memory_mb": 16, "processes": 1, "output_bytes": 1, "tmp_mb": 1, "files": 1, "open_files": 16}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{field.name}={value!r} is no limit; give a finite number")
            if field.name not in least:
                if value <= 0:
                    raise ValueError(f"{field.name}={value} leaves no time; give more than 0 seconds")
            elif not isinstance(value, int) or value < least[field.name]:
                raise ValueError(
                    f"{field.name}={value} is too little; give a whole number, {least[field.name]} or more"
                )
