"""Whether generated programs can be isolated on this machine: found out by one that tries to get out."""

from __future__ import annotations

import functools
import json
import platform
import shutil
from dataclasses import dataclass, replace

from wpr.rewards.code.limits import Limits
from wpr.rewards.code.processors import own_processor
from wpr.rewards.code.sandbox import Sandbox, SandboxEndedError, SandboxError, SandboxTimeoutError
from wpr.rewards.code.seccomp import filter_program

REMEDY = (
    "install bubblewrap (`apt install bubblewrap`), allow unprivileged user namespaces or run as root with "
    "CAP_SYS_ADMIN, or pass unsafe=True to run generated programs without isolation, on a machine that you can lose"
)

# Prints what it could do. Each entry must come out as it stands in EXPECTED.
ATTEMPTS = """
import json, os, socket, threading
found = {}
def attempt(name, action):
    try:
        action()
        found[name] = True
    except (OSError, RuntimeError):
        found[name] = False
attempt("write", lambda: open("/tmp/file", "w").close())
attempt("write outside", lambda: open("/file", "w").close())
attempt("process", os.fork)
attempt("socket", socket.socket)
attempt("root", lambda: os.setuid(0))
attempt("other processors", lambda: os.sched_setaffinity(0, range(1024)))
release = threading.Event()
def thread():
    threading.Thread(target=release.wait, daemon=True).start()
attempt("thread", thread)
attempt("many threads", lambda: [thread() for _ in range(8)])
release.set()
found["one processor"] = len(os.sched_getaffinity(0)) == 1
found["alone"] = os.getpid() < 10 and not os.path.exists("/proc/1") and not os.path.exists("/home")
print(json.dumps(found))
"""
EXPECTED = {
    "write": True,
    "write outside": False,
    "process": False,
    "socket": False,
    "root": False,
    "other processors": False,
    "thread": True,
    "many threads": False,
    "one processor": True,
    "alone": True,
}


@dataclass(frozen=True)
class Isolation:
    """Whether programs can be isolated here.

    bwrap: path of bubblewrap where they can, else None.
    reason: why not, or what isolates them.
    """

    bwrap: str | None
    reason: str

    @property
    def available(self) -> bool:
        return self.bwrap is not None

    def __str__(self) -> str:
        return self.reason if self.available else f"none: {self.reason}"


def isolation() -> Isolation:
    """Whether programs can be isolated here, and why not. The answer is kept for each bubblewrap that PATH leads to."""
    return _examined(shutil.which("bwrap"))


@functools.cache
def _examined(bwrap: str | None) -> Isolation:
    if platform.system() != "Linux":
        return Isolation(None, f"isolation needs Linux, this is {platform.system()}")
    if filter_program(platform.machine()) is None:
        return Isolation(None, f"no filter of system calls is known for {platform.machine()} processors")
    if bwrap is None:
        return Isolation(None, "there is no bwrap (bubblewrap) in PATH")
    limits = replace(Limits(), processes=4, wall_seconds=30.0)
    try:
        with own_processor() as processor, Sandbox(limits, bwrap, processor) as sandbox:
            sandbox.prepare(ATTEMPTS)
            _, message, output = sandbox.test("")
        found = json.loads(output)
    except (SandboxError, SandboxEndedError, SandboxTimeoutError, OSError) as error:
        return Isolation(None, f"{bwrap} does not work here: {error or type(error).__name__}")
    except ValueError:
        return Isolation(None, f"{bwrap}: the trial program failed: {message}")
    wrong = [name for name, wanted in EXPECTED.items() if found.get(name) is not wanted]
    if wrong:
        message = ", ".join(f"{name!r} {'succeeded' if found.get(name) else 'failed'}" for name in wrong)
        return Isolation(None, f"{bwrap} does not isolate here: in a trial, {message} (Linux 5.14 or newer is needed)")
    return Isolation(bwrap, f"bubblewrap ({bwrap}) with namespaces, limits and a filter of system calls")
