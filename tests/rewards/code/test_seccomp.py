"""The filter of system calls, on a small machine of the kernel's kind: so for other processors than this one too."""

from __future__ import annotations

import errno
import struct

import pytest

from wpr.rewards.code.seccomp import ALLOW, ARCHITECTURES, CLONE3, DENIED_EVERYWHERE, ERRNO, KILL, filter_program

EPERM, ENOSYS = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS


def answer(program: bytes, audit: int, number: int, first: int = 0) -> int:
    """What the filter says to a call."""
    data = struct.pack("<IIQQ", number, audit, 0, first)  # as the kernel lays it out
    steps, at, held = list(struct.iter_unpack("<HBBI", program)), 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: held == value, 0x25: held > value, 0x45: bool(held & value)}[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", sorted(ARCHITECTURES))
def test_what_is_allowed(machine: str) -> None:
    program, known = filter_program(machine), ARCHITECTURES[machine]
    assert program is not None
    for number in [*known.denied.values(), *DENIED_EVERYWHERE.values()]:
        assert answer(program, known.audit, number) == EPERM
    thread, fork, vfork = 0x3D0F00, 0x1200011, 0x4111  # flags that libc passes
    assert answer(program, known.audit, known.clone, thread) == ALLOW
    assert answer(program, known.audit, known.clone, fork) == EPERM
    assert answer(program, known.audit, known.clone, vfork) == EPERM
    assert answer(program, known.audit, CLONE3) == ENOSYS
    assert answer(program, known.audit, known.socketpair, 1) == ALLOW
    assert answer(program, known.audit, known.socketpair, 2) == EPERM
    assert answer(program, known.audit, 1000) == ENOSYS
    assert answer(program, known.audit, 0x40000000 + known.clone, thread) == ENOSYS  # x32
    assert answer(program, known.audit ^ 1, known.clone, thread) == KILL
    named = {*known.denied.values(), *DENIED_EVERYWHERE.values(), known.clone, known.socketpair, CLONE3}
    for number in set(range(451)) - named:
        assert answer(program, known.audit, number) == ALLOW


def test_unknown_processors() -> None:
    assert filter_program("riscv64") is None
