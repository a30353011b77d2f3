"""Running a coroutine from code that has none: with signals that end it cleanly, and where a loop runs already."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Work = Callable[[], Coroutine[Any, Any, None]]
ENDING = (signal.SIGINT, signal.SIGTERM)


def run_to_the_end(work: Work) -> None:
    """Run it here, or in a thread of its own where this one has an event loop already, as notebooks have."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: asyncio.run(_noted(work, running)))
        try:
            done.result()
        except BaseException:
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # it has ended, and this is its error
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _run_here(work: Work) -> None:
    """A handler of signals that raises would do so within whatever the loop is at, and leave tasks behind. So while it
    runs a signal cancels the work, and the handler is called when that has ended.
    """
    came: list[int] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    def cancel(number: int) -> None:
        came.append(number)
        running[0][1].cancel()

    async def interruptible() -> None:
        with _handled(cancel):
            await _noted(work, running)

    try:
        asyncio.run(interruptible())
    except asyncio.CancelledError:
        if not came:
            raise
    for number in came[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(cancel: Callable[[int], None]) -> Iterator[None]:
    """Signals call ``cancel``, in the loop; only where there are handlers of Python's to stand in for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in ENDING}
    replaced = [number for number, handler in before.items() if callable(handler)]
    for number in replaced:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    finally:
        for number in replaced:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


async def _noted(work: Work, running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]) -> None:
    task = asyncio.current_task()
    assert task is not None
    running.append((asyncio.get_running_loop(), task))
    await work()
