"""Logs of LLaMA-Factory, ms-swift, Megatron and MindSpeed, and tensorboard's csv export: complete, cut and damaged.

`tests/data/parity/README.md` says where the recorded lines come from. Their numbers stand in the files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lockstep.errors import Refusal
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.logs.console_logs import decoded
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.log_formats import matching_formats
from lockstep.parity.compare.logs.metric_names import name_of_file
from refusals import refuses

RECORDED = Path(__file__).parents[1] / "data" / "parity"


def recorded(name: str) -> Log:
    return read_log(str(RECORDED / name))


def curve(log: Log, name: str) -> dict[int, float]:
    series = log.metrics[name]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def changed(tmp_path: Path, name: str, old: str, new: str) -> str:
    """A recorded log with one place written otherwise."""
    text = (RECORDED / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    copy = tmp_path / name
    copy.write_text(text.replace(old, new), encoding="utf-8")
    return str(copy)


# Each format ---------------------------------------------------------------------------------------------------------


def test_llamafactory() -> None:
    log = recorded("llamafactory_trainer_log.jsonl")
    assert log.kind == "LLaMA-Factory log"
    assert curve(log, "train/loss") == {5: 5.75, 10: 4.169, 15: 1.25}
    assert curve(log, "train/lr") == {5: 1.0000000000000002e-06, 10: 2.25e-06, 15: 3.5e-06}
    assert curve(log, "val/loss") == {10: 3.5}
    assert "percentage" not in log.metrics
    assert log.means is not None
    assert "train/loss" in log.means
    assert not {"train/lr", "val/loss", "train/epoch"} & log.means


def test_swift() -> None:
    """The last line repeats the history at one step: nothing is read from it."""
    log = recorded("swift_logging.jsonl")
    assert log.kind == "ms-swift log"
    assert curve(log, "train/loss") == {1: 2.5, 5: 1.75, 10: 1.25}
    assert curve(log, "train/grad_norm") == {1: 4.25, 5: 2.125, 10: 1.5}
    assert curve(log, "token_acc") == {1: 0.5, 5: 0.625, 10: 0.75}
    assert curve(log, "val/loss") == {5: 1.5}
    assert "best_metric" not in log.metrics
    assert log.means is not None
    assert {"train/loss", "token_acc"} <= log.means
    assert not {"train/grad_norm", "train_loss", "val/loss"} & log.means


def test_swift_on_megatron() -> None:
    log = recorded("swift_megatron_logging.jsonl")
    assert log.kind == "ms-swift log"
    assert curve(log, "train/loss") == {5: 3.25, 10: 2.75, 15: 2.5}  # the last one is written as a text
    assert curve(log, "val/loss") == {10: 2.625}


@pytest.mark.parametrize("name", ["megatron.log", "megatron_utf16.log"])
def test_megatron(name: str) -> None:
    log = recorded(name)
    assert log.kind == "Megatron console"
    assert curve(log, "train/loss") == {10: 8.125, 20: 7.5, 30: 7.0}
    assert curve(log, "train/lr") == {10: 1.462e-4, 20: 1.4e-4, 30: 1e-4}
    norms = curve(log, "train/grad_norm")
    assert (norms[10], norms[30]) == (6.753, 3.25)
    assert math.isnan(norms[20])
    assert curve(log, "val/loss") == {20: 7.375, 30: 6.875}
    assert curve(log, "test/lm loss") == {30: 6.9375}
    assert curve(log, "elapsed time per iteration (ms)") == {10: 974.9, 20: 950.0, 30: 951.5}
    assert curve(log, "number of skipped iterations") == {10: 0.0, 20: 1.0, 30: 0.0}
    assert log.means == {"train/loss", "elapsed time per iteration (ms)"}


def test_mindspeed_llm() -> None:
    log = recorded("mindspeed_llm.log")
    assert log.kind == "Megatron console"
    assert curve(log, "train/loss") == {1: 10.45013, 2: 10.4456}
    assert curve(log, "train/grad_norm") == {1: 35.543, 2: 35.57}
    # Of two times the second is the mean of the last iterations.
    assert curve(log, "elapsed time per iteration (ms)") == {1: 33186.0, 2: 25879.2}


def test_mindspeed_mm() -> None:
    log = recorded("mindspeed_mm.log")
    assert log.kind == "Megatron console"
    assert curve(log, "train/loss") == {3: 10.44, 4: 10.4375}
    assert curve(log, "consumed samples") == {3: 384.0, 4: 512.0}


def test_mindspeed_rl() -> None:
    log = recorded("mindspeed_rl.log")
    assert log.kind == "MindSpeed-RL console"
    assert curve(log, "critic/rewards/mean") == {1: 0.375, 2: 0.5}
    assert curve(log, "actor/pg_loss") == {1: 0.0312, 2: -0.0156}
    assert curve(log, "actor/grad_norm") == {1: 0.25, 2: 0.3125}
    assert curve(log, "timing_s/step") == {1: 210.5, 2: 200.0}
    assert curve(log, "response_length/mean") == {1: 512.5, 2: 500.0}


@pytest.mark.parametrize("method", ["ppo", "dapo"])
def test_mindspeed_rl_with_other_methods(tmp_path: Path, method: str) -> None:
    """As `loggers.py` of MindSpeed-RL writes them now: after the prefix of logging, and rates as 1e-06."""
    source = tmp_path / "run.log"
    source.write_text(
        "".join(
            f"2025-09-01 10:0{step}:00,123 - INFO - [2025-09-01 10:0{step}:00] iteration: {step} / 100 | timing/all : "
            f"{200 + step}.0000 | actor/pg_loss : 0.0{step}00 | grad_norm : 0.2500 | {method}/lr : 1.000000e-06 | "
            f"acc_rewards/mean : 0.5000 | {method}/score/mean : 0.{step}250 | {method}/rewards/mean : 0.{step}500 \n"
            for step in (1, 2)
        )
    )
    log = read_log(str(source))
    assert log.kind == "MindSpeed-RL console"
    assert curve(log, "critic/rewards/mean") == {1: 0.15, 2: 0.25}
    assert curve(log, "critic/score/mean") == {1: 0.125, 2: 0.225}
    assert curve(log, "actor/lr") == {1: 1e-6, 2: 1e-6}
    assert curve(log, "timing_s/step") == {1: 201.0, 2: 202.0}
    assert curve(log, "actor/grad_norm") == {1: 0.25, 2: 0.25}


def megatron_line(step: int, loss: float, time: float = 900.0) -> str:
    return (
        f" iteration {step:8d}/      30 | consumed samples: {8 * step:12d} | elapsed time per iteration (ms): {time} | "
        f"learning rate: 1.000E-04 | lm loss: {loss:.6E} | grad norm: 1.500 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


@pytest.mark.parametrize("label", ["[default{}]:", "[rank{}]:", "{}: ", "[1,{}]<stdout>:"])
def test_megatron_lines_of_several_ranks(tmp_path: Path, label: str) -> None:
    """Before each line its rank; lines of two ranks on one; a warning of another process behind the last field."""
    source = tmp_path / "run.log"
    lines = [
        label.format(0) + megatron_line(1, 8.0) + label.format(7) + megatron_line(1, 8.0, 901.0),
        label.format(7) + megatron_line(2, 7.5) + "/usr/lib/warn.py:3: UserWarning: slow",
        label.format(0) + megatron_line(2, 7.5, 905.0),
        label.format(7) + "Warning: iteration is slow",
        label.format(0) + megatron_line(3, 7.25),
    ]
    source.write_text("\n".join(lines) + "\n")
    log = read_log(str(source))
    assert log.kind == "Megatron console"
    assert curve(log, "train/loss") == {1: 8.0, 2: 7.5, 3: 7.25}
    assert curve(log, "train/grad_norm") == {1: 1.5, 2: 1.5, 3: 1.5}
    source.write_text("\n".join([*lines, label.format(7) + megatron_line(3, 9.0)]) + "\n")
    with refuses("line 6", "ambiguous-steps", "ranks 0 and 7", "iteration 3", "lm loss 7.25 and 9"):
        read_log(str(source))


@pytest.mark.parametrize("name", ["backup.swanlab", "run-zr5qlem6.swanlab"])
def test_swanlab(name: str) -> None:
    """Files of SwanLab 0.6.8 (JSON records) and 0.10.3 (protobuf records)."""
    log = recorded(name)
    assert log.kind == "SwanLab"
    assert curve(log, "critic/rewards/mean") == {1: 0.25, 2: 0.5, 3: 0.75}
    assert curve(log, "actor/loss") == {1: 1.0, 2: 0.5, 3: 1 / 3}
    assert all(math.isnan(value) for value in curve(log, "bad").values())
    assert not [metric for metric in log.metrics if "swanlab" in metric]


def test_a_swanlab_file_of_an_unknown_format_or_damaged(tmp_path: Path) -> None:
    content = bytearray((RECORDED / "run-zr5qlem6.swanlab").read_bytes())
    cut = tmp_path / "cut.swanlab"
    cut.write_bytes(content[:-3])  # the last record is half written
    assert read_log(str(cut)).kind == "SwanLab"
    content[6] = 3
    cut.write_bytes(content)
    with pytest.raises(Refusal, match=r"format 3.*1 and 2"):
        read_log(str(cut))


def test_msprobe_dump(tmp_path: Path) -> None:
    """The folder of its PrecisionDebugger: statistics by step, and by rank where there are several."""
    for step in (0, 1):
        tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [8, 4], "Max": 1.5, "Min": -1.0}
        tensor |= {"Mean": 0.25, "Norm": 70.5 + step, "requires_grad": True, "data_name": "x.pt"}
        data = {
            "Module.conv2.Conv2d.forward.0": {
                "input_args": [tensor],
                "input_kwargs": {},
                "output": [{**tensor, "Norm": 140.0}, {"type": "int", "value": 3}],
                "parameters": {"weight": {**tensor, "Norm": 3.5}},
            },
            "Module.conv2.Conv2d.parameters_grad.0": {"weight": [{**tensor, "Norm": 0.25, "Max": "nan"}]},
        }
        folder = tmp_path / "dump" / f"step{step}" / "rank0"
        folder.mkdir(parents=True)
        text = {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": "/dump", "data": data}
        (folder / "dump.json").write_text(json.dumps(text))
        (folder / "stack.json").write_text("{}")
    log = read_log(str(tmp_path / "dump"))
    assert log.kind == "msprobe"
    assert curve(log, "Module.conv2.Conv2d.forward.0.input_args.0/Norm") == {1: 70.5, 2: 71.5}
    assert curve(log, "Module.conv2.Conv2d.forward.0.output.0/Norm") == {1: 140.0, 2: 140.0}
    assert curve(log, "Module.conv2.Conv2d.forward.0.parameters.weight/Mean") == {1: 0.25, 2: 0.25}
    assert curve(log, "Module.conv2.Conv2d.parameters_grad.0.weight.0/Norm") == {1: 0.25, 2: 0.25}
    one = read_log(str(tmp_path / "dump" / "step1" / "rank0" / "dump.json"))
    assert curve(one, "Module.conv2.Conv2d.forward.0.input_args.0/Norm") == {2: 71.5}
    (tmp_path / "dump" / "step0" / "rank0").rename(tmp_path / "dump" / "step0" / "rank1")
    both = read_log(str(tmp_path / "dump"))
    assert curve(both, "rank1/Module.conv2.Conv2d.forward.0.input_args.0/Norm") == {1: 70.5}
    assert curve(both, "rank0/Module.conv2.Conv2d.forward.0.input_args.0/Norm") == {2: 71.5}


def test_msprobe_monitor_and_gradient_probe(tmp_path: Path) -> None:
    monitor = tmp_path / "monitor"
    monitor.mkdir()
    (monitor / "grad_reduced_0-1.csv").write_text(
        "vpp_stage,name,step,norm,mean\n0,layers.0.weight,0,1.5,0.25\n0,layers.0.weight,1,1.25,nan\n"
    )
    (monitor / "actv_0-1.csv").write_text(
        "vpp_stage,name,step,micro_step,norm\n0,layers.0.input,0,0,9.5\n1,layers.0.input,0,1,8.5\n"
    )
    log = read_log(str(monitor))
    assert log.kind == "msprobe"
    assert curve(log, "grad_reduced/layers.0.weight/norm") == {1: 1.5, 2: 1.25}
    assert curve(log, "actv/layers.0.input/norm") == {1: 9.5}
    assert curve(log, "actv/1:layers.0.input:1/norm") == {1: 8.5}
    probe = tmp_path / "probe" / "rank0"
    probe.mkdir(parents=True)
    for step in (0, 1):
        (probe / f"grad_summary_{step}.csv").write_text(
            f'Param_name,MD5,=0,Max,Min,Norm,Shape\nlayers.0.weight,ab12,0.5,0.25,-0.5,{step + 1}.5,"[4, 8]"\n'
        )
    log = read_log(str(tmp_path / "probe"))
    assert curve(log, "gradient/layers.0.weight/Norm") == {1: 1.5, 2: 2.5}
    for step in ("x", "1.5", "nan", "inf"):
        (monitor / "grad_reduced_0-1.csv").write_text(f"vpp_stage,name,step,norm\n0,layers.0.weight,{step},1.5\n")
        with refuses("grad_reduced_0-1.csv line 2", "damaged-file", "step"):
            read_log(str(monitor))


def test_megatron_lines_between_those_of_deepspeed(tmp_path: Path) -> None:
    """The lines of both are in one log: those with the loss are read."""
    source = tmp_path / "both.log"
    source.write_text((RECORDED / "deepspeed.log").read_text() + (RECORDED / "megatron.log").read_text())
    assert read_log(str(source)).kind == "Megatron console"


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_trainer_state_on_one_line(tmp_path: Path, kind: str) -> None:
    name = f"trl_{kind}_trainer_state.json"
    state = json.loads((RECORDED / name).read_text())
    assert "global_step" in state  # which makes it look like a row of a table
    for end in ("", "\n"):
        copy = tmp_path / "trainer_state.json"
        copy.write_text(json.dumps(state) + end)
        log = read_log(str(copy))
        assert log.kind == "transformers trainer state"
        assert {metric: curve(log, metric) for metric in log.metrics} == {
            metric: curve(recorded(name), metric) for metric in recorded(name).metrics
        }


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf_16_with_its_mark(tmp_path: Path, order: str) -> None:
    """A byte order mark names the encoding; a byte that is cut from the end belongs to an incomplete line."""
    for name in ("verl_console.log", "swift_logging.jsonl", "run-sft_one-tag-train_loss.csv"):
        text = "\ufeff" + (RECORDED / name).read_text(encoding="utf-8")
        copy = tmp_path / name
        copy.write_bytes(text.encode(order))
        log, plain = read_log(str(copy)), recorded(name)
        assert (log.kind, log.written) == (plain.kind, plain.written)
        for metric in plain.metrics:
            assert str(curve(log, metric)) == str(curve(plain, metric))
        copy.write_bytes(text.encode(order)[:-1])
        assert read_log(str(copy)).kind == plain.kind


def test_binary_files_are_no_text(tmp_path: Path) -> None:
    source = tmp_path / "a.log"
    for content in (b"\xff\xfe\0\0a\0\0\0", b"step:1 - a:1\n\0", b"\xff\xfe"):
        source.write_bytes(content)
        with refuses("a.log", "unsupported-format"):
            read_log(str(source))


# tensorboard's csv ---------------------------------------------------------------------------------------------------


def test_the_file_name_of_a_tensorboard_csv_gives_its_metric() -> None:
    log = recorded("run-sft_one-tag-train_loss.csv")
    assert log.kind == "tensorboard csv"
    assert log.written == {"train/loss": "Value"}
    loss = curve(log, "train/loss")
    assert math.isnan(loss.pop(3))
    assert loss == {1: 0.6875, 2: 0.625, 4: 0.5}


@pytest.mark.parametrize(
    ("file", "metric"),
    [
        ("train_loss.csv", "train/loss"),
        ("loss.csv", "train/loss"),
        ("run-.-tag-train_grad_norm.csv", "train/grad_norm"),
        ("run-.-tag-train_learning_rate (1).csv", "train/lr"),
        ("run-.-tag-eval_loss.csv", "val/loss"),
        ("run-.-tag-train_reward.csv", "critic/rewards/mean"),
        ("run-.-tag-critic_rewards_mean.csv", "critic/rewards/mean"),
        # transformers' mean over the complete training is not part of the loss curve.
        ("run-.-tag-train_train_loss.csv", "train_train_loss"),
        ("run-.-tag-my metric.csv", "my metric"),
    ],
)
def test_names_of_tensorboard_csvs(tmp_path: Path, file: str, metric: str) -> None:
    (tmp_path / file).write_text("Wall time,Step,Value\n1.5,1,0.5\n")
    assert curve(read_log(str(tmp_path / file)), metric) == {1: 0.5}


def test_a_tensorboard_csv_without_a_name_asks_for_it(tmp_path: Path) -> None:
    source = tmp_path / "export.csv"
    source.write_text("Wall time,Step,Value\n1.5,1,0.5\n")
    with refuses("export.csv", "unnamed-metric", "Value", remedy="--value"):
        read_log(str(source))
    assert curve(read_log(str(source), {"Value": "actor/kl"}), "actor/kl") == {1: 0.5}
    # The option has priority over the file name.
    named = tmp_path / "train_loss.csv"
    named.write_text(source.read_text())
    assert list(read_log(str(named), {"Value": "actor/kl"}).metrics) == ["actor/kl"]


def test_mapped_names() -> None:
    assert name_of_file("val_loss") == "val/loss"
    assert name_of_file("eval_rewards_margins") == "val/margin"
    assert name_of_file("export") is None


# Damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "expected"),
    [
        ("llamafactory_trainer_log.jsonl", '{"current_steps": 5,', '{"current_steps": 5', 1, "JSON"),
        ("llamafactory_trainer_log.jsonl", '"current_steps": 5,', '"current_steps": "x",', 1, "current_steps"),
        ("llamafactory_trainer_log.jsonl", '{"current_steps": 5,', "{", 1, "current_steps"),
        ("swift_logging.jsonl", '"10/12", "perc', '"10/", "perc', 4, "10/93"),
        ("swift_logging.jsonl", '"global_step/max_steps": "10/12", ', "", 4, "10/93"),
        ("swift_logging.jsonl", '{"train_runtime"', '"train_runtime"', 5, "JSON"),
        ("swift_megatron_logging.jsonl", '"15/20"', "15", 4, "10/93"),
        ("megatron.log", "7.500000E+00", "7.50#000E+00", 7, "'lm loss: 7.50#000E+00'"),
        ("megatron.log", "| grad norm: nan | number of skipped iterations:   1 |", "|", None, ""),
        ("megatron.log", " | number of skipped iterations:   1 | number of nan iterations:   0 |", " | numb", 7, ""),
        ("megatron.log", "lm loss value: 7.375000E+00", "lm loss value 7.375000E+00", 9, "numbers"),
        ("mindspeed_rl.log", "grpo/score/mean : 0.5000 | ", "grpo/sc | ", 3, "numbers"),
        ("mindspeed_rl.log", "grad_norm : 0.2500", "grad_norm : 0.2x00", 2, "numbers"),
        ("run-sft_one-tag-train_loss.csv", "2,0.625", "2,0.6x25", 3, "a step and a value"),
        ("run-sft_one-tag-train_loss.csv", ",2,0.625", "", 3, "3 columns"),
        ("run-sft_one-tag-train_loss.csv", "25,2,", "25,2.5,", 3, "a step"),
    ],
)  # fmt: skip
def test_damage_is_refused_by_its_line(
    tmp_path: Path, name: str, old: str, new: str, line: int | None, expected: str
) -> None:
    source = changed(tmp_path, name, old, new)
    if line is None:  # a field that is not there is no damage
        assert curve(read_log(source), "train/loss") == curve(recorded(name), "train/loss")
        return
    with refuses(f"{name} line {line}", "damaged-file", expected):
        read_log(source)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_trainer_state_that_is_cut_short_is_refused_by_its_place(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(
        {"global_step": 2, "log_history": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1}]}, indent=indent
    )
    source = tmp_path / "trainer_state.json"
    source.write_text(text[:-4])
    with pytest.raises(Refusal, match=r"trainer_state\.json line \d+ column \d+ \[damaged-file\]"):
        read_log(str(source))


def last_kept(name: str, tmp_path: Path, cut: int) -> dict[int, float]:
    copy = tmp_path / name
    copy.write_bytes((RECORDED / name).read_bytes()[:-cut])
    return curve(read_log(str(copy)), "critic/rewards/mean" if name == "mindspeed_rl.log" else "train/loss")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("swift_megatron_logging.jsonl", [5, 10]),
        ("mindspeed_llm.log", [1]),
        ("mindspeed_rl.log", [1]),
        ("run-sft_one-tag-train_loss.csv", [1, 2, 3]),
    ],
)
def test_a_half_line_at_the_end_is_left_out(tmp_path: Path, name: str, steps: list[int]) -> None:
    """It may be growing; a number in it may be the beginning of another."""
    assert list(last_kept(name, tmp_path, cut=3)) == steps


# Which reader --------------------------------------------------------------------------------------------------------


def samples() -> list[Path]:
    return [file for file in sorted(RECORDED.iterdir()) if file.suffix not in (".md", ".wandb", ".swanlab")]


@pytest.mark.parametrize("file", samples(), ids=lambda file: file.name)
def test_each_sample_is_claimed_by_one_reader(file: Path) -> None:
    text = decoded(file.read_bytes())
    assert text is not None
    (only,) = matching_formats(file, text)
    assert only.kind == read_log(str(file)).kind


def test_a_swift_log_with_a_row_of_another_is_still_one(tmp_path: Path) -> None:
    """A column that tables have besides does not make it a table."""
    row = {"loss": 0.5, "global_step/max_steps": "3/9", "step": 7}
    source = tmp_path / "logging.jsonl"
    source.write_text(json.dumps(row) + "\n")
    assert curve(read_log(str(source)), "train/loss") == {3: 0.5}


# Folders -------------------------------------------------------------------------------------------------------------


def state_with(steps: int) -> str:
    return json.dumps({"global_step": steps, "log_history": [{"step": i, "loss": i / 4} for i in range(1, steps + 1)]})


def test_of_a_state_and_log_lines_the_complete_one_is_read(tmp_path: Path) -> None:
    lines = tmp_path / "trainer_log.jsonl"
    lines.write_text((RECORDED / "llamafactory_trainer_log.jsonl").read_text())
    assert read_log(str(tmp_path)).kind == "LLaMA-Factory log"
    # A run that was stopped has gone on behind its last checkpoint.
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(state_with(3))
    assert read_log(str(tmp_path)).kind == "LLaMA-Factory log"
    (tmp_path / "trainer_state.json").write_text(state_with(4))
    assert curve(read_log(str(tmp_path)), "train/loss") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    # Two logs of different runs in one folder: the user must name one.
    (tmp_path / "logging.jsonl").write_text((RECORDED / "swift_logging.jsonl").read_text())
    with pytest.raises(Refusal, match="contains 4 logs"):
        read_log(str(tmp_path))
