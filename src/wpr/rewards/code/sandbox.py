"""One sandbox: a bubblewrap process with the harness in it, messages to and from it, and its certain end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import marshal
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from wpr.rewards.base import RewardError
from wpr.rewards.code import harness
from wpr.rewards.code.limits import Limits
from wpr.rewards.code.seccomp import filter_program

START_SECONDS = 60.0
"""Until the harness must be ready; a loaded machine takes long, and no program runs yet."""

OPTIONS = ("-I", "-S", "-B", "-X", "utf8")  # nothing of the environment, no packages, no files written
NOBODY = 65534
MANY_USERS, FEW_USERS = range(0x70000000, 0x80000000), range(61184, 65520)
"""User ids that Linux distributions leave free; the few lie within the 65,536 that a container may have."""

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434  # the same on all processors

Part = Literal["program", "check"]

_numbers = itertools.count()


class SandboxError(RewardError):
    """The sandbox itself failed, not the program in it."""


class SandboxEndedError(Exception):
    """The sandbox hung up or talked nonsense: its program broke it."""


class SandboxTimeoutError(Exception):
    """Nothing came back in time."""


def kernel(number: int, *arguments: Any) -> int:
    """A system call. (``os.pidfd_open`` is missing from interpreters that were built on old systems.)"""
    answer: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def base_executable() -> Path:
    """The interpreter behind a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def user_of(number: int) -> int | None:
    """The user that the ``number``-th sandbox of this process runs as, where root calls; else None.

    The kernel counts processes by user, so two sandboxes that run at the same time should not share one. They do if
    there are more than 64 at once, or in a container with few ids, by chance: then they share the limit as well.
    """
    if os.geteuid() != 0:
        return None
    free = MANY_USERS if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"] else FEW_USERS
    return free[(os.getpid() * 64 + number % 64) % len(free)]


@functools.cache
def interpreter_mounts() -> tuple[tuple[str, ...], str]:
    """bubblewrap's arguments that show the base interpreter as ``/python`` and the system's libraries, all read-only,
    and the interpreter's path inside. Packages that are installed beside the standard library are covered.
    """
    prefix = Path(sys.base_prefix).resolve()
    executable = base_executable()
    arguments: list[str] = []
    for system in ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64"):
        if Path(system).is_symlink():
            arguments += ["--symlink", os.readlink(system), system]
        elif Path(system).is_dir():
            arguments += ["--ro-bind", system, system]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    inside = Path("/python")
    for folder in ("lib", "lib64"):
        if (prefix / folder).is_dir():
            arguments += ["--ro-bind", str(prefix / folder), str(inside / folder)]
    # Covered after all else is mounted; the system's own Python may stand at two places.
    for root, seen in ((prefix, inside), (Path("/usr"), Path("/usr")), (Path("/"), Path("/"))):
        for folder in ("lib", "lib64"):
            if (root / folder).is_symlink():
                continue
            for packages in (root / folder).glob("python*/*-packages"):
                if packages.is_dir():
                    cover = str(seen / packages.relative_to(root))
                    arguments += ["--tmpfs", cover, "--remount-ro", cover]
    target = f"/python/bin/{executable.name}"
    return (*arguments, "--ro-bind", str(executable), target), target


def isolated_command(bwrap: str, label: str, info: int) -> list[str]:
    """The command that starts the harness in new namespaces, with its process id outside written to ``info``.

    The harness mounts ``/tmp``, so it keeps one capability for that, and those to become another user where root
    calls; it drops them before it reads a program. There is no ``/proc``: nothing in it serves a program.
    """
    mounts, python = interpreter_mounts()
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--cap-add", "CAP_SYS_ADMIN", "--new-session", "--die-with-parent", "--hostname", "sandbox"]
    command += ["--clearenv", "--setenv", "LD_LIBRARY_PATH", "/python/lib", "--setenv", "MALLOC_ARENA_MAX", "1"]
    for folder in ("/usr", "/etc", "/dev", "/tmp", "/python", "/python/bin"):
        command += ["--perms", "0755", "--dir", folder]  # else only bubblewrap's user may enter
    command += [*mounts, "--ro-bind", harness.__file__, "/harness.py"]
    for device in ("null", "zero", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--info-fd", str(info)]
    return [*command, "--", python, *OPTIONS, "/harness.py", label]


class Sandbox:
    """A sandbox for one program; a context manager, after which nothing of it is left.

    bwrap: path of bubblewrap; None runs without isolation (own process group, empty environment, folder of its own,
        limits, and the filter of system calls where there is one).
    processor: the one that the program is bound to, see `own_processor`; None binds it to none.
    """

    def __init__(self, limits: Limits, bwrap: str | None, processor: int | None = None) -> None:
        self.limits, self.bwrap, self.processor = limits, bwrap, processor
        self.number = next(_numbers)
        self.killer: int | None = None  # a handle on the process whose end is the end of all others in there
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> Sandbox:
        label = f"wpr-program-{os.getpid()}-{self.number}"  # for who looks at a list of processes
        try:
            if self.bwrap is None:
                self._start_unsafe(label)
            else:
                self._start_isolated(self.bwrap, label)
        except BaseException:
            self.undo.close()
            raise
        os.set_blocking(self._stdin, False)
        return self

    def _start_unsafe(self, label: str) -> None:
        folder = tempfile.mkdtemp(prefix="wpr-program-")
        self.undo.callback(shutil.rmtree, folder, ignore_errors=True)
        command = [str(base_executable()), *OPTIONS, harness.__file__, label]
        self._start(command, env={"TMPDIR": folder}, cwd=folder, start_new_session=True)

    def _start(self, command: list[str], **options: Any) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, **options)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            self.undo.enter_context(stream)
        self.undo.callback(self._end)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()

    def _start_isolated(self, bwrap: str, label: str) -> None:
        reader, writer = os.pipe()
        try:
            self._start(isolated_command(bwrap, label, writer), env={}, cwd="/", pass_fds=(writer,))
            os.close(writer)
            writer = -1
            message = b""
            while not message.rstrip().endswith(b"}"):
                piece = os.read(reader, 4096)
                if not piece:
                    break
                message += piece
            with contextlib.suppress(ValueError, KeyError, ProcessLookupError):  # it failed: the first message says why
                self.killer = kernel(PIDFD_OPEN, json.loads(message)["child-pid"], 0)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    def prepare(
        self, program: str, fn_name: str | None = None, bare: bool = False, part: Part | None = None
    ) -> tuple[bool, str]:
        """Hand over the program. Whether it compiles, and the compiler's words if not. bare: see `CodeProblem`; part:
        see `run_check`.
        """
        self.fn_name = fn_name
        setup = {
            "limits": asdict(self.limits),
            "isolated": self.bwrap is not None,
            "filter": filter_program(platform.machine()),
            "fn_name": fn_name,
            "bare": bare,
            "part": part,
            "user": user_of(self.number) if self.bwrap is not None else None,
            "processor": self.processor,
        }
        try:
            end = time.monotonic() + START_SECONDS
            self.send(marshal.dumps(setup), end)
            code, message, _ = self._receive(end)
        except (SandboxEndedError, SandboxTimeoutError) as error:
            raise SandboxError(f"the sandbox did not start: {self._complaint() or repr(error)}") from None
        if code != 0:
            raise SandboxError(f"the sandbox did not start: {message}")
        end = time.monotonic() + self.limits.wall_seconds
        try:
            self.send(program.encode("utf-8", "surrogatepass"), end)
            code, message, _ = self._receive(end)
        except SandboxEndedError:
            return False, "the compiler crashed or ran out of memory"
        return code == 0, message

    def test(self, given: Any) -> tuple[int, str, bytes]:
        """Run one test: its exit status (a signal below 0, or `harness.FLOODED`), what it wrote to standard error last,
        and its standard output, or the returned value as JSON.
        """
        message = given.encode("utf-8", "surrogatepass") if self.fn_name is None else marshal.dumps(given)
        return self.exchange(message, time.monotonic() + self.limits.wall_seconds)

    def exchange(self, message: bytes, end: float) -> tuple[int, str, bytes]:
        """Pass on a message, and wait for the answer until ``end``."""
        self.send(message, end)
        return self._receive(end)

    def send(self, message: bytes, end: float) -> None:
        """Pass on a message."""
        data = memoryview(struct.pack(">Q", len(message)) + message)
        while data:
            try:
                data = data[os.write(self._stdin, data) :]
            except BlockingIOError:
                self._wait(self._stdin, select.POLLOUT, end)
            except BrokenPipeError:
                raise SandboxEndedError("it closed its input") from None

    def _receive(self, end: float) -> tuple[int, str, bytes]:
        code, words, size = struct.unpack(">iII", self._read(12, end))
        if words > harness.STDERR_KEPT or size > self.limits.output_bytes:
            raise SandboxEndedError(f"it announced {words} and {size} bytes")
        return code, self._read(words, end).decode("utf-8", "replace"), self._read(size, end)

    def _read(self, count: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._stdout, select.POLLIN, end)
            piece = os.read(self._stdout, min(count - len(data), 2**20))
            if not piece:
                raise SandboxEndedError("it hung up")
            data += piece
        return bytes(data)

    def _wait(self, fd: int, event: int, end: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise SandboxTimeoutError

    def _complaint(self) -> str:
        """What bubblewrap or the interpreter wrote before any program was in there."""
        self._end()
        assert self.process.stderr is not None
        message: bytes = self.process.stderr.read(4096)
        return message.decode("utf-8", "replace").strip()

    def _end(self) -> None:
        """Kill everything in there, and return when it is gone.

        With isolation that is the first process of the sandbox's namespace: the kernel ends all others with it before
        it counts as ended itself. (Waiting for bubblewrap is not enough: it leaves as soon as the harness does.)
        """
        if self.killer is not None:
            with contextlib.suppress(ProcessLookupError):
                kernel(PIDFD_SEND_SIGNAL, self.killer, signal.SIGKILL, None, 0)
            poll = select.poll()
            poll.register(self.killer, select.POLLIN)
            poll.poll()
            os.close(self.killer)
            self.killer = None
        elif self.bwrap is None and self.process.returncode is None:  # not waited for, so the number is still ours
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.returncode is None:
            self.process.kill()
        self.process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo.close()


def run_check(program: Sandbox, check: Sandbox) -> tuple[int, str, bytes]:
    """Run a check in one sandbox on the program in another; both were prepared for their parts. The answer is that of
    `Sandbox.test`: the check's, with its verdict as JSON, or that of a program that ended before the check did, without
    any. The time limit is that of one test.

    Every message is carried over unread, see `harness`.
    """
    end = time.monotonic() + check.limits.wall_seconds
    program.send(b"", end)
    code, message, body = check.exchange(b"", end)
    while code == harness.MESSAGE:
        code, message, body = program.exchange(body, end)
        if code != harness.MESSAGE:
            return code, message, b""
        code, message, body = check.exchange(body, end)
    return code, message, body
