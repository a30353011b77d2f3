"""Generated programs scored a second, in sandboxes, beside a bare ``python -c`` for each test.

    python -m benchmarks.code_rewards [--programs 200] [--tests 5] [--workers 2]

The bare interpreter isolates nothing, limits nothing and compares nothing; it shows what starting one costs. Both take
turns in blocks of programs within one run: whatever slows the machine down for a while does so for both.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from wpr.rewards.code import Case, CodeProblem, Runner, isolation
from wpr.rewards.code.sandbox import base_executable

BLOCKS = 10
READS = """
import sys
from collections import Counter

def main():
    data = list(map(int, sys.stdin.read().split()))
    print(sum(data), max(Counter(data).values()))

main()
"""
SORTS = """
numbers = list(map(int, input().split()))
for i in range(len(numbers)):
    for j in range(i):
        if numbers[i] < numbers[j]:
            numbers[i], numbers[j] = numbers[j], numbers[i]
print(*numbers)
"""
WRONG = "print(len(input()))"
METHOD = """
class Solution:
    def total(self, numbers: List[int]) -> int:
        return sum(numbers)
"""


def programs(count: int, tests: int) -> list[tuple[str, CodeProblem]]:
    """Four kinds in turn: two that pass, one that gives a wrong answer, one with a method. All run all their tests."""
    lists = [[(7 * i + 3 * test) % 50 for i in range(40)] for test in range(tests)]
    texts = [" ".join(map(str, numbers)) for numbers in lists]
    totals = [f"{sum(numbers)} {max(map(numbers.count, numbers))}" for numbers in lists]
    ordered = [" ".join(map(str, sorted(numbers))) for numbers in lists]
    reading = CodeProblem(tuple(map(Case, texts, totals)))
    sorting = CodeProblem(tuple(map(Case, texts, ordered)))
    method = CodeProblem(tuple(Case([numbers], sum(numbers)) for numbers in lists), "total")
    kinds = [(READS, reading), (SORTS, sorting), (WRONG, sorting), (METHOD, method)]
    return [kinds[i % len(kinds)] for i in range(count)]


def bare(pair: tuple[str, CodeProblem]) -> None:
    """One interpreter a test, with nothing around it; a method is left uncalled."""
    program, problem = pair
    for case in problem.tests:
        given, source = (
            (case.given, program) if problem.fn_name is None else ("", "from typing import List\n" + program)
        )
        subprocess.run(
            [base_executable(), "-I", "-S", "-c", source], input=given, text=True, capture_output=True, check=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--tests", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(isolation().reason)
    work = programs(options.programs, options.tests)
    runner = Runner(workers=options.workers)
    seconds = {"sandbox": 0.0, "bare": 0.0}
    passed = 0
    size = -(-len(work) // BLOCKS)
    with ThreadPoolExecutor(options.workers) as pool:
        for block in (work[start : start + size] for start in range(0, len(work), size)):
            start = time.perf_counter()
            outcomes = runner.run(block)
            seconds["sandbox"] += time.perf_counter() - start
            assert all(result in ("pass", "fail") for outcome in outcomes for result in outcome.results), outcomes
            passed += sum(outcome.passed for outcome in outcomes)
            start = time.perf_counter()
            list(pool.map(bare, block))
            seconds["bare"] += time.perf_counter() - start
    count = options.programs * options.tests
    print(f"{options.programs} programs x {options.tests} tests, {options.workers} workers; {passed} programs passed")
    print(f"{'':24}{'tests/s':>10}{'seconds':>10}")
    for name, taken in seconds.items():
        print(f"{name:24}{count / taken:10.0f}{taken:10.1f}")
    print(f"sandbox / bare interpreter: {seconds['bare'] / seconds['sandbox']:.2f} times the tests a second")


if __name__ == "__main__":
    main()
