"""How uneven the ranks' generation was."""

from __future__ import annotations

from lockstep.train.monitor import straggler_metrics


def test_the_slowest_over_the_mean_and_what_was_taken() -> None:
    assert straggler_metrics([(3.0, 0), (1.0, 2), (2.0, 1)]) == {
        "perf/gen_straggler": 1.5,
        "perf/gen_taken_prompts": 3.0,
    }
    assert straggler_metrics([(3.0, 0)]) == {}
