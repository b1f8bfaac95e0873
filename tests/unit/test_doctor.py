"""The doctor reads what the tools really print, and tells of a machine what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from recorded_machine import A2, CPU, DRIVER, FIRMWARE, H200, INSTALL_INFO, TOOLKIT, RecordedMachine, output

from commands import cold_lockstep
from lockstep.doctor import machine_facts
from lockstep.doctor.doctor_report import as_json, examine, plain_lines, table_lines
from lockstep.doctor.local_machine import CommandOutput, Machine
from lockstep.doctor.machine_facts import MINIMUM, PYTHON, choose_device, gather
from lockstep.doctor.version_stacks import FILE, known_stacks, older, pins_text, release, satisfies, stack_named
from lockstep.errors import Refusal

ROOT = Path(__file__).parents[2]
NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "driver", "chips"),
    [
        ("npu-smi-23.0.3.txt", "23.0.3", [(0, "910B2", 65536), (1, "910B2", 65536)]),
        ("npu-smi-23.0.rc3-310B1.txt", "23.0.rc3", [(0, "310B1", 11577)]),
        ("npu-smi-24.1.0.txt", "24.1.0", [(0, "910B1", 65536), (1, "910B1", 65536)]),
        ("npu-smi-24.1.rc3.7-A3.txt", "24.1.rc3.7", [(0, "Ascend910", 65536), (0, "Ascend910", 65536)]),
        ("npu-smi-25.2.0.txt", "25.2.0", [(0, "910B4-1", 65536), (1, "910B4-1", 65536)]),
        (
            "npu-smi-25.3.rc1-A3.txt",
            "25.3.rc1",
            [(card, "Ascend910", 65536) for card in (0, 0, 2, 2)],
        ),
        ("npu-smi-26.0.rc1.txt", "26.0.rc1", [(0, "910B4", 32768)]),
        ("npu-smi-failed.txt", None, []),
    ],
)
def test_npu_smi_of_every_version(file: str, driver: str | None, chips: list[tuple[int, str, int]]) -> None:
    text = output(file)
    assert machine_facts.driver_in(text) == driver
    assert [(chip.card, chip.name, chip.memory_mb) for chip in machine_facts.chips_in(text)] == chips
    assert {chip.health for chip in machine_facts.chips_in(text)} <= {"OK"}


def test_board() -> None:
    assert machine_facts.board_in(output("board-23.0.5.txt")) == machine_facts.Board("23.0.5", "7.1.0.7.220", "OK")
    assert machine_facts.board_in(output("board-25.5.1.txt")) == machine_facts.Board("25.5.1", "7.8.0.6.201", "OK")
    assert machine_facts.board_in("") == machine_facts.Board(None, None, None)


def test_boards_are_asked_for_by_card() -> None:
    answers = {f"npu-smi info -t board -i {card}": CommandOutput(0, f"Firmware Version : 7.{card}") for card in (0, 2)}
    machine = CPU.having(commands={"npu-smi info": CommandOutput(0, output("npu-smi-25.3.rc1-A3.txt")), **answers})
    assert {card: board.firmware for card, board in machine_facts.query_npu_smi(machine).boards.items()} == {
        0: "7.0",
        2: "7.2",
    }


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({INSTALL_INFO: output("install-8.3.RC2.info"), f"{TOOLKIT}/version.cfg": "nonsense"}, "8.3.RC2"),
        ({f"{TOOLKIT}/version.cfg": output("version-8.0.RC2.cfg")}, "8.0.RC2"),
        ({f"{TOOLKIT}/version.cfg": output("version-8.1.RC1.cfg")}, "8.1.RC1"),
        ({f"{TOOLKIT}/version.cfg": output("version-8.2.RC2.cfg")}, "8.2.RC2"),
        ({"/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": "version=9.0.0\n"}, "9.0.0"),
        ({"/opt/cann/runtime/version.info": "Version=9.0.0\n"}, "9.0.0"),
        ({}, None),
    ],
)
def test_cann_is_found_in_all_its_places(files: dict[str, str], found: str | None) -> None:
    machine = RecordedMachine(files=files, variables={"ASCEND_HOME_PATH": "/opt/cann/"})
    toolkit = machine_facts.find_toolkit(machine)
    assert (toolkit.version if toolkit else None) == found


def test_the_toolkit_of_the_environment_comes_first() -> None:
    other = "/opt/cann/aarch64-linux/ascend_toolkit_install.info"
    files = {other: output("install-8.0.RC3.info"), INSTALL_INFO: output("install-8.1.RC1.info")}
    for variable, version in (("ASCEND_HOME_PATH", "8.0.RC3"), ("ASCEND_TOOLKIT_HOME", "8.0.RC3"), ("HOME", "8.1.RC1")):
        toolkit = machine_facts.find_toolkit(RecordedMachine(files=files, variables={variable: "/opt/cann"}))
        assert toolkit is not None
        assert toolkit.version == version


def test_driver_and_firmware_files() -> None:
    machine = RecordedMachine(
        files={DRIVER: output("driver-24.1.rc1.info"), FIRMWARE: output("firmware-25.0.rc1.1.info")}
    )
    driver, firmware = machine_facts.find_driver(machine), machine_facts.find_firmware(machine)
    assert driver is not None
    assert firmware is not None
    assert (driver.version, driver.inner, firmware.version) == ("24.1.rc1", "V100R001C15", "7.7.0.1.231")


@pytest.mark.parametrize(
    ("toolkit", "driver", "together"),
    [
        ("install-8.3.RC2.info", "driver-25.3.rc1.info", True),  # C23 and C23
        ("install-8.3.RC2.info", "driver-25.0.rc1.1.info", True),  # the toolkit lists the driver's C21
        ("install-8.0.RC3.info", "driver-24.1.rc1.info", True),  # C15 lies in the range C13 to C19
        ("install-8.0.RC3.info", "driver-25.3.rc1.info", True),  # the driver lists the toolkit's C19
    ],
)
def test_compatibility_lists(toolkit: str, driver: str, together: bool) -> None:
    one = machine_facts.installation_in(output(toolkit), "")
    other = machine_facts.installation_in(output(driver), "")
    assert one is not None
    assert other is not None
    assert machine_facts.are_compatible(one, other) is together
    assert (
        machine_facts.are_compatible(
            machine_facts.Installation("9.0.0", ""), machine_facts.Installation("26.0.rc1", "")
        )
        is None
    )
    stranger = machine_facts.Installation("1", "", "V100R001C99", (("V100R001C98", "V100R001C99"),))
    assert machine_facts.are_compatible(one, stranger) is False


def test_nvidia() -> None:
    found = machine_facts.query_nvidia_smi(H200)
    assert (found.driver, found.gpus) == ("580.159.04", (machine_facts.Gpu("NVIDIA H200", 143771),))
    failing = CPU.having(
        commands={"nvidia-smi": CommandOutput(9, "Failed to initialize NVML: Driver/library version mismatch")}
    )
    assert machine_facts.query_nvidia_smi(failing).message.endswith("version mismatch")


def test_versions() -> None:
    ordered = ["8.0.RC2.alpha002", "8.0.RC2", "8.0.RC3", "8.0.0", "8.1.RC1", "8.3.RC1", "8.3.RC2", "9.0.0", "9.1.0"]
    assert all(older(one, two) and not older(two, one) for one, two in pairwise(ordered))
    assert older("24.1.rc3", "24.1.rc3.7")
    assert older("2.10.0rc1", "2.10.0")
    assert older("2.10.0", "2.10.0.post4")
    assert not older("2.11.0+cpu", "2.11")
    assert not older("2.11", "2.11.0")
    assert [release(text) for text in ("2.5.1.post1.dev20250619", "2.13.0+cpu", "0.11.0rc1")] == [
        "2.5.1",
        "2.13.0",
        "0.11.0",
    ]
    assert satisfies("2.5.1rc1", "==2.5.1")
    assert satisfies("2.5.1", "==2.5.1rc1")
    assert not satisfies("2.6.0", "==2.5.1rc1")
    assert not satisfies("2.10.0.post2", "==2.10.0.post4")
    assert satisfies("4.56.1", ">=4.52.0")


# The whole ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "device"), [(CPU, "cpu"), (H200, "cuda"), (A2, "npu")])
def test_healthy_machines(machine: RecordedMachine, device: str) -> None:
    report = examine(machine)
    assert (report.device, report.healthy, report.count("warning")) == (device, True, 0)
    told = json.loads(as_json(report))
    assert (told["device"], told["broken"], told["warnings"]) == (device, 0, 0)
    values = {row["name"]: row["value"] for row in told["rows"]}
    stacks = {"cpu": "cpu: CPU, run here", "cuda": "cuda: NVIDIA, run here"}
    assert values["known stack"] == stacks.get(device, "lockstep-npu: lockstep on Ascend, documented upstream")
    if device == "npu":
        assert values["npu devices"] == "2 x 910B2 (64 GiB)"
        assert (values["driver"], values["firmware"], values["CANN"]) == (
            "26.0.rc1",
            "7.1.0.7.220",
            f"9.1.0 in {TOOLKIT}",
        )
        assert values["LD_LIBRARY_PATH"] == "2 folders, CANN's among them"


def test_what_auto_takes() -> None:
    device, why = choose_device(gather(A2.having(packages={"torch_npu": None})))
    assert (device, "torch_npu" in why) == ("cpu", True)
    assert choose_device(gather(H200.having(packages={"torch": "2.13.0+cpu"})))[0] == "cpu"
    assert choose_device(gather(CPU.having(packages={"torch_npu": "2.13.0"})))[0] == "cpu"
    # A container was given one of the two devices that npu-smi shows.
    assert gather(A2.having(times={"/dev/davinci4": 0.0, "/dev/davinci_manager": 0.0})).npu_count == 1


def test_the_table_fits_80_columns() -> None:
    machine = A2.having(
        packages={"torch_npu": "2.10.0.post4", "flash_attn": "2.8.0", "vllm": "0.23.0", "vllm-ascend": "0.22.1rc1"},
        variables={NOSET: "1", "HCCL_SOCKET_IFNAME": ", ".join(["enp189s0f0"] * 9)},
    )
    lines = [line.plain for line in table_lines(examine(machine), 80)]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "✗ torch_npu             2.10.0.post4" in text
    assert f"! {NOSET}" in text
    plain = list(plain_lines(examine(machine)))
    assert plain[-1] == "device npu (auto: torch_npu, and Ascend devices: 2): 2 broken, 2 warnings"
    assert sum(line.startswith("broken") and " -> " in line for line in plain) == 2


# Stacks -------------------------------------------------------------------------------------------------------------


def test_every_stack_can_be_printed() -> None:
    assert list(known_stacks()) == list(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    for stack in known_stacks().values():
        assert stack.status in ("documented upstream", "contract-tested here", "run here")
        assert stack.source
        text = pins_text(stack)
        asked = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert [line.partition(";")[0] for line in asked] == [name + pin for name, pin in stack.packages.items()]
        assert ("Not yet run on Ascend hardware" in text) == (stack.device == "npu")
        places = [text.index(step.run) for step in stack.steps]
        assert places == sorted(places)


def test_the_steps_that_people_miss() -> None:
    vllm = pins_text(stack_named("ascend-vllm-0.7.3"))
    assert vllm.index("VLLM_TARGET_DEVICE=empty") < vllm.index("COMPILE_CUSTOM_KERNELS=1")
    assert "too old for lockstep itself" in vllm
    assert "# engines: vllm 0.7.3, vllm-ascend 0.7.3\n" in vllm
    assert "# environment: VLLM_USE_V1=1\n" in pins_text(stack_named("ascend-vllm-0.8.5"))
    sglang = pins_text(stack_named("ascend-sglang-a3"))
    removed, last = sglang.index("uninstall -y torchvision timm triton"), sglang.index("--force-reinstall")
    assert sglang.index("pyproject_other.toml") < sglang.index("build.sh -a memory-saver") < removed < last
    assert "# must not be installed: torchvision, timm, triton\n" in sglang
    assert "too old for lockstep" not in pins_text(stack_named("lockstep-npu"))
    with pytest.raises(Refusal, match=r"ascend-vllm-0\.23"):
        stack_named("ascend")


def test_a_documented_stack_is_recognised() -> None:
    machine = A2.having(
        python="3.10.17",
        files={INSTALL_INFO: output("install-8.1.RC1.info")},
        packages={
            "torch": "2.5.1",
            "torch_npu": "2.5.1",
            "transformers": "4.52.4",
            "vllm": "0.8.5.post1+empty",
            "vllm-ascend": "0.8.5rc1",
        },
    )
    rows = {row.name: row for row in examine(machine).rows}
    assert rows["known stack"].value == "ascend-vllm-0.8.5: vLLM 0.8.5 on Atlas A2, documented upstream"
    other_cann = machine.having(files={INSTALL_INFO: output("install-8.3.RC2.info")})
    assert next(row for row in examine(other_cann).rows if row.name == "known stack").value is None
    # It is known, and still too old for lockstep.
    assert (rows["torch"].verdict, rows["transformers"].verdict, rows["CANN"].verdict) == ("broken", "broken", "ok")


def test_the_minimum_is_that_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, version in MINIMUM.items():
        assert f'"{name}>={version}' in project
    assert f'requires-python = ">={PYTHON[0]},<3.{int(PYTHON[1][2:]) + 1}"' in project
    constraints = (ROOT / "constraints-npu.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in constraints if line.startswith("torch=="))
    torch_npu = torch.replace("torch", "torch_npu")
    assert f'npu = ["{torch}", "{torch_npu}"]' in project
    pins = known_stacks()["lockstep-npu"].packages
    assert (f"torch{pins['torch']}", f"torch_npu{pins['torch_npu']}") == (torch, torch_npu)


# The command --------------------------------------------------------------------------------------------------------


def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import torch` raises."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken on purpose')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_the_command_works_when_torch_does_not(tmp_path: Path) -> None:
    done = cold_lockstep("doctor", "--device", "cpu", "--json", **without_torch(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {row["name"] for row in json.loads(done.stdout)["rows"]} >= {"python", "torch", "disk", "known stack"}
    broken = cold_lockstep("doctor", "--device", "npu", **without_torch(tmp_path))
    assert broken.returncode == (0 if Machine().version("torch_npu") else 1), broken.stdout


@pytest.mark.slow
def test_pins_and_refusals_of_the_command(tmp_path: Path) -> None:
    assert cold_lockstep("doctor", "--pins", "cpu").stdout.startswith("# cpu: CPU\n")
    for words in (["--pins", "nothing"], ["--device", "gpu"]):
        done = cold_lockstep("doctor", *words, **without_torch(tmp_path))
        assert done.returncode == 2
        assert words[1] in done.stderr
        assert "Traceback" not in done.stderr


def test_help_does_not_load_the_doctor() -> None:
    code = (
        "import sys; sys.argv = ['lockstep', '--help']\nfrom lockstep.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    assert not any('doctor' in name for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_this_machine_shows_the_user_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    # lockstep sets this one itself, in the running process only.
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr(Machine, "read", lambda self, path: "HOME=/root\0PATH=/bin\0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in Machine().variables
    monkeypatch.setattr(Machine, "read", lambda self, path: "TORCH_DEVICE_BACKEND_AUTOLOAD=0\0PATH=/bin\0")
    assert Machine().variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "seconds", 0.2)
    answer = Machine().run("sleep", "1800")
    assert answer is not None
    assert answer.status == 124
    assert Machine().run("no-such-command-here") is None
