"""Work by several threads: its order, its errors, and that nothing goes on after an interrupt."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType
from typing import Any

import pytest

from deltackpt import pool as module
from deltackpt.errors import FormatError
from deltackpt.pool import in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads: int) -> None:
    assert list(in_order(lambda x: x * x, range(100), threads)) == [x * x for x in range(100)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_error_is_raised_after_all_that_was_begun_has_ended(threads: int) -> None:
    begun, ended = [], []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise FormatError("three")
        ended.append(item)
        return item

    with pytest.raises(FormatError, match="three"):
        list(in_order(work, range(100), threads))
    assert sorted(ended) == sorted(set(begun) - {3})
    assert len(begun) < 20


class Stop(BaseException):
    """What a signal handler raises."""


def at_line(code: CodeType, number: int, last: int) -> tuple[Callable[..., Any], list[int]]:
    """Return a trace function that raises at the n-th line before `last` that is reached, and these lines."""
    seen: list[int] = []

    def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno < last:
            seen.append(frame.f_lineno)
            if len(seen) == number:
                raise Stop
        return trace

    return trace, seen


@pytest.mark.parametrize("function", [in_order, module._first])
def test_nothing_is_under_way_wherever_a_signal_handler_raises(function: Callable[..., Any]) -> None:
    """An exception between two lines left a piece of work running, in memory that was given back."""
    lines, start = inspect.getsourcelines(function)
    # Between the end of the work and the loop that waits for it no signal is looked at.
    last = start + next((n for n, line in enumerate(lines) if line.strip() == "finally:"), len(lines))
    with ThreadPoolExecutor(2) as pool:
        number = 0
        while True:
            number += 1
            running, begun, ended, gate = [], [], [], threading.Event()

            def work(
                item: int,
                running: list[int] = running,
                begun: list[int] = begun,
                ended: list[int] = ended,
                gate: threading.Event = gate,
            ) -> int:
                begun.append(item)
                running.append(item)
                if item >= 4:
                    gate.wait(0.01)  # under way when the exception comes
                running.remove(item)
                ended.append(item)
                return item

            trace, seen = at_line(function.__code__, number, last)
            sys.settrace(trace)
            try:
                with contextlib.suppress(Stop):
                    assert list(in_order(work, range(8), 2, pool=pool)) == list(range(8))
            finally:
                sys.settrace(None)
            assert running == [], seen
            before = list(begun)
            for future in [pool.submit(int) for _ in range(4)]:
                future.result()
            assert begun == before, seen
            assert sorted(begun) == sorted(ended)
            if len(seen) < number:
                break
    assert number > 8


def test_interrupt_of_one_who_waits_comes_after_the_work_has_ended() -> None:
    handled, left, ended = threading.Event(), threading.Event(), []

    def handler(_number: int, _frame: object) -> None:
        # One that comes just before a thread begins to wait does not wake it: it is sent until it is seen.
        if not handled.is_set():
            handled.set()
            raise Stop

    def work(item: int) -> None:
        if item == 0:
            while not handled.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            # Long enough for one who does not wait; one who waits cannot let this end sooner.
            ended.append(not left.wait(0.2))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Stop):
            list(in_order(work, range(3), 2))
        left.set()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [True]
