"""Logs of every format, with the numbers that stand in them; and logs that are cut, damaged, doubled or something else.

`tests/data/parity/README.md` says where the recorded ones come from.
"""

from __future__ import annotations

import builtins
import json
import math
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.errors import Refusal
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.logs import read_log, read_names
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.metric_names import KINDS, NAMES, map_names
from lockstep.run.metrics import MetricsLog
from refusals import refuses
from work import lines_run

RECORDED = Path(__file__).parents[1] / "data" / "parity"


def recorded(name: str) -> Log:
    return read_log(str(RECORDED / name))


def curve(log: Log, name: str) -> dict[int, float]:
    series = log.metrics[name]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, steps: int = 3, samples: int = 0) -> Path:
    folder.mkdir(parents=True)
    write(folder / "recipe.yaml", "method: sft\nmodel: {path: m}\n")
    write(folder / "env.json", '{"lockstep": "0.1.0"}')
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.append(step, {"train/loss": 1 / step, "train/grad_norm": math.nan})
    lines = [{"step": 0, "kind": "val", "response": "v"}]
    lines += [{"step": 1, "kind": "train", "response": str(i)} for i in range(samples)]
    jsonl(folder / "samples.jsonl", lines)
    return folder


# lockstep -------------------------------------------------------------------------------------------------------------


def test_a_run_folder_brings_its_evidence(tmp_path: Path) -> None:
    log = read_log(str(make_run(tmp_path / "run", samples=25)))
    assert log.kind == "lockstep run"
    assert curve(log, "train/loss") == {1: 1.0, 2: 0.5, 3: 1 / 3}
    assert np.isnan(log.metrics["train/grad_norm"].values).all()
    assert log.written == {"train/loss": "train/loss", "train/grad_norm": "train/grad_norm"}
    assert log.evidence is not None
    assert log.evidence.recipe == {"method": "sft", "model": {"path": "m"}}
    assert log.evidence.env == {"lockstep": "0.1.0"}
    assert [sample["response"] for sample in log.evidence.samples] == [str(i) for i in range(20)]


def test_the_metrics_file_of_a_run_folder_is_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert read_log(str(folder / "metrics.jsonl")).evidence == read_log(str(folder)).evidence


def test_a_damaged_run_folder_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    write(folder / "env.json", '{"lockstep"')
    with refuses("env.json", "unreadable"):
        read_log(str(folder))
    write(folder / "env.json", "{}")
    write(folder / "metrics.jsonl", '{"step": 1, "data": {"a": null}}\n')
    with refuses("metrics.jsonl line 1", "damaged-file"):
        read_log(str(folder))


# Recorded ------------------------------------------------------------------------------------------------------------


def test_verl_console() -> None:
    log = recorded("verl_console.log")
    assert log.kind == "verl console"
    assert log.evidence is None
    # The line of step 3 is cut short: 49 may be the beginning of any number.
    assert curve(log, "critic/rewards/mean") == {1: 0.25, 2: 0.5}
    assert curve(log, "actor/pg_loss") == {1: -0.0625, 2: 1e-05}
    assert curve(log, "actor/lr") == {1: 1e-06, 2: 1e-06}
    assert curve(log, "val-core/openai/gsm8k/reward/mean@1") == {0: 0.125}
    assert math.isnan(curve(log, "actor/grad_norm")[1])
    assert curve(log, "actor/grad_norm")[2] == 0.75
    assert curve(log, "perf/throughput") == {1: 512.5, 2: 500.0}
    assert all(ours == theirs for ours, theirs in log.written.items())


def test_verl_file_logger(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "data": {"val-core/x/acc": 0.5}},
        {"step": 1, "elapsed_seconds": 5.5, "data": {"critic/rewards/mean": 0.25, "note": "text", "on": True}},
        {"step": 2, "data": {"critic/rewards/mean": math.nan, "loss": 3}},
    ]
    log = read_log(jsonl(tmp_path / "experiment.jsonl", rows))
    assert log.kind == "verl file logger"
    assert list(log.metrics) == ["val-core/x/acc", "critic/rewards/mean", "loss"]
    assert curve(log, "critic/rewards/mean")[1] == 0.25
    assert math.isnan(curve(log, "critic/rewards/mean")[2])
    assert curve(log, "loss") == {2: 3.0}  # verl's names are ours: none is translated


def test_openrlhf_bars() -> None:
    """Figures appear while the bar stands at the step before; the second epoch goes on counting."""
    log = recorded("openrlhf_sft.log")
    assert log.kind == "OpenRLHF console"
    loss = curve(log, "train/loss")
    assert {step: loss[step] for step in (1, 2, 3)} == {1: 2.04, 2: 1.79, 3: 1.52}
    assert math.isnan(loss[4])
    assert curve(log, "train/lr") == {1: 0.0, 2: 1.25e-6, 3: 2.5e-6, 4: 5.01e-7}
    assert log.written["train/loss"] == "gpt_loss"


def test_openrlhf_bars_that_count_first(tmp_path: Path) -> None:
    bar = "Train step of epoch 0:  {}%|█| {}/4 [00:01<00:09,  1.20s/it, loss={}, lr=1e-6]\n"
    log = read_log(write(tmp_path / "log.txt", bar.format(25, 1, 0.69) + bar.format(50, 2, 0.5)))
    assert curve(log, "train/loss") == {1: 0.69, 2: 0.5}


def test_openrlhf_ppo() -> None:
    log = recorded("openrlhf_ppo.log")
    assert curve(log, "actor/pg_loss") == {1: 0.012345678, 2: -0.5}
    assert curve(log, "critic/rewards/mean")[1] == 0.25
    assert math.isnan(curve(log, "critic/rewards/mean")[2])
    assert curve(log, "response_length/mean") == {1: 31.5, 2: 30.0}
    assert curve(log, "actor/ppo_kl") == {1: -1e-05, 2: 2e-05}
    assert curve(log, "timing_s/step") == {1: 12.5, 2: 12.0}
    assert curve(log, "critic/vf_loss") == {1: 2.5, 2: 1.5}


def test_openrlhf_statuses_without_a_step_are_counted(tmp_path: Path) -> None:
    text = (
        "(ActorModel pid=7) {'policy_loss': 0.5, 'reward': 1.0}\nother {'a': 1}\n{'policy_loss': 0.25, 'reward': 2}\n"
    )
    log = read_log(write(tmp_path / "out.log", text))
    assert curve(log, "actor/pg_loss") == {1: 0.5, 2: 0.25}
    assert curve(log, "critic/rewards/mean") == {1: 1.0, 2: 2.0}


def test_openrlhf_bars_of_epochs_are_averaged_by_step(tmp_path: Path) -> None:
    bar = "Train epoch [{}/2]:  50%|█| {}/2 [00:01<00:01,  1.00s/it, act_loss={}, reward={}]\n"
    shown = [(1, 0, 1, 4), (1, 1, 3, 4), (2, 0, 5, 4), (2, 1, 7, 4), (1, 0, 10, 8), (1, 1, 20, 8)]
    log = read_log(write(tmp_path / "out.log", "".join(bar.format(*one) for one in shown)))
    assert curve(log, "actor/pg_loss") == {1: (1 + 3 + 5 + 7) / 4, 2: 15.0}
    assert curve(log, "critic/rewards/mean") == {1: 4.0, 2: 8.0}


def test_deepspeed() -> None:
    log = recorded("deepspeed.log")
    assert log.kind == "DeepSpeed console"
    assert curve(log, "train/lr") == {10: 9.5e-06, 20: 8e-06}
    assert curve(log, "skipped") == {10: 1.0, 20: 1.0}
    assert curve(log, "RunningAvgSamplesPerSec") == {10: 25.5, 20: 26.5}
    assert curve(log, "MaxMemAllocated") == {10: 38.49, 20: 38.49}
    assert curve(log, "time_ms/fwd") == {10: 100.25, 20: 101.25}
    assert curve(log, "time_ms/optimizer_step") == {20: 77.19}


def test_trl_sft() -> None:
    log = recorded("trl_sft_trainer_state.json")
    assert log.kind == "transformers trainer state"
    assert curve(log, "train/loss")[1] == 5.744990348815918
    assert len(curve(log, "train/loss")) == 6
    assert curve(log, "val/loss") == {3: 4.2941412925720215, 6: 3.913597822189331}
    assert curve(log, "train/lr")[1] == 1e-4
    assert log.written["val/loss"] == "eval_loss"
    assert log.written["train/lr"] == "learning_rate"
    assert "entropy" in log.metrics  # an offline run has no name for it here


def test_trl_dpo() -> None:
    log = recorded("trl_dpo_trainer_state.json")
    assert curve(log, "train/loss")[1] == pytest.approx(math.log(2), abs=1e-7)
    margin, chosen, rejected = (curve(log, f"train/{name}") for name in ("margin", "chosen", "rejected"))
    assert margin[6] == pytest.approx(chosen[6] - rejected[6], abs=1e-6)
    assert curve(log, "train/pair_accuracy")[6] == 1.0


def test_trl_grpo() -> None:
    log = recorded("trl_grpo_trainer_state.json")
    assert curve(log, "critic/rewards/mean")[1] == 0.2875000238418579
    assert curve(log, "response_length/mean")[1] == 8.0
    assert curve(log, "actor/lr")[1] == 1e-4
    assert "train/lr" not in log.metrics
    assert curve(log, "actor/kl")[2] == 0.014505166560411453
    assert log.written["actor/loss"] == "loss"
    assert log.written["timing_s/step"] == "step_time"


def test_wandb_offline_run() -> None:
    log = recorded("offline-run.wandb")
    assert log.kind == "wandb"
    assert curve(log, "train/loss") == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.2}
    assert np.isnan(log.metrics["bad"].values).all()
    assert set(log.metrics) == {"train/loss", "bad"}


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["step", "global_step", "_step", "Step", "training/global_step"])
def test_csv_and_json_lines_with_a_step_column(tmp_path: Path, column: str) -> None:
    table = write(tmp_path / "a.csv", f"{column},loss,note\n5,0.5,x\n6,,y\n7,nan,z\n")
    lines = jsonl(
        tmp_path / "a.jsonl", [{column: 5, "loss": 0.5}, {column: 6, "loss": None}, {column: 7, "loss": "NaN"}]
    )
    for source in (table, lines):
        loss = curve(read_log(source), "train/loss")
        assert loss.pop(5) == 0.5
        assert math.isnan(loss.pop(7))
        assert not loss


def test_an_epoch_is_no_step(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="supported: a run folder"):
        read_log(write(tmp_path / "a.csv", "epoch,loss\n1,0.5\n"))


def test_a_named_step_goes_before_the_count_of_calls(tmp_path: Path) -> None:
    rows = [{"_step": i, "train/global_step": 10 * (i + 1), "train/loss": i / 2, "_runtime": 1.0} for i in range(3)]
    log = read_log(jsonl(tmp_path / "wandb-history.jsonl", rows))
    assert log.kind == "wandb"
    assert curve(log, "train/loss") == {10: 0.0, 20: 0.5, 30: 1.0}
    assert set(log.metrics) == {"train/loss"}


def test_a_count_of_calls_from_zero_becomes_steps_from_one(tmp_path: Path) -> None:
    rows = [{"_step": i, "loss": float(i)} for i in range(3)]
    assert curve(read_log(jsonl(tmp_path / "a.jsonl", rows)), "train/loss") == {1: 0.0, 2: 1.0, 3: 2.0}
    # ... but not where step 0 is a validation before the first update.
    rows = [{"_step": 0, "acc": 0.5}, {"_step": 1, "loss": 1.0, "lr": 1.0}, {"_step": 2, "loss": 2.0, "lr": 1.0}]
    assert curve(read_log(jsonl(tmp_path / "b.jsonl", rows)), "train/loss") == {1: 1.0, 2: 2.0}


def test_a_chart_exported_from_wandb(tmp_path: Path) -> None:
    text = '"Step","my-run - reward","my-run - reward__MIN","my-run - reward__MAX"\n1,0.5,0.5,0.5\n2,0.75,0.75,0.75\n'
    log = read_log(write(tmp_path / "chart.csv", text))
    assert curve(log, "critic/rewards/mean") == {1: 0.5, 2: 0.75}


def test_a_json_export(tmp_path: Path) -> None:
    log = read_log(
        write(tmp_path / "a.json", json.dumps([{"step": 1, "m": {"loss": 2}}, {"step": 2, "m": {"loss": 1}}]))
    )
    assert curve(log, "m/loss") == {1: 2.0, 2: 1.0}


def test_the_last_value_of_a_repeated_step_counts(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": value} for step, value in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (4, 4.0)]]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert curve(log, "train/loss") == {1: 1.0, 2: 20.0, 3: 3.0, 4: 4.0}
    assert log.metrics["train/loss"].steps.tolist() == [1, 2, 3, 4]


def test_a_half_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    assert curve(read_log(write(tmp_path / "a.csv", "step,loss\n1,0.5\n2,0.2")), "train/loss") == {1: 0.5}
    source = write(tmp_path / "a.jsonl", '{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert curve(read_log(source), "train/loss") == {1: 0.5}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "a.jsonl",
            '{"step": 1, "loss": 1}\n{"step": 2, "lo{"step": 2}\n{"step": 3, "loss": 1}\n',
            (" line 2", "damaged-file"),
        ),
        ("a.csv", "step,loss\n1,0.5\n2\n3,0.5\n", (" line 3", "damaged-file")),
        ("a.jsonl", '{"step": 1, "loss": 1}\n{"step": 1.5, "loss": 1}\n', (" line 2", "not-a-number", "1.5")),
        ("a.jsonl", '{"step": 1, "note": "x"}\n', ("", "no-steps", "jsonl")),
        ("a.log", "hello\n", ("", "unsupported-format")),
        ("a.log", "", ("", "unsupported-format")),
        ("trainer_state.json", '{"log_history": []}', ("", "no-steps")),
        ("trainer_state.json", '{"log_history": [{"loss": 1}]}', (", log_history[0]", "damaged-file", "step")),
    ],
)
def test_what_cannot_be_read_is_refused_by_place(
    tmp_path: Path, name: str, text: str, problem: tuple[str, ...]
) -> None:
    place, *rest = problem
    with refuses(name + place, *rest):
        read_log(write(tmp_path / name, text))


# Folders -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_searched_one_level_deep(tmp_path: Path) -> None:
    write(tmp_path / "config.json", '{"hidden": 64}')
    write(tmp_path / "deep" / "er" / "a.csv", "step,loss\n1,1\n")
    with refuses(str(tmp_path), "unsupported-format"):
        read_log(str(tmp_path))
    write(tmp_path / "logs" / "a.csv", "step,loss\n1,1\n")
    assert curve(read_log(str(tmp_path)), "train/loss") == {1: 1.0}
    write(tmp_path / "b.csv", "step,loss\n1,1\n")
    with refuses(str(tmp_path), "several-candidates", "b.csv, logs/a.csv"):
        read_log(str(tmp_path))


def test_the_last_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:
    for step in (9, 10):
        history = [{"step": i, "loss": float(i)} for i in range(1, step + 1)]
        write(tmp_path / f"checkpoint-{step}" / "trainer_state.json", json.dumps({"log_history": history}))
    assert len(curve(read_log(str(tmp_path)), "train/loss")) == 10
    assert len(curve(read_log(str(tmp_path / "checkpoint-9")), "train/loss")) == 9
    write(tmp_path / "trainer_state.json", json.dumps({"log_history": [{"step": 11, "loss": 1.0}]}))
    assert curve(read_log(str(tmp_path)), "train/loss") == {11: 1.0}


def test_several_run_folders_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert read_log(str(tmp_path)).evidence is not None
    make_run(tmp_path / "b")
    with refuses(str(tmp_path), "several-candidates", "a, b"):
        read_log(str(tmp_path))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with refuses("nothing", "no-such-file"):
        read_log(str(tmp_path / "nothing"))


# tensorboard ---------------------------------------------------------------------------------------------------------


def write_events(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step, values in rows:
            for name, value in values.items():
                writer.add_scalar(name, value, step)


def test_tensorboard_events(tmp_path: Path) -> None:
    write_events(tmp_path / "tb", [(1, {"train/loss": 0.5, "train/learning_rate": 0.25}), (2, {"train/loss": 0.125})])
    (events,) = (tmp_path / "tb").iterdir()
    for source in (tmp_path / "tb", tmp_path, events):
        log = read_log(str(source))
        assert log.kind == "tensorboard"
        assert curve(log, "train/loss") == {1: 0.5, 2: 0.125}
        assert curve(log, "train/lr") == {1: 0.25}


# Several values for one step -----------------------------------------------------------------------------------------


def by_rank(path: Path, blocks: bool, off: float, column: str = "rank") -> str:
    """Forty steps of two ranks, of which rank 0 is `off`; a block a rank, or both ranks of a step after each other."""
    rows = [(rank, step, 1 + step / 100 + (off if rank == 0 else 0)) for rank in (0, 1) for step in range(1, 41)]
    rows = rows if blocks else sorted(rows, key=lambda row: row[1])
    return write(path, f"step,{column},loss\n" + "".join(f"{step},{rank},{loss}\n" for rank, step, loss in rows))


@pytest.mark.parametrize("column", ["rank", "unheard_of"])
@pytest.mark.parametrize("blocks", [False, True])
def test_ranks_that_differ_are_refused(tmp_path: Path, blocks: bool, column: str) -> None:
    """The last rank's values are the same in both files; those of rank 0 are 5 off in one."""
    a, b = (by_rank(tmp_path / f"{name}.csv", blocks, off, column) for name, off in (("a", 0.0), ("b", 5.0)))
    assert compare(read_log(a), read_log(a)).verdict == "in step"
    with refuses("b.csv", "ambiguous-steps", "loss: step 1 has 6.01", "and 1.01"):
        compare(read_log(a), read_log(b))


def test_an_ambiguous_unjudged_metric_is_left_out_and_reported(tmp_path: Path) -> None:
    rows = [{"step": step, "rank": rank, "loss": 1.0, "speed": rank} for step in range(1, 11) for rank in (1, 2)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    got = compare(log, log)
    assert [metric.name for metric in got.metrics if metric.name == "speed"] == []
    assert any(remark.startswith("speed: ") for remark in got.unknown)


@pytest.mark.parametrize(
    "steps",
    [
        [*range(1, 51), *range(41, 61)],  # resumed at a checkpoint
        [*range(1, 51), *range(41, 46), *range(41, 101)],  # died again before it got as far
        [1, 2, 3, *range(1, 30)],  # died before its first checkpoint, and began anew
        [*range(1, 51), 50, 51, 51, 52],  # continued at the step that it had just logged
        [*range(1, 101), *range(91, 101)],  # the last steps once more
        sorted([*range(1, 101), 20, 40, 60, 80]),  # saved at every step, and preempted four times
    ],
)
def test_a_resumed_run_may_log_a_step_again(tmp_path: Path, steps: list[int]) -> None:
    rows = [{"step": step, "loss": 1 + index / 1000} for index, step in enumerate(steps)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.ambiguous == {}
    last = {step: 1 + index / 1000 for index, step in enumerate(steps)}
    assert log.metrics["train/loss"].values.tolist() == [last[step] for step in sorted(last)]


def test_tensorboard_of_a_resumed_run(tmp_path: Path) -> None:
    write_events(tmp_path, [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0})])
    time.sleep(1.1)  # event files are named, and ordered, by the second
    write_events(tmp_path, [(3, {"a": 30.0}), (4, {"a": 4.0})])
    assert len(list(tmp_path.iterdir())) == 2
    assert curve(read_log(str(tmp_path)), "a") == {1: 1.0, 2: 2.0, 3: 30.0, 4: 4.0}


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(tmp_path, [(1, {"a": 1.0})])
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(Refusal, match=r"install .*\[track\]"):
        read_log(str(tmp_path))


# wandb's records -----------------------------------------------------------------------------------------------------


# Not looked at; any number that is not zero, which an unused block would have.
CHECKSUM = 0x01010101


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def message(*fields: tuple[int, int, bytes]) -> bytes:
    """Fields as (number, wire type, payload)."""
    return b"".join(
        varint(number << 3 | kind) + (varint(len(data)) if kind == 2 else b"") + data for number, kind, data in fields
    )


def test_wandb_records_over_blocks_and_typed_numbers(tmp_path: Path) -> None:
    """A record over three blocks, numbers that are not JSON, and a block's end too short for a header."""

    def item(name: str, kind: int, number: int, data: bytes) -> tuple[int, int, bytes]:
        return 1, 2, message((2, 2, name.encode()), (number, kind, data))

    def record(step: int, filler: int) -> bytes:
        zigzag = varint(2 * step)
        pad = item("text", 2, 16, b'"' + b"x" * filler + b'"')
        loss = item("loss", 1, 6, struct.pack("<d", step / 4))
        return message((2, 2, message(item("global_step", 0, 5, zigzag), pad, loss)))

    def padded(to: int) -> bytes:
        """A record of exactly `to` bytes."""
        filler = to - len(record(2, 0))
        while len(record(2, filler)) > to:
            filler -= 1
        assert len(record(2, filler)) == to
        return record(2, filler)

    long, content = record(1, 70_000), b":W&B\xe1\xbe\x00"
    kinds = [2, 3, 4]
    for kind in kinds:
        room = 32768 - len(content) % 32768 - 7
        piece, long = long[:room], long[room:]
        content += struct.pack("<IHB", CHECKSUM, len(piece), kind) + piece
    assert not long
    # This record leaves 3 bytes in its block: no header fits, and they are filled with zeros.
    content += struct.pack("<IHB", CHECKSUM, size := 32768 - len(content) % 32768 - 7 - 3, 1) + padded(size) + b"\0\0\0"
    last = record(3, 1)
    content += struct.pack("<IHB", CHECKSUM, len(last), 1) + last
    path = tmp_path / "run.wandb"
    path.write_bytes(content)
    log = read_log(str(path))
    assert curve(log, "train/loss") == {1: 0.25, 2: 0.5, 3: 0.75}


def test_a_damaged_wandb_record_is_named_by_its_number(tmp_path: Path) -> None:
    def record(content: bytes) -> bytes:
        return struct.pack("<IHB", CHECKSUM, len(content), 1) + content

    step = message((2, 2, b"global_step"), (5, 0, varint(2)))
    good = message((2, 2, message((1, 2, step))))
    broken = message((2, 2, b"\x0a\x7f"))  # a history whose first item is longer than all that is left
    path = tmp_path / "run.wandb"
    path.write_bytes(b":W&B\xe1\xbe\x00" + record(good) + record(good) + record(broken))
    with refuses("run.wandb record 3", "damaged-file"):
        read_log(str(path))


# Names ---------------------------------------------------------------------------------------------------------------


def test_the_callers_names_go_first(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"step": 1, "loss": 1.0, "mine": 2.0}])
    log = read_log(source, {"mine": "train/loss"})
    assert log.written == {"train/loss": "loss", "mine": "mine"}  # the first gets the name, the other keeps its name
    log = read_log(source, {"mine": "train/loss", "loss": "other"})
    assert log.written == {"other": "loss", "train/loss": "mine"}
    assert curve(log, "train/loss") == {1: 2.0}


def test_two_names_for_one_metric() -> None:
    assert map_names(["loss", "gpt_loss"], False, {}) == {"train/loss": "loss", "gpt_loss": "gpt_loss"}
    # A metric that is already called so keeps its name, wherever it stands.
    assert map_names(["loss", "train/loss"], False, {}) == {"loss": "loss", "train/loss": "train/loss"}
    assert map_names(["x", "y"], False, {"x": "y"}) == {"x": "x", "y": "y"}


def test_validation_names() -> None:
    written = map_names(["eval_loss", "eval/rewards/margins", "eval_runtime", "train/learning_rate"], False, {})
    assert list(written) == ["val/loss", "val/margin", "eval_runtime", "train/lr"]


def test_names_depend_on_what_is_trained() -> None:
    assert list(map_names(["loss", "kl", "acc"], False, {})) == ["train/loss", "kl", "train/pair_accuracy"]
    assert list(map_names(["kto_loss", "kl"], False, {})) == ["train/loss", "train/kl"]
    assert list(map_names(["prm_loss", "acc"], False, {})) == ["train/loss", "train/step_accuracy"]
    assert list(map_names(["train/reward", "train/kl", "loss"], False, {})) == [
        "critic/rewards/mean",
        "actor/kl",
        "actor/loss",
    ]
    assert list(map_names(["loss", "reward"], True, {})) == ["loss", "reward"]


def test_the_tables_lead_to_names_that_our_runs_write() -> None:
    groups = ("train/", "actor/", "critic/", "response_length/", "timing_s/", "training/")
    for table in (NAMES, *KINDS.values()):
        assert all(ours.startswith(groups) for ours in table.values())
    assert all(mark in KINDS[mark] or mark == "logps/KL" for mark in KINDS)


def test_a_table_of_names(tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    write(path, "my_loss: train/loss\n'x y': actor/kl\n")
    assert read_names(path) == {"my_loss": "train/loss", "x y": "actor/kl"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n- b\n", ("", "empty-value")),
        ("", ("", "empty-value")),
        ("a: [", ("", "invalid-yaml")),
        ("a: 1\n", (", 'a'", "wrong-type", "1")),
        ("1: a\n", (", 1", "wrong-type", "'a'")),
        ("a: ''\n", (", 'a'", "wrong-type", "''")),
    ],
)
def test_a_bad_table_of_names_is_refused(tmp_path: Path, text: str, problem: tuple[str, ...]) -> None:
    place, *rest = problem
    with refuses(f"names.yaml{place}", *rest):
        read_names(write(tmp_path / "names.yaml", text))


def test_a_missing_table_of_names_is_refused(tmp_path: Path) -> None:
    with refuses("names.yaml", "unreadable"):
        read_names(tmp_path / "names.yaml")


# Size, and damage ----------------------------------------------------------------------------------------------------


def test_a_long_log_is_read_once_with_little_work_per_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"group/metric_{i}" for i in range(50)]
    draw = np.random.default_rng(0).random((2_000, 50)).tolist()
    rows = [{"step": step, "data": dict(zip(names, values, strict=True))} for step, values in enumerate(draw, 1)]
    long, short = jsonl(tmp_path / "long.jsonl", rows), jsonl(tmp_path / "short.jsonl", rows[:300])
    log = read_log(long)
    assert len(log.metrics) == 50
    assert len(log.metrics[names[7]].steps) == 2_000
    assert log.metrics[names[7]].values[123] == draw[123][7]
    # A number costs the five lines of `Points.add`, and a row some more.
    assert lines_run(lambda: read_log(short)) < 6 * 300 * 50
    read_bytes, opened = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read_bytes(path))
    assert read_log(short).metrics.keys() == log.metrics.keys()
    assert opened == [Path(short)]


def a_csv(folder: Path) -> Path:
    return Path(write(folder / "a.csv", "step,loss\n" + "".join(f"{i},{i / 8}\n" for i in range(1, 9))))


def a_jsonl(folder: Path) -> Path:
    return Path(jsonl(folder / "a.jsonl", [{"step": i, "loss": i / 8, "x": {"y": "NaN"}} for i in range(1, 9)]))


def some_events(folder: Path) -> Path:
    write_events(folder / "tb", [(i, {"a": float(i)}) for i in range(1, 9)])
    return next((folder / "tb").iterdir())


SOURCES: list[Callable[[Path], Path]] = [a_csv, a_jsonl, some_events]
KEPT = [file for file in sorted(RECORDED.iterdir()) if file.suffix != ".md"]
LAST = len(KEPT) + len(SOURCES) - 1


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("originals")
    return [*KEPT, *(make(folder) for make in SOURCES)]


def read_or_refuse(path: Path) -> Log | None:
    try:
        return read_log(str(path))
    except Refusal:
        return None


@settings(max_examples=draws(80, 200))
@given(which=st.integers(0, LAST), share=st.floats(0, 1))
def test_a_log_cut_anywhere_is_read_or_refused(originals: list[Path], tmp_path: Path, which: int, share: float) -> None:
    """The numbers of a cut log are among those of the complete log."""
    original = originals[which]
    content = original.read_bytes()
    cut = tmp_path / original.name
    cut.write_bytes(content[: int(share * len(content))])
    log = read_or_refuse(cut)
    # Cut before its first status, a log of OpenRLHF has only its bars to tell, which are less exact.
    if log is None or "act_loss" in log.written.values():
        return
    complete = read_log(str(original))
    assert log.kind == complete.kind
    # By the names in the file: a log that is cut before its rewards has names of another kind of training.
    named = {written: name for name, written in complete.written.items()}
    for name, series in log.metrics.items():
        expected = curve(complete, named.get(log.written.get(name, name), name))
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            assert value == expected[step] or (math.isnan(value) and math.isnan(expected[step]))


@settings(max_examples=draws(80, 200))
@given(which=st.integers(0, LAST), place=st.floats(0, 1), junk=st.binary(min_size=1, max_size=6))
def test_a_damaged_log_is_read_or_refused(
    originals: list[Path], tmp_path: Path, which: int, place: float, junk: bytes
) -> None:
    original = originals[which]
    content = bytearray(original.read_bytes())
    at = int(place * len(content))
    content[at : at + len(junk)] = junk
    damaged = tmp_path / original.name
    damaged.write_bytes(bytes(content))
    read_or_refuse(damaged)


@settings(max_examples=60)
@given(share=st.floats(0, 1), file=st.sampled_from(["metrics.jsonl", "env.json", "recipe.yaml", "samples.jsonl"]))
def test_a_cut_run_folder_is_read_or_refused(tmp_path: Path, share: float, file: str) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    make_run(folder, samples=3)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(share * len(content))])
    read_or_refuse(folder)
