"""Starts a program, unchanged, in an environment where torch_npu finds the emulated CANN.

Everything is in environment variables, so the children of the program (the ranks of torch.distributed.run, the workers
of pytest-xdist, spawned processes) are in it too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ascend_emulator import build
from ascend_emulator.problems import CannotEmulate


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base`, and what makes torch_npu run on the emulated CANN."""
    return {
        **base,
        # Read by the loader when a process starts: the reason why a program has to be started and not just prepared.
        "LD_LIBRARY_PATH": _in_front(base.get("LD_LIBRARY_PATH", ""), build.LIBRARIES),
        # What CANN's set_env.sh sets as well; torch_npu prints a warning to stdout without them.
        "ASCEND_HOME_PATH": str(build.HOME),
        "ASCEND_OPP_PATH": str(build.HOME / "opp"),
        # Holds sitecustomize.py, which every interpreter imports at its start, and this package.
        "PYTHONPATH": _in_front(base.get("PYTHONPATH", ""), build.HERE / "site", build.HERE.parent),
        # Otherwise torch_npu hands aclnn and HCCL calls to a separate thread while the host kernels work on the same
        # memory at once. Nothing would fail; gradients would be wrong.
        "TASK_QUEUE_ENABLE": "0",
        # For the evidence that runs leave: these were not on hardware.
        "LOCKSTEP_EMULATED": "npu",
    }


def run(arguments: Sequence[str]) -> NoReturn:
    """Becomes `python ARGUMENTS` in that environment."""
    if not build.is_built():
        raise CannotEmulate(f"not built for this checkout: {sys.executable} tools/ascend_emulator build")
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))


def _in_front(paths: str, *new: object) -> str:
    wanted = [str(path) for path in new]
    return os.pathsep.join([*wanted, *(path for path in paths.split(os.pathsep) if path and path not in wanted)])
