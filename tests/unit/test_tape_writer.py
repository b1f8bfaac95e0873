"""The tape's background writer: it writes in order and reports errors."""

from __future__ import annotations

import threading

import pytest

from hang import HANG
from lockstep.errors import Refusal
from lockstep.tape.tape_format import TapeWriter


def test_work_is_done_in_order_and_one_piece_is_held() -> None:
    writer, go = TapeWriter(), threading.Event()
    told: list[int] = []

    def first() -> None:
        go.wait(HANG)
        told.append(1)

    writer.submit(first)
    waiting = threading.Thread(target=lambda: writer.submit(lambda: told.append(2)))
    waiting.start()
    assert told == []
    go.set()
    waiting.join(HANG)
    writer.close()
    assert told == [1, 2]


@pytest.mark.parametrize("where", ["submit", "wait", "close"])
def test_an_error_is_raised_where_the_run_waits_next(where: str) -> None:
    def fail() -> None:
        raise Refusal.at("tape", "the disk is full", code="disk-full")

    writer = TapeWriter()
    writer.submit(fail)
    with pytest.raises(Refusal, match="the disk is full"):
        {"submit": lambda: writer.submit(lambda: None), "wait": writer.wait, "close": writer.close}[where]()
    writer.close()
