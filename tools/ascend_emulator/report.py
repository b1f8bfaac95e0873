"""What ran: each operator, how often, and what torch_npu has for it on a device.

With ASCEND_EMULATOR_REPORT=FOLDER in the environment, every interpreter that loads torch_npu leaves a file there.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "ASCEND_EMULATOR_REPORT"

# npu kernel: torch_npu registers one. fused: an operator of torch_npu's own. cpu fallback: torch_npu has none, warns
# and computes on the host.
Kind = Literal["npu kernel", "fused", "cpu fallback"]


@dataclass(frozen=True)
class OperatorCalls:
    name: str
    calls: int
    kind: Kind


def operators() -> list[OperatorCalls]:
    """Everything that ran in this process since its start or `clear`, by kind and name."""
    from ascend_emulator.kernels import aten, reference

    found = [OperatorCalls(name, calls, "npu kernel") for name, calls in aten.replaced_calls().items()]
    found += [OperatorCalls(f"npu::{name}", calls, "fused") for name, calls in reference.calls.items()]
    found += [OperatorCalls(name, calls, "cpu fallback") for name, calls in aten.fallback_calls().items()]
    return sorted(found, key=lambda operator: (operator.kind, operator.name))


def fallbacks() -> dict[str, int]:
    """Operators without an NPU kernel that ran, with their calls."""
    return {operator.name: operator.calls for operator in operators() if operator.kind == "cpu fallback"}


def clear() -> None:
    from ascend_emulator.kernels import aten, reference

    aten.clear_calls()
    reference.calls.clear()


def table() -> str:
    """One line an operator, fall-backs first: they are what costs time on a device."""
    ran = sorted(operators(), key=lambda operator: (operator.kind != "cpu fallback", operator.kind, operator.name))
    return "\n".join(f"{operator.kind:<13}{operator.calls:>8}  {operator.name}" for operator in ran)


def write_at_exit() -> None:
    """Leaves this process's operators in the folder that the environment names."""
    folder = os.environ.get(VARIABLE)
    if folder:
        import atexit

        atexit.register(write, Path(folder))


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"operators-{os.getpid()}.json"
    path.write_text(json.dumps([asdict(operator) for operator in operators()], indent=1), encoding="utf-8")
    return path
