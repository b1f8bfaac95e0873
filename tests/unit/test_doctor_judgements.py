"""Each judgement on a healthy machine with one thing changed: the row, the verdict and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from recorded_machine import A2, CPU, DRIVER, GIB, H200, INSTALL_INFO, TOOLKIT, RecordedMachine, output

from lockstep.doctor.doctor_report import examine
from lockstep.doctor.local_machine import CommandOutput, Disk
from lockstep.doctor.package_checks import unfit_packages

CACHE = "/home/me/.cache/torch_extensions/py311_cpu/cpu_adam"
SGLANG = {"sglang": "0.5.13", "torch_memory_saver": "0.0.9"}
NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"


def sick(text: str, **changes: Any) -> RecordedMachine:
    return A2.having(commands={"npu-smi info": CommandOutput(0, text)}, **changes)


CASES: list[tuple[RecordedMachine, str, str, str, str]] = [
    # machine, device, row, verdict, words of the remedy
    (CPU.having(python="3.9.10"), "cpu", "python", "broken", "-m venv"),
    (CPU.having(python="3.14.0"), "cpu", "python", "broken", "-m venv"),
    (CPU.having(packages={"transformers": "4.56.1"}), "cpu", "transformers", "broken", "transformers>=5.17"),
    (CPU.having(packages={"torch": None}), "cpu", "torch", "broken", "pip install"),
    (CPU.having(space=Disk(GIB // 2, 100 * GIB)), "cpu", "disk", "broken", "run.folder"),
    (CPU.having(space=Disk(40 * GIB, 1000 * GIB)), "cpu", "disk", "warning", "run.folder"),
    (CPU.having(times={f"{CACHE}/lock": 2000.0}), "cpu", "torch_extensions", "warning", f"rm -r {CACHE}"),
    (CPU.having(times={f"{CACHE}/cpu_adam.so": 999.0}), "cpu", "torch_extensions", "warning", f"rm -r {CACHE}"),
    (H200.having(commands={"gcc": None}), "cuda", "compiler", "warning", "install gcc"),
    (H200.having(headers=False), "cuda", "compiler", "warning", "apt install python3-dev"),
    (H200.having(packages={"torch": "2.13.0+cpu"}), "cuda", "torch", "broken", "uninstall torch"),
    (CPU, "cuda", "nvidia-smi", "broken", "--gpus all"),
    (H200.having(variables={"CUDA_VISIBLE_DEVICES": "1"}), "cuda", "CUDA_VISIBLE_DEVICES", "broken", "=0"),
    (H200.having(variables={"CUDA_VISIBLE_DEVICES": ""}), "cuda", "CUDA_VISIBLE_DEVICES", "broken", "unset"),
    (
        H200.having(packages={"vllm": "0.20.0"}, variables={"PYTORCH_ALLOC_CONF": "expandable_segments: True"}),
        "cuda",
        "PYTORCH_ALLOC_CONF",
        "warning",
        "expandable_segments:False",
    ),
    # torch_npu
    (A2.having(packages={"torch_npu": "2.10.0.post4"}), "npu", "torch_npu", "broken", "torch_npu==2.12.0"),
    (A2.having(packages={"torch_npu": "2.11.0"}), "npu", "torch_npu", "broken", ", or torch==2.11.0"),
    (A2.having(packages={"torch_npu": None}), "npu", "torch_npu", "broken", ".[npu]"),
    (A2.having(files={INSTALL_INFO: None}), "npu", "torch_npu", "broken", "set_env.sh"),
    (CPU.having(packages={"torch_npu": "2.13.0"}), "cpu", "torch_npu", "warning", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
    # CANN, driver, devices
    (A2.having(files={INSTALL_INFO: None}), "npu", "CANN", "broken", "set_env.sh"),
    (
        A2.having(variables={"LD_LIBRARY_PATH": "/usr/lib"}),
        "npu",
        "CANN",
        "warning",
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    (
        A2.having(packages={"torch": "2.6.0", "torch_npu": "2.6.0.post1"}),
        "npu",
        "CANN",
        "warning",
        "install the documented CANN in addition",
    ),
    (A2.having(commands={"npu-smi info": None, "npu-smi": None}), "npu", "npu-smi", "broken", "HDK"),
    (
        A2.having(commands={"npu-smi info": None, "npu-smi": None}, times={"/dev/davinci0": 0.0}),
        "npu",
        "npu-smi",
        "warning",
        "mount",
    ),
    (
        A2.having(commands={"npu-smi info": CommandOutput(1, output("npu-smi-failed.txt"))}),
        "npu",
        "npu-smi",
        "broken",
        "driver is loaded",
    ),
    (
        sick(
            output("npu-smi-24.1.0.txt").replace("910B1               | OK      ", "910B1               | Alarm   ", 1)
        ),
        "npu",
        "npu devices",
        "broken",
        "-t health -i 0",
    ),
    (
        sick(output("npu-smi-24.1.0.txt").replace("910B1               | OK     ", "910B1               | Warning", 1)),
        "npu",
        "npu devices",
        "warning",
        "-t health -i 0",
    ),
    (
        # CANN 8.3.RC1 is documented with HDK 25.3.RC1; this one's lists name neither.
        sick(output("npu-smi-24.1.0.txt"), files={INSTALL_INFO: "version=8.3.RC1\n"}),
        "npu",
        "driver",
        "broken",
        "HDK 25.3.RC1 or newer",
    ),
    (
        sick(
            output("npu-smi-24.1.0.txt"),
            files={
                INSTALL_INFO: output("install-8.3.RC2.info").replace("8.3.RC2", "8.3.RC1"),
                DRIVER: output("driver-25.0.rc1.1.info"),
            },
        ),
        "npu",
        "driver",
        "warning",
        "HDK 25.3.RC1 or newer",
    ),
    (
        A2.having(
            files={
                DRIVER: output("driver-25.3.rc1.info").replace("C2", "C9"),
                INSTALL_INFO: output("install-8.3.RC2.info"),
            }
        ),
        "npu",
        "driver",
        "warning",
        "release notes",
    ),
    (
        A2.having(commands={"npu-smi": CommandOutput(0, output("board-23.0.5.txt").replace(": OK", ": NOK"))}),
        "npu",
        "firmware",
        "broken",
        "the same HDK release",
    ),
    # packages on Ascend
    (A2.having(packages={"triton": "3.5.0", "triton-ascend": "3.2.0"}), "npu", "triton-ascend", "broken", "uninstall"),
    (A2.having(packages={"triton": "3.6.0", "triton-ascend": "3.2.2"}), "npu", "triton-ascend", "warning", "uninstall"),
    (A2.having(packages={"flash_attn": "2.8.0"}), "npu", "flash_attn", "warning", "model.attention"),
    (A2.having(packages={"liger_kernel": "0.6.0"}), "npu", "liger_kernel", "warning", "nothing to do"),
    (A2.having(packages={"bitsandbytes": "0.49"}), "npu", "bitsandbytes", "warning", "model.quantize"),
    (A2.having(packages={"deepspeed": "0.18"}), "npu", "deepspeed", "warning", "FSDP2"),
    (A2.having(packages={"torchvision": "0.28.0+cu130"}), "npu", "torchvision", "warning", "whl/cpu"),
    (A2.having(packages={"sglang": "0.5.6", "timm": "1.0"}), "npu", "timm", "warning", "uninstall -y timm"),
    (A2.having(packages={"sglang": "0.5.13"}), "npu", "torch_memory_saver", "warning", "or do not use rollout.sleep"),
    (A2.having(packages={"vllm": "0.23.0", "vllm-ascend": "0.22.1rc1"}), "npu", "vllm-ascend", "broken", "0.22.1"),
    (A2.having(packages={"vllm": "0.8.5.post1", "vllm-ascend": "0.8.5rc1"}), "npu", "vllm-ascend", "warning", "line"),
    (A2.having(packages={"vllm": "0.23.0"}), "npu", "vllm", "warning", "together"),
    # variables
    (A2.having(variables={NOSET: "1"}), "npu", NOSET, "warning", f"unset {NOSET}"),
    (A2.having(variables={"ASCEND_RT_VISIBLE_DEVICES": "0,7"}), "npu", "ASCEND_RT_VISIBLE_DEVICES", "broken", "=0,1"),
    (A2.having(variables={"ASCEND_RT_VISIBLE_DEVICES": "1,0"}), "npu", "ASCEND_RT_VISIBLE_DEVICES", "broken", "=0,1"),
    (
        A2.having(
            packages={"vllm": "0.23.0", "vllm-ascend": "0.23.0"},
            variables={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        ),
        "npu",
        "PYTORCH_NPU_ALLOC_CONF",
        "warning",
        "expandable_segments:False",
    ),
    (
        A2.having(packages={"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, variables={"VLLM_ASCEND_ENABLE_NZ": "1"}),
        "npu",
        "VLLM_ASCEND_ENABLE_NZ",
        "warning",
        "ENABLE_NZ=0",
    ),
    (
        A2.having(
            packages={"sglang": "0.5.13.post1"}, variables={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
        ),
        "npu",
        "PYTORCH_NPU_ALLOC_CONF",
        "warning",
        "expandable_segments:False",
    ),
    (
        A2.having(packages={"sglang": "0.5.13"}, variables={"SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "false"}),
        "npu",
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT",
        "warning",
        "FORMAT_WEIGHT=1",
    ),
    (A2.having(variables={"TASK_QUEUE_ENABLE": "0"}), "npu", "TASK_QUEUE_ENABLE", "warning", "default is 1"),
    (CPU.having(variables={"VLLM_USE_V1": "0"}), "cpu", "VLLM_USE_V1", "warning", "unset"),
    (
        CPU.having(variables={"SGLANG_RETURN_ORIGINAL_LOGPROB": "True"}),
        "cpu",
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        "warning",
        "unset",
    ),
    (A2.having(variables={"HCCL_IF_BASE_PORT": "65530"}), "npu", "HCCL_IF_BASE_PORT", "broken", "50000"),
    (A2.having(variables={"ASCEND_LAUNCH_BLOCKING": "1"}), "npu", "ASCEND_LAUNCH_BLOCKING", "warning", "unset"),
]


@pytest.mark.parametrize(
    ("machine", "device", "row", "verdict", "remedy"),
    CASES,
    ids=[f"{case[2]}-{case[3]}-{number}" for number, case in enumerate(CASES)],
)
def test_judgement(machine: RecordedMachine, device: str, row: str, verdict: str, remedy: str) -> None:
    report = examine(machine, device)
    found = next(each for each in report.rows if each.name == row)
    assert found.verdict == verdict, found.findings
    assert any(remedy in finding.remedy for finding in found.findings), found.findings
    assert report.healthy == (report.count("broken") == 0)


@pytest.mark.parametrize(
    ("machine", "device"),
    [
        (A2.having(packages={"torch_npu": "2.12.0.post2"}), "npu"),
        (A2.having(packages={"torch_npu": "2.12.0rc1"}), "npu"),
        (A2.having(packages={"triton": "3.5.0", "triton-ascend": "3.2.1"}), "npu"),
        (A2.having(variables={"ASCEND_RT_VISIBLE_DEVICES": "0,1", NOSET: "0"}), "npu"),
        (A2.having(variables={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}), "npu"),
        (A2.having(variables={"HCCL_IF_BASE_PORT": "65520"}), "npu"),
        (A2.having(packages=SGLANG, variables={"SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1"}), "npu"),
        (A2.having(packages=SGLANG, variables={"TASK_QUEUE_ENABLE": "2"}), "npu"),
        (H200.having(packages={"sglang": "0.5.17"}), "cuda"),
        (CPU.having(variables={"VLLM_USE_V1": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}), "cpu"),
        (A2.having(files={DRIVER: output("driver-25.0.rc1.1.info")}), "npu"),
        (CPU.having(packages={"torch_npu": "2.13.0"}, variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), "cpu"),
        (CPU.having(packages={"flash_attn": "2.8.0", "deepspeed": "0.18"}, variables={NOSET: "1"}), "cpu"),
        (H200.having(variables={"CUDA_VISIBLE_DEVICES": "GPU-1ffe36ef"}), "cuda"),
        (CPU.having(times={f"{CACHE}/cpu_adam.so": 1001.0}), "cpu"),
    ],
)
def test_what_is_not_wrong(machine: RecordedMachine, device: str) -> None:
    assert [finding for row in examine(machine, device).rows for finding in row.findings] == []


def test_a_card_that_was_left_out_of_the_container_is_not_named() -> None:
    machine = A2.having(times={"/dev/davinci0": 0.0}, variables={"ASCEND_RT_VISIBLE_DEVICES": "1"})
    found = next(row for row in examine(machine).rows if row.name == "ASCEND_RT_VISIBLE_DEVICES")
    assert found.findings[0].why.startswith("there is no device 1:")


# Refused before a run -------------------------------------------------------------------------------------------------


def test_a_torch_npu_of_another_torch_is_refused() -> None:
    machine = A2.having(packages={"torch_npu": "2.10.0.post4"})
    (problem,) = unfit_packages("npu", machine)
    assert problem.where == "package torch_npu"
    assert problem.remedy.startswith("pip install torch_npu==2.12.0")
    assert "torch==2.10" not in problem.remedy  # too old for lockstep
    assert unfit_packages("cpu", machine) == []
    assert unfit_packages("npu", A2) == []


def test_a_patch_release_is_another_release() -> None:
    """torch_npu 2.12.0 does not load into torch 2.12.1: all three numbers count."""
    (problem,) = unfit_packages("npu", A2.having(packages={"torch": "2.12.1"}))
    assert "built for torch 2.12.0" in problem.why
    assert unfit_packages("npu", A2.having(packages={"torch": "2.12.0+cpu", "torch_npu": "2.12.0.post3"})) == []


def test_the_home_of_the_toolkit_is_shown() -> None:
    assert TOOLKIT in next(row.value or "" for row in examine(A2).rows if row.name == "CANN")


def test_the_faq_names_real_rows() -> None:
    rows = {case[2] for case in CASES} | {"known stack", "PYTORCH_CUDA_ALLOC_CONF"}
    for page, label in (("ascend-faq.md", "Doctor row."), ("ascend-faq.zh.md", "对应的行。")):
        text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
        paragraphs = re.findall(rf"^\*\*{label}\*\*(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
        assert len(paragraphs) == text.count("\n## ")
        named = {name for paragraph in paragraphs for name in re.findall(r"`([\w -]+)`", paragraph)}
        assert named <= rows
