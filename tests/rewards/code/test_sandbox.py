"""Attacks on the sandbox, one test each: none succeeds, all are scored, nothing is left running or written.

A contained attack is a pass here: the programs print what happened to them, and only the harmless answer is expected.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rewards.code.programs import QUICK, isolated, prints, processes_left, returns
from wpr.rewards.code import CodeProblem, Outcome, Runner, isolation
from wpr.rewards.code.processors import usable_processors
from wpr.rewards.code.sandbox import Sandbox

pytestmark = isolated


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    assert processes_left() == []
    assert list(Path("/tmp").glob("attack*")) == []
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def run(program: str, problem: CodeProblem, **limits: float) -> Outcome:
    return Runner(replace(QUICK, **limits), workers=1).run([(program, problem)])[0]


def attempt(action: str) -> str:
    """A program that tries something; it prints `refused` if the system does not let it, else `done`."""
    body = "\n    ".join(action.strip().splitlines())
    return f"import os\ntry:\n    {body}\n    print('done')\nexcept OSError as error:\n    print('refused')"


REFUSED, DONE = prints("refused"), prints("done")


def test_seen_from_outside() -> None:
    """Namespaces of its own, nobody's user, and no privilege to be had."""
    with Sandbox(QUICK, isolation().bwrap) as sandbox:
        assert sandbox.prepare("pass") == (True, "")
        (pid,) = [line.split(":")[0] for line in processes_left() if ": /python/" in line]
        for kind in ("cgroup", "ipc", "mnt", "net", "pid", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert "0" not in status["Uid"].split() + status["Gid"].split()
        assert status["NoNewPrivs"] == "1"
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert os.getsid(int(pid)) != os.getsid(0)


@pytest.mark.parametrize("call", ["os.fork()", "os.forkpty()", "__import__('subprocess').run(['/bin/true'])"])
def test_new_processes(call: str) -> None:
    assert run(attempt(call), REFUSED).passed


def test_fork_bomb() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    outcome = run(bomb, prints("done", tests=3))
    assert outcome.results == ("timeout", "skipped", "skipped")


def test_fork_through_the_system_call() -> None:
    """Not through Python: libc's fork, the bare calls fork and clone, and clone3, whose flags a filter cannot see."""
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.fork(), libc.syscall(57), libc.syscall(56, 17, 0, 0, 0, 0), libc.syscall(435, 0, 0))"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86-64")
    assert run(program, prints("-1 -1 -1 -1")).passed


def test_memory_bomb() -> None:
    outcome = run("data = []\nwhile True:\n    data.append(bytearray(2**24))", prints(""), cpu_seconds=3.0)
    assert outcome.results == ("error",)
    assert "MemoryError" in outcome.message


@pytest.mark.parametrize(
    "action",
    [
        "os.memfd_create('x')",
        "import _posixshmem; _posixshmem.shm_open('/x', os.O_CREAT | os.O_RDWR, mode=0o600)",
        "open('/dev/shm/x', 'w')",
    ],
)
def test_memory_that_no_limit_counts(action: str) -> None:
    assert run(attempt(action), REFUSED).passed


def test_system_v_memory() -> None:
    program = "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 2**30, 0o1600))"
    assert run(program, prints("-1")).passed


def test_infinite_loop() -> None:
    outcome = run("while True: pass", prints("", tests=5))
    assert outcome.results == ("timeout", *["skipped"] * 4)
    assert outcome.reward == -0.6
    assert "1 seconds of processor time" in outcome.message


def test_a_loop_that_ignores_the_warning() -> None:
    """The soft limit's signal can be ignored, the hard limit a second later cannot."""
    program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(program, prints("")).reward == -0.6


def test_sleep() -> None:
    assert run("import time\ntime.sleep(1000)", prints(""), wall_seconds=0.3).results == ("timeout",)


def test_a_gigabyte_of_output() -> None:
    outcome = run("import os\nfor _ in range(1024):\n    os.write(1, b'x' * 2**20)", prints("x"))
    assert outcome.results == ("error",)
    assert "more than 100000 bytes" in outcome.message


def test_a_gigabyte_of_errors_and_of_return_value() -> None:
    outcome = run("import os\nwhile True:\n    os.write(2, b'x' * 2**20)", prints("x"))
    assert "more than 100000 bytes" in outcome.message
    outcome = run("def solve():\n    return 'x' * 2**20", returns("x"))
    assert "more than 100000 bytes" in outcome.message


def test_the_home_folder_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTACK_SECRET", "hunter2")
    places = [str(Path.home()), "/root", "/home", str(Path.cwd()), "/etc/passwd", "/etc/shadow", "/var", "/sys", "/run"]
    program = f"""
import os
print([path for path in {places!r} if os.path.exists(path)])
print('ATTACK_SECRET' in os.environ, 'HOME' in os.environ, sorted(os.listdir('/etc')))
"""
    assert run(program, prints("[]\nFalse False ['ld.so.cache']")).passed


def test_the_host_is_not_in_proc() -> None:
    assert run("import os\nprint(os.path.exists('/proc/self'), os.getpid() < 10)", prints("False True")).passed


@pytest.mark.parametrize(
    "path",
    ["/attack", "/usr/lib/attack", "/python/attack", "/python/lib/attack", "/dev/attack", "/etc/attack", "/harness.py"],
)
def test_writing_outside_tmp(path: str) -> None:
    assert run(attempt(f"open({path!r}, 'a')"), REFUSED).passed


def test_tmp_is_private_and_small() -> None:
    assert run(attempt("open('/tmp/attack', 'w').write('x')"), DONE).passed
    assert run(attempt("for i in range(8): open(f'/tmp/attack{i}', 'w').write('x' * 2**20)"), REFUSED).passed
    assert run(attempt("for i in range(2000): open(f'/tmp/attack{i}', 'w')"), REFUSED).passed


def test_programs_do_not_see_each_others_files() -> None:
    runner = Runner(QUICK, workers=1)
    write = ("open('/tmp/attack', 'w').write('x')\nprint('written')", prints("written"))
    look = ("import os\nprint(os.listdir('/tmp'))", prints("[]"))
    assert [outcome.passed for outcome in runner.run([write, look])] == [True, True]


def test_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        action = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert run(attempt(action), REFUSED).passed
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("family", ["AF_UNIX", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_sockets_of_other_families(family: str) -> None:
    assert run(attempt(f"import socket; socket.socket(socket.{family})"), REFUSED).passed


def test_killing_the_parent() -> None:
    """The harness is of the same user, so it can be killed: that costs the program its own score, and nothing else."""
    outcome = run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('x')", prints("x", tests=2))
    assert outcome.results == ("error", "skipped")
    outcome = run("import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('x')", prints("x"))
    assert outcome.results == ("error",)


def test_stopping_the_parent() -> None:
    outcome = run("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nprint('x')", prints("x"), wall_seconds=0.5)
    assert outcome.results == ("timeout",)


def test_killing_what_runs_outside() -> None:
    program = attempt(f"os.kill({os.getpid()}, 9)")
    assert run(program, REFUSED).passed


def test_daemons() -> None:
    program = attempt("os.setsid()\nif os.fork() == 0:\n    __import__('time').sleep(1000)")
    assert run(program, REFUSED).passed


def test_symlinks() -> None:
    program = f"""
import os
os.symlink('/', '/tmp/root')
os.symlink({str(Path(__file__))!r}, '/tmp/attack')
print(os.path.exists('/tmp/attack'), sorted(set(os.listdir('/tmp/root')) & {{'root', 'home', 'var'}}))
try:
    open('/tmp/root/attack', 'w')
except OSError as error:
    print(error.strerror)
try:
    os.mkdir('/tmp/..attack'); os.rename('/tmp/..attack', '/attack')
except OSError as error:
    print(error.strerror)
"""
    assert run(program, prints("False []\nRead-only file system\nInvalid cross-device link")).passed


def test_importing_the_callers_modules() -> None:
    program = f"""
import glob, importlib, sys
sys.path += ['/', '/tmp', *{sys.path!r}, *glob.glob('/usr/lib/*/*-packages'), *glob.glob('/python/*/*/*-packages')]
for module in ('torch', 'wpr', 'pytest', 'numpy', 'pip', 'tests'):
    try:
        importlib.import_module(module)
        print(module)
    except ModuleNotFoundError:
        pass
"""
    assert run(program, prints("")).passed


def test_deep_recursion() -> None:
    outcome = run("def f(n): return f(n + 1)\nf(0)", prints(""))
    assert outcome.results == ("error",)
    assert "RecursionError" in outcome.message
    crash = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    assert run(crash, prints("")).results == ("error",)


def test_deeply_nested_source() -> None:
    assert run("(" * 10_000 + ")" * 10_000, prints("")).reward == -1.0
    assert run("-" * 100_000 + "1", prints("")).reward == -1.0


def test_threads_that_never_end() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nprint('x')"
    assert run(program, prints("x"), wall_seconds=0.5).results == ("timeout",)


def test_thread_bomb() -> None:
    program = """
import threading
release, started = threading.Event(), 0
threading.stack_size(2**16)
try:
    while started < 1000:
        threading.Thread(target=release.wait, daemon=True).start()
        started += 1
except RuntimeError:
    print(started)
"""
    assert run(program, prints("15")).passed  # and the main thread


def test_one_processor() -> None:
    """Of all threads together, and there is no way to another."""
    program = """
import os, threading
def look():
    print(len(os.sched_getaffinity(0)), end=' ')
    try:
        os.sched_setaffinity(0, range(1024))
    except PermissionError:
        print('refused')
look()
thread = threading.Thread(target=look)
thread.start()
thread.join()
"""
    assert run(program, prints("1 refused\n1 refused")).passed


@pytest.mark.skipif(usable_processors() < 2, reason="on one processor there are no neighbours")
@pytest.mark.parametrize("more", [0, 5])
def test_busy_threads_do_not_slow_the_neighbours(more: int) -> None:
    """With as many workers as processors, and with more. (Without a processor of its own, a program is safe from its
    neighbours' threads only where the kernel groups processes by session, which it does not in containers.)
    """
    attack = """
import hashlib, threading
threading.stack_size(2**16)
def work():
    while True:
        hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**6)  # other threads run meanwhile
for _ in range(31):
    threading.Thread(target=work).start()
work()
"""
    neighbour = "import time\nwhile time.process_time() < 0.5:\n    pass\nprint('done')"
    limits = replace(QUICK, wall_seconds=5.0, cpu_seconds=30.0, processes=32)
    runner = Runner(limits, workers=usable_processors() + more)
    outcomes = runner.run([(attack, prints("")), *[(neighbour, prints("done"))] * (usable_processors() + more)])
    assert outcomes[0].results == ("timeout",)
    assert all(outcome.passed for outcome in outcomes[1:])


def test_raising_the_limits() -> None:
    program = """
import resource
refused = 0
for kind in ('AS', 'CPU', 'NPROC', 'NOFILE', 'FSIZE'):
    try:
        resource.setrlimit(getattr(resource, 'RLIMIT_' + kind), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        refused += 1
print(refused)
"""
    assert run(program, prints("5")).passed


def test_no_privileges() -> None:
    program = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
data = ctypes.create_string_buffer(24)
libc.capget(struct.pack('=Ii', 0x20080522, 0), data)
print(0 in os.getresuid(), 0 in os.getresgid(), any(data.raw))
print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0), end=' ')
print(libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0), libc.chroot(b'/tmp'))
"""
    assert run(program, prints("False False False\n-1 -1 -1 -1")).passed


def test_calls_in_the_32_bit_convention() -> None:
    """On x86-64, `int 0x80` has other numbers for the same calls: fork is 2. The filter ends whoever uses it."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has the convention")
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex('b802000000cd80c3'))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
print('forked')
"""
    outcome = run(program, prints("forked"))
    assert outcome.results == ("error",)
    assert "SIGSYS" in outcome.message


def test_descriptors_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    with (tmp_path / "secret").open() as secret:
        os.set_inheritable(secret.fileno(), True)
        program = """
import os
seen = []
for fd in range(3, 256):
    try:
        seen.append((fd, os.fstat(fd).st_mode >> 12))
    except OSError:
        pass
print(seen)
"""
        assert run(program, prints("[(3, 1)]")).passed  # the pipe of a function's value


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os\nmessage = bytes(8) + b'\\0\\0\\0\\x0242'\n"
        "for fd in range(1, 64):\n    try:\n        os.write(fd, message)\n    except OSError:\n        pass",
        "def solve(n):\n    class Same:\n        def __eq__(self, other): return True\n    return Same()",
        "import json\njson.dumps = lambda value: '42 or anything'\ndef solve(n):\n    return 0",
        "import os\nos.write(3, b'[]')\nos._exit(0)",
        "import os\nos.write(3, b'[' * 60000)\nos._exit(0)",  # JSON that a careless reader recurses into
        "import os\nos.write(3, b'9' * 60000)\nos._exit(0)",
    ],
)
def test_claims_without_an_answer(program: str) -> None:
    """The right answer is known outside only; whatever a program sends, it is compared with that."""
    outcome = run(program, returns(42, 21))
    assert not outcome.passed
    assert outcome.reward < 0
    assert not run(program, prints("42")).passed


def test_the_answer_is_not_in_the_programs_memory() -> None:
    """Neither in objects, nor on the stack, nor in what the harness has read."""
    program = """
import gc, sys
texts, frame = [], sys._getframe()
while frame:
    texts.append(repr(frame.f_locals)); texts.append(repr(frame.f_globals)); frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        try: texts.append(repr(thing))
        except Exception: pass
word = ''.join(reversed('akkouq'))
print(any(word in text for text in texts))
"""
    problem = CodeProblem((prints("quokka").tests[0], prints("False").tests[0]))
    assert run(program, problem, wall_seconds=10, cpu_seconds=10, memory_mb=512).results == ("fail", "pass")


def test_one_test_does_not_change_the_next() -> None:
    """Each has a process of its own."""
    program = "import builtins\nprint(getattr(builtins, 'seen', 0))\nbuiltins.seen = 1"
    assert run(program, prints("0", tests=3)).passed
