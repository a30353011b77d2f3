"""The program inside the sandbox: runs one generated program on one test after the other, and tells what came out.

Runs as a script, alone, with nothing but the standard library: ``python harness.py``. The interpreter starts once; each
test gets a fresh child by fork. What is expected never comes in here, and nothing that is said here is trusted outside:
the harness shares the sandbox with the generated program, which may at worst spoil its own result.

The caller writes messages to standard input: a length and that many bytes. Each is answered on standard output: a
number, two lengths, a text and bytes; see `send`. Few modules are imported here, for starting is what takes time.

A check that calls a program's function many times and looks at what it returns, as HumanEval has them, takes two
sandboxes, for whoever shares a process with a check can make it pass. In one the program serves calls (`serve`), in the
other the check makes them (`candidate`); the caller carries each message over:

    check   -> program     [[argument, ...], {name: argument, ...}]
    program -> check       ["value", value] or ["raised", name of a built-in exception, its words]

Values are plain ones, as JSON, see `packed`: what comes out of `unpacked` is equal to what Python says it is equal to,
whatever the program sent, and shares nothing with the program. So a program can answer each call as it likes, knowing
its arguments, and nothing else. The check's verdict comes from its own sandbox.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import select
import struct
import sys
import types
import warnings

TYPE_CHECKING = False  # typing's own costs as much time as the rest of this file
if TYPE_CHECKING:
    from typing import Any

FLOODED, MESSAGE = 1000, 1001  # beyond any exit status
SIGKILL = 9
STDERR_KEPT = 2000  # bytes
RESULT = 3  # the file descriptor on which a function's value leaves
INBOX, OUTBOX = 4, 5  # those of a check's and a program's messages to each other

# What APPS's own tester imports before a program, and solutions rely on: name -> module ("" where it is the module).
NAMES = {
    **dict.fromkeys(
        ["bisect", "collections", "fractions", "functools", "heapq", "itertools", "math", "random", "re", "string",
         "sys", "time"], ""
    ),
    **dict.fromkeys(["accumulate", "product", "permutations", "combinations"], "itertools"),
    **dict.fromkeys(["Counter", "OrderedDict", "deque", "defaultdict", "ChainMap"], "collections"),
    **dict.fromkeys(["lru_cache", "cache", "reduce", "cmp_to_key"], "functools"),
    **dict.fromkeys(["sqrt", "sin", "cos", "tan", "ceil", "fabs", "floor", "gcd", "exp", "log", "log2", "inf"], "math"),
    **dict.fromkeys(["List", "Tuple", "Dict", "Set", "Optional", "Union", "Any"], "typing"),
    **dict.fromkeys(["heapify", "heappop", "heappush", "heappushpop", "heapreplace", "nlargest", "nsmallest"], "heapq"),
    **dict.fromkeys(["bisect_left", "bisect_right", "insort"], "bisect"),
}  # fmt: skip


class RefusalError(Exception):
    """A protection that could not be set up; no program is run then."""


def read_exactly(count: int, source: int) -> bytes:
    """That many bytes from the caller; ends the process when the caller is done with it."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(source, min(count - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def receive(source: int = 0) -> bytes:
    """The caller's next message."""
    (size,) = struct.unpack(">Q", read_exactly(8, source))
    return read_exactly(size, source)


def send(code: int, text: str = "", body: bytes = b"", target: int = 1) -> None:
    """An answer: 0 for success, else an exit status, a signal below 0, or `FLOODED`; what to say of it; the output.
    Or `MESSAGE`, and a message for the other sandbox.
    """
    words = text.encode("utf-8", "replace")[-STDERR_KEPT:]
    data = memoryview(struct.pack(">iII", code, len(words), len(body)) + words + body)
    while data:
        data = data[os.write(target, data) :]


def system_call(name: str, *arguments: Any) -> None:
    """A function of the C library that Python does not offer; it must succeed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise RefusalError(f"{name}: {os.strerror(ctypes.get_errno())}")


def private_tmp(tmp_mb: int, files: int) -> None:
    """A ``/tmp`` with a limit on files too, which bubblewrap does not offer: a million empty files fill any memory."""
    options = f"size={tmp_mb * 2**20},nr_inodes={files + 1},mode=1777"
    nosuid_nodev = 2 | 4
    system_call("mount", b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(nosuid_nodev), options.encode())
    os.chdir("/tmp")


def drop_privileges(user: int | None) -> None:
    """To an ordinary user without capabilities. ``user`` is given where root started us: a limit on the number of
    processes does not bind root, in whatever namespace.
    """
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    version_3 = 0x20080522
    system_call("capset", struct.pack("=Ii", version_3, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0))
    if os.getresuid().count(0) or os.getresgid().count(0):
        raise RefusalError("still root after dropping privileges")


def set_limits(limits: dict[str, Any], isolated: bool, others: int) -> None:
    """Those of a process; a program cannot raise them again. ``others``: processes of the same user besides."""
    interpreter = 64 * 2**20  # address space, before any program
    fixed = {
        resource.RLIMIT_AS: limits["memory_mb"] * 2**20 + interpreter,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # else it would count whatever the user runs elsewhere
        fixed[resource.RLIMIT_NPROC] = limits["processes"] + others
        fixed[resource.RLIMIT_MEMLOCK] = 0
        fixed[resource.RLIMIT_MSGQUEUE] = 0
        fixed[resource.RLIMIT_SIGPENDING] = 64
    for kind, value in fixed.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError) as error:
            if isolated:  # some systems know no limit on memory; only who asked for no isolation goes on without
                raise RefusalError(f"limit {kind} could not be set to {value}: {error}") from None


def bind_to_processor(number: int | None) -> None:
    """This process and all that come from it; the filter of system calls keeps a program from undoing it."""
    if number is not None:
        try:
            os.sched_setaffinity(0, {number})
        except OSError as error:
            raise RefusalError(f"processor {number} could not be chosen: {error}") from None


def install_filter(program: bytes) -> None:
    """Hand the kernel the filter of system calls, for this process and for good."""
    pr_set_no_new_privs, pr_set_seccomp, mode_filter = 38, 22, 2
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    system_call("prctl", pr_set_no_new_privs, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    system_call("prctl", pr_set_seccomp, ctypes.c_ulong(mode_filter), described, *map(ctypes.c_ulong, (0, 0)))


def used_names(code: types.CodeType) -> set[str]:
    """Names that a program reads, in its functions too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= used_names(constant)
    return names


def ready_names(code: types.CodeType) -> dict[str, Any]:
    """Those of `NAMES` that the program mentions; importing all would take longer than most programs."""
    found: dict[str, Any] = {}
    for name in used_names(code) & NAMES.keys():
        module = __import__(NAMES[name] or name)
        found[name] = getattr(module, name) if NAMES[name] else module
    return found


def function_in(namespace: dict[str, Any], name: str) -> Any:
    """The function of this name, or the method of a class ``Solution``."""
    solution = namespace.get("Solution")
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    if name not in namespace:
        raise NameError(f"the program has neither a function {name} nor a class Solution with a method {name}")
    return namespace[name]


def packed(value: Any) -> Any:
    """A plain value as JSON can say it: what JSON lacks is a list that begins with the name of its type. A value of a
    derived class is one of the plain class. Raises TypeError for any other.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *([packed(key), packed(item)] for key, item in value.items())]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *map(packed, value)]
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent between a check and a program")


def unpacked(value: Any) -> Any:
    """What `packed` made. Untrusted: nothing but plain values comes out, or an exception."""
    if isinstance(value, dict):
        raise ValueError("a dictionary is a list, too")
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "object":
        return object()
    if kind == "bytes":
        return bytes.fromhex(*items)
    if kind == "complex":
        return complex(*items)
    if kind == "dict":
        return {unpacked(key): unpacked(item) for key, item in items}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpacked, items))


def serve(function: Any) -> None:
    """In the program's sandbox: answer calls until the caller hangs up."""
    import json

    while True:
        arguments, named = map(unpacked, json.loads(receive(INBOX)))
        try:
            value = function(*arguments, **named)
        except Exception as error:
            kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            text = json.dumps(["raised", kind, str(error)[:STDERR_KEPT]])
        else:
            try:
                text = json.dumps(["value", packed(value)])
            except (TypeError, RecursionError):
                text = '["value", ["object"]]'  # equal to nothing
        send(MESSAGE, body=text.encode(), target=OUTBOX)


def candidate(*arguments: Any, **named: Any) -> Any:
    """In the check's sandbox: the program's function. Arguments are copied, so a program cannot change them here."""
    import json

    send(MESSAGE, body=json.dumps([packed(arguments), packed(named)]).encode(), target=OUTBOX)
    answer, *details = json.loads(receive(INBOX))
    if answer == "value":
        return unpacked(*details)
    raise rebuilt(*details)


def rebuilt(name: str, words: str) -> Exception:
    """What the program's function raised, where that is an exception of Python that is made of words."""
    kind = vars(builtins).get(name)
    # A StopIteration would end a loop of the check in silence.
    others = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, others):
        return kind(words)
    return RuntimeError(f"{name}: {words}")


def verdict(code: types.CodeType, namespace: dict[str, Any]) -> str:
    """Of a check that runs to its end, or that fails an assertion."""
    try:
        exec(code, namespace)
    except AssertionError:
        return "wrong"
    return "passed"


def run_program(code: types.CodeType, names: dict[str, Any], given: bytes, setup: dict[str, Any]) -> None:
    """In the child: the generated program. ``given``: a function's arguments, marshalled; JSON's keys are text."""
    fn_name, part = setup["fn_name"], setup["part"]
    # A function's program is a module: what stands under `if __name__ == "__main__"` would read standard input.
    name = "__main__" if fn_name is None else "program"
    module = types.ModuleType(name)
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv = ["program.py"]
    namespace = module.__dict__
    namespace.update(names)
    if part == "check":
        namespace[fn_name] = candidate
        value = verdict(code, namespace)
    else:
        exec(code, namespace)
        if fn_name is None:
            return
        if part == "program":
            if fn_name not in namespace:
                raise NameError(f"the program has no function {fn_name}")
            serve(namespace[fn_name])
        value = function_in(namespace, fn_name)(*marshal.loads(given))
    import json  # as it was: the caller had it imported before the program

    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return  # nothing that JSON can say was expected
    sent = 0
    while sent < len(text):
        sent += os.write(RESULT, text[sent:])


def child(
    code: types.CodeType,
    names: dict[str, Any],
    given: bytes,
    stdin: int,
    pipes: list[int],
    setup: dict[str, Any],
) -> int:
    """In the child: limits, then the program; its exit status."""
    # stdin may be 3 itself, but it is moved first; the pipes lie above, and above them the way to the caller.
    sources = [stdin, *pipes, *([os.dup(0), os.dup(1)] if setup["part"] else [])]
    for target, source in enumerate(sources):
        os.dup2(source, target)
    os.closerange(len(sources), 65536 if setup["isolated"] else 256)
    seconds = max(1, -int(-setup["limits"]["cpu_seconds"] // 1))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (setup["limits"]["tmp_mb"] * 2**20,) * 2)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # answers of ten thousand digits exist
    for name in ("exit", "quit"):  # the module site would bring them
        setattr(builtins, name, sys.exit)
    if setup["filter"]:
        install_filter(setup["filter"])
    try:
        run_program(code, names, given, setup)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        sys.stderr.write(f"{type(error).__name__}: {error}"[:STDERR_KEPT])
        return 1
    return 0


def collect(pid: int, readers: list[int], limit: int, wanted: int) -> tuple[int, str, bytes]:
    """What a child writes until it ends, up to ``limit`` bytes in all; beyond that it is killed."""
    kept: dict[int, bytearray] = {fd: bytearray() for fd in readers}
    stderr, total, flooded = readers[1], 0, False
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    waiting = set(readers)
    while waiting and not flooded:
        for fd, _ in poll.poll():
            piece = os.read(fd, 1 << 16)
            if not piece:
                poll.unregister(fd)
                waiting.discard(fd)
                continue
            total += len(piece)
            flooded = total > limit
            if fd in (wanted, stderr):
                kept[fd] += piece
            if fd == stderr:
                del kept[fd][:-STDERR_KEPT]
    if flooded:
        os.kill(pid, SIGKILL)
    _, status = os.waitpid(pid, 0)
    for fd in readers:
        os.close(fd)
    message = kept[stderr].decode("utf-8", "replace").strip()
    if flooded:
        return FLOODED, message, b""
    return os.waitstatus_to_exitcode(status), message, bytes(kept[wanted])


def input_file(given: bytes) -> int:
    """A file with a test's input, which no name leads to."""
    if sys.platform == "linux":  # not os.memfd_create: interpreters that were built on old systems lack it
        fd: int = ctypes.CDLL(None, use_errno=True).memfd_create(b"stdin", 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "memfd_create")
    else:
        import tempfile

        fd, name = tempfile.mkstemp()
        os.unlink(name)
    data = memoryview(given)
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def run_test(code: types.CodeType, names: dict[str, Any], given: bytes, setup: dict[str, Any]) -> int | None:
    """Fork, run, report. None in the parent; in the child, the exit status it has to end with."""
    fn_name = setup["fn_name"]
    stdin = input_file(given if fn_name is None else b"")
    pairs = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        return child(code, names, given, stdin, [writer for _, writer in pairs], setup)
    os.close(stdin)
    for _, writer in pairs:
        os.close(writer)
    readers = [reader for reader, _ in pairs]
    send(*collect(pid, readers, setup["limits"]["output_bytes"], wanted=readers[0] if fn_name is None else readers[2]))
    return None


def main() -> int:
    """Set up, compile, run tests until the caller hangs up. Returns only in a test's child."""
    warnings.simplefilter("ignore")
    setup = marshal.loads(receive())
    try:
        if setup["isolated"]:
            private_tmp(setup["limits"]["tmp_mb"], setup["limits"]["files"])
            drop_privileges(setup["user"])
        # We, and bubblewrap's reaper where it is of the same user.
        set_limits(setup["limits"], setup["isolated"], others=2 if setup["user"] is None else 1)
        bind_to_processor(setup["processor"])
    except RefusalError as refusal:
        send(1, str(refusal))
        return 1
    send(0)
    if setup["fn_name"] is not None:
        import json  # noqa: F401
    try:
        source = receive().decode("utf-8", "surrogatepass")
        code = compile(source, "program.py", "exec", dont_inherit=True)
        names = {} if setup["bare"] else ready_names(code)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        send(1, f"{type(error).__name__}: {error}"[:STDERR_KEPT])
        return 0
    send(0)
    while True:
        status = run_test(code, names, receive(), setup)
        if status is not None:
            return status


if __name__ == "__main__":
    sys.exit(main())
