"""How a program and its children get the emulated NPU, and what they leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ascend_emulator import build, launch
from ascend_emulator.problems import CannotEmulate

from .processes import python

pytestmark = pytest.mark.ascend


def test_the_environment_keeps_what_was_there_and_does_not_grow() -> None:
    before = {"LD_LIBRARY_PATH": "/opt/lib", "PYTHONPATH": "/opt/python", "HOME": "/root", "TASK_QUEUE_ENABLE": "2"}
    once = launch.environment(before)
    assert once["LD_LIBRARY_PATH"] == f"{build.LIBRARIES}{os.pathsep}/opt/lib"
    assert once["PYTHONPATH"].split(os.pathsep) == [str(build.HERE / "site"), str(build.HERE.parent), "/opt/python"]
    assert once["TASK_QUEUE_ENABLE"] == "0"
    assert once["HOME"] == "/root"
    assert launch.environment(once) == once
    assert before["PYTHONPATH"] == "/opt/python"


def test_what_is_not_built_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_built", lambda: False)
    with pytest.raises(CannotEmulate, match="tools/ascend_emulator build"):
        launch.run(["-c", "pass"])


def test_an_interpreter_without_torch_npu_pays_nothing() -> None:
    code = (
        "import sys; print(any(name.startswith(('torch', 'numpy', 'ascend_emulator.kernels')) for name in sys.modules))"
    )
    assert python("-c", code).stdout.split() == ["False"]


# For every day the ranks of test_emulator_hccl.py import torch first.
@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "torch_npu")), "lockstep.device, torch_npu"],
)
def test_whoever_imports_first_gets_the_kernels(first: str) -> None:
    done = python("-c", f"import {first}; import torch; print((torch.ones(2, device='npu') + 1).tolist())")
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr


@pytest.mark.slow
def test_a_spawned_process_has_the_kernels_too(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        "import multiprocessing, torch\n"
        "def work(queue):\n"
        "    queue.put((torch.ones(2).npu() + 1).tolist())\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n"
        "    child.start()\n"
        "    print(queue.get(timeout=1800))\n"
        "    child.join()\n"
    )
    assert python(script).stdout.strip() == "[2.0, 2.0]"


def test_a_process_leaves_its_report(tmp_path: Path) -> None:
    code = "import torch; torch.special.bessel_j0(torch.ones(2).npu()) + 1"
    python("-c", code, ASCEND_EMULATOR_REPORT=str(tmp_path))
    (path,) = tmp_path.glob("operators-*.json")
    kinds = {row["name"]: row["kind"] for row in json.loads(path.read_text())}
    assert kinds["aten::special_bessel_j0.out"] == "cpu fallback"
    assert kinds["aten::add.Tensor"] == "npu kernel"
