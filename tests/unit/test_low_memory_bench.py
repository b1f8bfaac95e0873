"""bench/low_memory.py: its goals are judged, a part that was stopped goes on, and tiny cases run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import low_memory
from low_memory import ACROSS, CALLS, CASES, PARTS, SIDES, Goal, ratio


def test_every_case_belongs_to_a_part_and_every_goal_to_its_cases() -> None:
    measured = [case for part in PARTS.values() for case in part.cases]
    assert len(set(measured)) == len(measured)
    assert set(measured) == {*CASES, *CALLS, *SIDES, *low_memory.TRL_SETTINGS}
    for part in PARTS.values():
        assert all(set(goal.cases) <= set(part.cases) for goal in part.goals)
    assert {case for goal in ACROSS for case in goal.cases} <= set(SIDES)


@pytest.mark.parametrize(("speed", "met"), [(74.0, False), (75.0, True), (200.0, True)])
def test_a_goal_is_met_at_its_bound(speed: float, met: bool) -> None:
    found = {"a": {"tokens_per_second": speed}, "b": {"tokens_per_second": 100.0}}
    told = Goal("a over b", ("a", "b"), ratio("a", "b"), at_least=0.75).judged(found)
    assert told == {"goal": "a over b", "at_least": 0.75, "value": speed / 100, "met": met}


def test_a_goal_without_its_numbers_is_not_met() -> None:
    peak = Goal("peak", ("a",), low_memory.peak("a"), at_most=10)
    for found in ({}, {"a": {"error": "out of memory"}}):
        assert (peak.judged(found)["met"], peak.judged(found)["without"]) == (False, ["a"])
    assert peak.judged({"a": {"tokens_per_second": 1.0}})["without"] == ["measured_gb"]


def test_numbers_of_other_benchmarks_are_read() -> None:
    works = {"w": {"fp8": {"ratio": 1.5}}, "v": {"fp8": {"ratio": 1.3}}}
    assert low_memory.engine_ratio("e", "fp8")({"e": {"shapes": {"7b": works}}}) == 1.3
    fit: dict[str, Any] = {"plan-fit": {"results": [{"ratio": 0.93}, {"ratio": 1.05}]}}
    assert low_memory.worst_of_fit(fit) == pytest.approx(0.07)
    fit["plan-fit"]["results"].append({"error": "out of memory"})
    assert low_memory.worst_of_fit(fit) == float("inf")
    losses = {"a": {"train/loss": [2.0, 1.0]}, "b": {"train/loss": [2.0, 1.06]}}
    assert low_memory.loss_error("a", "b")(losses) == pytest.approx(3.0)


def test_a_part_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def answer(name: str, args: Namespace, seconds: float) -> dict[str, Any]:
        calls.append(name)
        return {"error": "stopped"} if name == "fp8-7b" and len(calls) < 3 else {"tokens_per_second": 5.0 + len(calls)}

    monkeypatch.setattr(low_memory, "in_own_process", answer)
    words = ["low_memory.py", "fp8", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--budget"]
    monkeypatch.setattr(sys, "argv", [*words, "1e9"])
    low_memory.main()
    assert calls == ["bf16-7b", "fp8-7b"]
    monkeypatch.setattr(sys, "argv", [*words, "0"])
    low_memory.main()
    assert calls == ["bf16-7b", "fp8-7b"]  # the time is over
    assert "call again" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words, "1e9"])
    low_memory.main()
    assert calls == ["bf16-7b", "fp8-7b", "fp8-7b"]
    speed, losses = json.loads((tmp_path / "fp8.json").read_text())["goals"]
    assert (speed["value"], speed["met"]) == (8.0 / 6.0, True)
    assert losses["without"] == ["train/loss"]


def test_a_case_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(low_memory, "command_of", lambda *_: command)
    found = low_memory.in_own_process("fp8-7b", Namespace(), 0.1)
    assert "not finished" in found["error"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rollouts", "grpo", "long", "fp8", "dtypes", "fit"])
def test_tiny_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    words = [part, "--device", "cpu", "--tiny", "--out", str(tmp_path), "--budget", "1e6"]
    monkeypatch.setattr(sys, "argv", ["low_memory.py", *words])
    low_memory.main()
    record = json.loads((tmp_path / f"{part}.json").read_text())
    assert set(record["cases"]) == set(PARTS[part].cases)
    assert not [case["error"] for case in record["cases"].values() if "error" in case]
    if part == "rollouts":
        assert all(goal["value"] > 0 for goal in record["goals"])
