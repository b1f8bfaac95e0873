"""Nothing that torch_npu asks of CANN is missing in silence: it is emulated, fails and says so, or is listed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_npu

from ascend_emulator import build, stubs, wheel
from ascend_emulator.problems import CannotEmulate

from .processes import python

pytestmark = pytest.mark.ascend


@pytest.fixture(scope="module")
def required() -> wheel.Requirements:
    return wheel.requirements(wheel.installed())


def stub_names() -> set[str]:
    """The functions of the generated file, read from its text."""
    lines = (build.HOME / "objects" / "stubs.cpp").read_text().splitlines()
    return {line.split("(")[0].split()[-1] for line in lines if line.startswith(("int ", "void* "))}


def test_every_symbol_of_the_wheel_is_there(required: wheel.Requirements) -> None:
    there: set[str] = set()
    for name in ("libascendcl.so", "libhccl.so"):
        there |= wheel.dynamic_symbols(build.LIBRARIES / name, "--defined-only")
    assert len(required.symbols) == 84
    assert required.symbols <= there


def test_every_library_of_the_wheel_is_there(required: wheel.Requirements) -> None:
    assert {"libhccl.so", "libascendcl.so", "libge_runner.so"} <= required.libraries
    for name in required.libraries:
        assert (build.LIBRARIES / name).exists(), name


def test_the_harmless_list_holds_nothing_else() -> None:
    assert stubs.HARMLESS.keys() <= stub_names()
    assert all(reason for reason in stubs.HARMLESS.values())


def test_stubs_fail_and_name_themselves() -> None:
    """Each of them is called, in a child, so that what it says can be read."""
    failing = sorted(stub_names() - stubs.HARMLESS.keys())
    assert len(failing) == 42
    code = f"""
import ctypes
library = ctypes.CDLL({str(build.LIBRARIES / "libascendcl.so")!r})
for name in {failing!r}:
    print(name, getattr(library, name)())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answers = dict(line.split() for line in done.stdout.splitlines())
    assert sorted(answers) == failing
    for name, answer in answers.items():
        assert answer == ("0" if name.startswith(("aclCreate", "aclopCreate")) else "500000"), name
        assert f"[ascend emulator] not emulated: {name}\n" in done.stderr


def test_harmless_stubs_succeed_and_speak_when_traced() -> None:
    library = ctypes.CDLL(str(build.LIBRARIES / "libascendcl.so"))
    assert [getattr(library, name)() for name in stubs.HARMLESS] == [0] * len(stubs.HARMLESS)
    code = f"import ctypes; ctypes.CDLL({str(build.LIBRARIES / 'libascendcl.so')!r}).aclmdlInitDump()"
    assert "ignored: aclmdlInitDump" in python("-c", code, ASCEND_EMULATOR_TRACE="1").stderr
    assert python("-c", code).stderr == ""


def test_an_operator_that_is_nowhere_fails() -> None:
    """torch_npu's own words: the emulated operator library simply does not have it."""
    numbers = torch.ones(2, 2, dtype=torch.int32, device="npu")
    with pytest.raises(RuntimeError, match=r"aclnnMoeInitRouting or .* not in libopapi\.so"):
        torch_npu.npu_moe_init_routing(torch.ones(2, 2, device="npu"), numbers, numbers, 2)


def test_missing_things_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None if "++" in name else f"/usr/bin/{name}")
    with pytest.raises(CannotEmulate, match=r"no C\+\+ compiler"):
        build.find_compiler()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(CannotEmulate, match="riscv64"):
        build.find_compiler()
    monkeypatch.setattr(wheel.metadata, "version", lambda name: "2.12.1")
    with pytest.raises(CannotEmulate, match=r"torch 2\.12\.1 is installed"):
        wheel.installed()


def test_a_changed_source_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build.is_built()
    other = tmp_path / "new.cpp"
    other.write_text("// nothing\n")
    known = build.sources()
    monkeypatch.setattr(build, "sources", lambda: [*known, other])
    assert not build.is_built()
