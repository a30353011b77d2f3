"""Runs generated programs on their problems' tests, many at once, each in a sandbox of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from signal import SIGXCPU, Signals

from wpr.rewards.code.comparison import same_output, same_value
from wpr.rewards.code.harness import FLOODED
from wpr.rewards.code.isolation import REMEDY, isolation
from wpr.rewards.code.limits import Limits
from wpr.rewards.code.outcome import Outcome, Result
from wpr.rewards.code.problems import PASSES, Case, CodeProblem, ProblemError, read_json
from wpr.rewards.code.processors import own_processor, usable_processors
from wpr.rewards.code.sandbox import Sandbox, SandboxEndedError, SandboxError, SandboxTimeoutError, run_check

MESSAGE_LENGTH = 500  # characters


class Runner:
    """Runs programs in sandboxes.

    limits: of each test; `Limits()` if None.
    workers: programs at once, at most one per processor that this process may use: two on one processor take each
        other's time, and one with many threads takes nearly all. None: this process's share of the processors, if it is
        one of several on the machine that ``torchrun`` or ``accelerate`` started.
    unsafe: run without isolation where there is none. Generated programs then have your rights.
    stop_early: leave out the tests that follow an error or a timeout. The reward is decided by then, and a program that
        never ends costs its time limit once, not once a test.
    """

    def __init__(
        self, limits: Limits | None = None, workers: int | None = None, unsafe: bool = False, stop_early: bool = True
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} runs nothing; give 1 or more, or None for one per processor")
        self.limits = limits or Limits()
        usable = usable_processors()
        processes = os.environ.get("LOCAL_WORLD_SIZE", "")
        share = max(1, usable // max(1, int(processes) if processes.isdecimal() else 1))
        self.workers = min(workers or share, usable)
        self.stop_early = stop_early
        found = isolation()
        if not found.available:
            if not unsafe:
                raise SandboxError(f"generated programs cannot be isolated: {found.reason}. Remedies: {REMEDY}")
            warnings.warn(f"generated programs run WITHOUT isolation: {found.reason}", stacklevel=2)
        self.bwrap = found.bwrap

    def run(self, programs: Sequence[tuple[str, CodeProblem]]) -> list[Outcome]:
        """Outcomes in the order of the programs."""
        with ThreadPoolExecutor(min(self.workers, max(1, len(programs))), "wpr-programs") as pool:
            try:
                return list(pool.map(self._run, programs))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _run(self, pair: tuple[str, CodeProblem]) -> Outcome:
        program, problem = pair
        with own_processor() as processor:
            if problem.check is not None:
                return self._run_check(program, problem, problem.check, processor)
            return self._run_tests(program, problem, processor)

    def _run_tests(self, program: str, problem: CodeProblem, processor: int | None) -> Outcome:
        results: list[Result] = []
        message = ""
        while len(results) < len(problem.tests):  # a broken sandbox is replaced
            with Sandbox(self.limits, self.bwrap, processor) as sandbox:
                try:
                    compiled, reason = sandbox.prepare(program, problem.fn_name, problem.bare)
                except SandboxTimeoutError:  # time is up is never "does not compile"
                    results = ["timeout" for _ in problem.tests]
                    return Outcome(True, tuple(results), "compiling took too long")
                if not compiled:
                    return Outcome(False, (), _shown(reason))
                whole = True
                while whole and len(results) < len(problem.tests):
                    test = problem.tests[len(results)]
                    result, reason, whole = _judge(
                        partial(sandbox.test, test.given), test, problem.fn_name, self.limits
                    )
                    results.append(result)
                    message = message or _shown(reason)
                    if self.stop_early and result in ("error", "timeout"):
                        results += ["skipped" for _ in problem.tests[len(results) :]]
        return Outcome(True, tuple(results), message)

    def _run_check(self, source: str, problem: CodeProblem, check_source: str, processor: int | None) -> Outcome:
        # On one processor, for they take turns.
        sandboxes = [Sandbox(self.limits, self.bwrap, processor) for _ in range(2)]
        with sandboxes[0] as program, sandboxes[1] as check:
            try:
                compiled, message = program.prepare(source, problem.fn_name, problem.bare, "program")
                if not compiled:
                    return Outcome(False, (), _shown(message))
                compiled, message = check.prepare(check_source, problem.fn_name, problem.bare, "check")
            except SandboxTimeoutError:
                return Outcome(True, ("timeout",), "compiling took too long")
            if not compiled:
                raise ProblemError(
                    f"{problem.problem_id}: its check does not compile ({message}); fix it, or filter it out"
                )
            result, message, _ = _judge(partial(run_check, program, check), PASSES, problem.fn_name, self.limits)
        return Outcome(True, (result,), _shown(message))


def _judge(
    run: Callable[[], tuple[int, str, bytes]], test: Case, fn_name: str | None, limits: Limits
) -> tuple[Result, str, bool]:
    """One test: its result, what to say of it, and whether the sandbox is good for another."""
    try:
        code, message, body = run()
    except SandboxTimeoutError:
        return "timeout", f"no result after {limits.wall_seconds:g} seconds", False
    except SandboxEndedError as error:
        return "error", f"the program broke its sandbox: {error}", False
    if code == FLOODED:
        return "error", f"more than {limits.output_bytes} bytes of output", True
    if code == -SIGXCPU:
        return "timeout", f"more than {limits.cpu_seconds:g} seconds of processor time", True
    if code != 0:
        return "error", message or _ending(code), True
    if fn_name is None:
        return ("pass" if same_output(body.decode("utf-8", "replace"), test.expected) else "fail"), "", True
    try:
        value = read_json(body)
    except (ValueError, RecursionError):
        return "fail", "", True
    return ("pass" if same_value(value, test.expected) else "fail"), "", True


def _ending(code: int) -> str:
    try:
        return f"killed by {Signals(-code).name}"
    except ValueError:
        return f"exit status {code}"


def _shown(text: str) -> str:
    """The end of a program's words, without what would steer a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text[-MESSAGE_LENGTH:])
