"""The known stacks: each names its CANN and driver, each is recognised, and an old one is never upgraded in place."""

from __future__ import annotations

import json

import pytest
from recorded_machine import A2, INSTALL_INFO, RecordedMachine, output

from lockstep.doctor.doctor_checks import Diagnosis
from lockstep.doctor.doctor_report import Fact, as_json, examine, plain_lines, table_lines
from lockstep.doctor.local_machine import CommandOutput
from lockstep.doctor.version_stacks import Stack, cann_fits, driver_for, known_stacks, older, pins_text

ASCEND = [stack for stack in known_stacks().values() if stack.device == "npu"]
OLD = [stack for stack in ASCEND if stack.too_old_for_lockstep]


def machine_of(stack: Stack) -> RecordedMachine:
    """A machine on which the stack's guide was followed to the letter."""
    versions = {name: pin.lstrip("=>") for name, pin in stack.packages.items()}
    engines = {name: version for name, version in stack.engines.items() if version}
    python = stack.python.lstrip("=>") or "3.10"
    return A2.having(
        python=f"{python}.1" if not older(python, "3.10") else "3.10.1",
        files={INSTALL_INFO: f"version={stack.cann[0].lstrip('>=')}\n"},
        # What the guide does not pin is what its other packages bring: of their time, so too old for lockstep.
        packages={"transformers": "4.51.3", "peft": "0.15.2", **versions, **engines},
    )


def rows_of(machine: RecordedMachine) -> dict[str, Fact]:
    return {row.name: row for row in examine(machine, "npu").rows}


@pytest.mark.parametrize("stack", ASCEND, ids=lambda stack: stack.name)
def test_every_ascend_stack_names_its_cann_and_its_range_of_drivers(stack: Stack) -> None:
    assert stack.cann
    oldest, newest = stack.hdk
    assert not older(newest, oldest)
    text = pins_text(stack)
    assert f"# CANN: {', '.join(stack.cann)}\n" in text
    assert f"# HDK (driver and firmware): {oldest}" in text
    # Another stack may have seen an older driver with the same CANN.
    known = driver_for(stack.cann[0].lstrip(">="))
    assert known is not None
    assert not older(oldest, known)


@pytest.mark.parametrize("stack", OLD, ids=lambda stack: stack.name)
def test_the_machine_of_a_guide_is_recognised(stack: Stack) -> None:
    value = rows_of(machine_of(stack))["known stack"].value
    assert value is not None
    assert value.startswith(f"{stack.name}: ")


@pytest.mark.parametrize(
    ("cann", "packages", "name"),
    [
        ("8.0.RC3", {"torch": "2.3.1", "torch_npu": "2.3.1.post2"}, "ascend-torch-2.3"),
        (
            "8.0.0",
            {"torch": "2.5.1", "torch_npu": "2.5.1.dev20250320", "transformers": "4.49.0", "vllm": "0.7.3"},
            "ascend-transformers-4.49",
        ),
        (
            "8.2.RC1",
            {"torch": "2.7.1", "torch_npu": "2.7.1", "vllm": "0.9.1+empty", "vllm-ascend": "0.9.1"},
            "ascend-vllm-0.9.1",
        ),
    ],
)
def test_stacks_of_the_guides_as_pip_shows_them(cann: str, packages: dict[str, str], name: str) -> None:
    machine = A2.having(files={INSTALL_INFO: f"version={cann}\n"}, packages=packages)
    rows = rows_of(machine)
    assert (rows["known stack"].value or "").startswith(f"{name}: ")
    assert rows["CANN"].verdict == "ok"


def remedies(rows: dict[str, Fact]) -> list[Diagnosis]:
    return [finding for name in ("torch", "torch_npu", "transformers", "peft") for finding in rows[name].findings]


@pytest.mark.parametrize("stack", OLD, ids=lambda stack: stack.name)
@pytest.mark.parametrize("without", [(), ("torch_npu",), ("peft",)], ids=["whole", "no torch_npu", "no peft"])
def test_an_old_stack_is_left_alone(stack: Stack, without: tuple[str, ...]) -> None:
    found = remedies(rows_of(machine_of(stack).having(packages=dict.fromkeys(without))))
    assert {finding.row for finding in found} >= {"torch", "transformers", "peft", *without}
    for finding in found:
        assert finding.verdict == "broken"
        assert "keep this environment" in finding.remedy
        assert 'python3 -m venv .venv && .venv/bin/pip install -c constraints-npu.txt -e ".[npu]"' in finding.remedy
        assert "-U" not in finding.remedy


def test_two_old_packages_that_do_not_fit_are_left_alone_too() -> None:
    found = remedies(rows_of(A2.having(packages={"torch": "2.5.1", "torch_npu": "2.3.1.post2"})))
    assert all("keep this environment" in finding.remedy for finding in found)
    assert any("built for torch 2.3.1" in finding.why for finding in found)


@pytest.mark.parametrize(
    ("cann", "verdict"),
    [("8.1.RC1", "broken"), ("8.5.0", "broken"), ("9.0.0", "warning"), ("9.1.0", "ok"), ("9.2.0", "warning")],
)
def test_the_cann_of_lockstep_s_own_stack(cann: str, verdict: str) -> None:
    rows = rows_of(A2.having(files={INSTALL_INFO: f"version={cann}\n"}))
    assert rows["CANN"].verdict == verdict
    assert (rows["known stack"].value is not None) == (verdict == "ok")


@pytest.mark.parametrize(
    ("torch_npu", "cann", "driver", "verdict", "why"),
    [
        # What nobody can run was called healthy.
        ("2.12.0", "8.1.RC1", "24.1.0", "broken", "documented with CANN 9.1.0, but CANN 8.1.RC1 is installed"),
        ("2.14.0", "8.3.RC1", "25.3.RC1", "broken", "torch_npu 2.12.0 already needs CANN 9.1.0"),
        ("2.13.0", "8.1.RC1", "26.0.rc1", "broken", "torch_npu 2.12.0 already needs CANN 9.1.0"),
        # Pairs of TorchNPU's own table were warned of.
        ("2.7.1", "8.3.RC1", "25.3.RC1", "ok", ""),
        ("2.6.0", "8.2.RC1", "25.2.0", "ok", ""),
        ("2.7.1.post8", "9.1.0", "26.0.rc1", "ok", ""),
        ("2.12.0", "9.1.0", "26.0.rc1", "ok", ""),
        # A version without an entry is unknown, never ok.
        ("2.13.0", "9.1.0", "26.0.rc1", "unknown", "table does not contain torch_npu 2.13.0"),
        ("2.14.0", "9.2.0", "26.1.0", "unknown", "table does not contain torch_npu 2.14.0"),
        ("2.7.1.post8", "8.3.RC1", "25.3.RC1", "broken", "documented with CANN 9.1.0, but CANN 8.3.RC1 is installed"),
        ("2.8.0", "8.5.0", "25.5.0", "warning", "documented with CANN 8.3.RC1, but CANN 8.5.0 is installed"),
    ],
)
def test_pairs_of_torch_npu_and_cann(torch_npu: str, cann: str, driver: str, verdict: str, why: str) -> None:
    table = output("npu-smi-23.0.3.txt").replace("23.0.3", driver)
    machine = A2.having(
        files={INSTALL_INFO: f"version={cann}\n"},
        packages={"torch": torch_npu.split(".post")[0], "torch_npu": torch_npu},
        commands={"npu-smi info": CommandOutput(0, table)},
    )
    row = rows_of(machine)["CANN"]
    assert row.verdict == verdict
    assert why in " ".join(finding.why for finding in row.findings)


def test_a_cann_whose_driver_nobody_names_is_unknown() -> None:
    rows = rows_of(
        A2.having(files={INSTALL_INFO: "version=8.5.0\n"}, packages={"torch": "2.9.0", "torch_npu": "2.9.0"})
    )
    assert rows["CANN"].verdict == "ok"
    assert rows["driver"].verdict == "unknown"
    assert "needs root" in rows["driver"].findings[0].remedy


@pytest.mark.parametrize("stack", OLD, ids=lambda stack: stack.name)
def test_the_first_line_says_that_lockstep_cannot_train_there(stack: Stack) -> None:
    report = examine(machine_of(stack), "npu")
    torch_npu = stack.packages.get("torch_npu", "").lstrip("=")
    for lines in (list(plain_lines(report)), [str(line) for line in table_lines(report, 200)]):
        told = f"lockstep cannot train on this stack (torch_npu {torch_npu}, CANN {stack.cann[0]})"
        assert lines[0].startswith(told)
        assert [line[:2] for line in lines[1:4]] == ["1.", "2.", "3."]
        text = " ".join(lines[1:4])
        assert "driver HDK 26.0.rc1 or newer; this needs root" in text
        assert "lockstep compare" in text
        assert "lockstep_record.py" in text
    assert json.loads(as_json(report))["cannot_train"] == list(report.cannot_train)
    assert examine(A2, "npu").cannot_train == ()


def test_tensordict_on_arm_and_the_plain_torch() -> None:
    old = {"torch": "2.5.1", "torch_npu": "2.5.1", "tensordict": "0.10.0"}
    assert rows_of(A2.having(packages=old))["tensordict"].findings[0].remedy == "pip install tensordict==0.8.3"
    assert rows_of(A2.having(packages={**old, "tensordict": "0.8.3"}))["tensordict"].verdict == "ok"
    assert rows_of(A2.having(packages={"tensordict": "0.10.0"}))["tensordict"].verdict == "unknown"
    assert rows_of(A2.having(packages=old, architecture="x86_64"))["tensordict"].verdict == "ok"
    # PyPI has CUDA builds of every version for x86, and from 2.11 on for Arm.
    for architecture, version in (("x86_64", "2.7.1"), ("x86_64", "2.12.0"), ("aarch64", "2.11.0")):
        plain = rows_of(A2.having(architecture=architecture, packages={"torch": version}))["torch"].findings
        assert any("CUDA and triton" in each.why and "whl/cpu" in each.remedy for each in plain)
        assert not rows_of(A2.having(architecture=architecture))["torch"].findings
    old_arm = rows_of(A2.having(packages={"torch": "2.10.0"}))["torch"].findings
    assert not any("CUDA and triton" in each.why for each in old_arm)


def test_listed_cann_versions() -> None:
    assert cann_fits("8.1.rc1", ("8.0.0", "8.1.RC1"))
    assert not cann_fits("8.2.RC1", ("8.1.RC1",))
    assert cann_fits("9.2.0", (">=9.1.0",))
    assert not cann_fits("9.1.RC1", (">=9.1.0",))
