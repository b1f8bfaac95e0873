"""`bench/environments.py`: its source of turns is one that the engine knows."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from lockstep.rollout.engine import Conversations

FILE = Path(__file__).parents[2] / "bench" / "environments.py"
# A folder of tests has the same name, so the file is loaded under another one.
sys.path.insert(0, str(FILE.parent))
SPEC = spec_from_file_location("turn_bench", FILE)
assert SPEC is not None
assert SPEC.loader is not None
environments: Any = module_from_spec(SPEC)
sys.modules["turn_bench"] = environments  # dataclasses look their module up
SPEC.loader.exec_module(environments)


def test_turns_of_the_benchmark_are_conversations() -> None:
    """Otherwise the engine would generate nothing, and the benchmark would measure 0 tokens."""
    work = [environments.Trajectory([1, 2], [3, 3], [[4]], [0.0])]
    source = environments.Source(None, work)
    assert isinstance(source, Conversations)
    assert source.more
    assert [request.ids for request in source.take(4)] == [[1, 2]]
    source.open[0].done = 2
    assert not source.more
