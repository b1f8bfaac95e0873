"""Time that is set aside belongs to no phase around it."""

from __future__ import annotations

import time

import pytest

from lockstep.run.metrics import Phases


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_what_is_set_aside_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, phases = Clock(monkeypatch), Phases()
    with phases("step"):
        clock.now += 1
        with phases.aside("tape"):
            clock.now += 10
        with phases("update_actor"):
            clock.now += 2
            with phases.aside("tape"):
                clock.now += 20
            clock.now += 3
    assert phases.take() == {"timing_s/step": 6.0, "timing_s/update_actor": 5.0, "timing_s/tape": 30.0}
    # The next step owes nothing to the one before.
    with phases("step"):
        clock.now += 4
    assert phases.take() == {"timing_s/step": 4.0}
