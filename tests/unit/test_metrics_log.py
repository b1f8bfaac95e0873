import json
import math
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.run.metrics import MetricsLog, Phases, read_metrics, rewind_lines
from refusals import refuses


def bits(value: float) -> bytes:
    # One NaN is as good as another; the sign of zero is not.
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append(step, {"train/loss": 1 / step})
    return log


def test_a_line_is_in_the_form_that_verl_writes(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(7, {"train/loss": 0.1, "train/tokens": 12})
    assert log.path.read_text() == '{"step": 7, "data": {"train/loss": 0.1, "train/tokens": 12.0}}\n'


@settings(max_examples=draws(20, 50))
@given(st.dictionaries(st.text(), st.floats()))
def test_floats_come_back_bit_for_bit(tmp_path: Path, metrics: dict[str, float]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    MetricsLog(path).append(1, metrics)
    [(step, read)] = read_metrics(path)
    assert step == 1
    assert {name: bits(value) for name, value in read.items()} == {name: bits(value) for name, value in metrics.items()}


def test_not_a_number_is_still_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    data = json.loads(path.read_text(), parse_constant=refuse)["data"]
    assert data == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    [(_, read)] = read_metrics(path)
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_a_torn_last_line_is_passed_over_wherever_it_was_cut(log: MetricsLog) -> None:
    whole = log.path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        log.path.write_bytes(whole[:cut])
        assert [step for step, _ in read_metrics(log.path)] == [1, 2]


def test_damage_elsewhere_is_refused_with_the_line(log: MetricsLog) -> None:
    log.path.write_bytes(log.path.read_bytes().replace(b'{"step": 2', b'{"stp": 2'))
    with refuses("metrics.jsonl line 2", "damaged-file"):
        read_metrics(log.path)


@pytest.mark.parametrize("torn", [b"", b'{"step": 4, "da'])
def test_rewind_forgets_later_steps_and_keeps_the_bytes_of_the_others(log: MetricsLog, torn: bytes) -> None:
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + torn)
    log.rewind(2)
    assert log.path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    log.append(3, {"train/loss": 0.5})
    assert read_metrics(log.path)[-1] == (3, {"train/loss": 0.5})
    log.rewind(-1)
    assert log.path.read_bytes() == b""


def test_rewind_of_a_log_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    rewind_lines(tmp_path / "samples.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_steps_only_go_up_also_in_a_new_process(log: MetricsLog) -> None:
    for writer in (log, MetricsLog(log.path)):
        with pytest.raises(ValueError, match="already has step 3"):
            writer.append(3, {})
    assert len(read_metrics(log.path)) == 3


def test_append_after_a_torn_line_asks_for_a_rewind(log: MetricsLog) -> None:
    log.path.write_bytes(log.path.read_bytes() + b'{"st')
    with pytest.raises(ValueError, match="rewind before appending"):
        MetricsLog(log.path).append(4, {})


def test_phases_add_up_and_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    synchronised = []
    phases = Phases(lambda: synchronised.append(now))
    for seconds in (2.0, 3.0):
        with phases("update_actor"):
            now += seconds
    try:
        with phases("gen"):
            now += 1.0
            raise ZeroDivisionError
    except ZeroDivisionError:
        now += 7.0
    assert phases.take() == {"timing_s/update_actor": 5.0, "timing_s/gen": 1.0}
    assert phases.take() == {}
    assert synchronised == [100.0, 102.0, 102.0, 105.0, 105.0]
