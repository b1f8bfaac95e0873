"""What the codes in errors of CANN, HCCL and torch_npu mean, and what helps. To extend it, add a row."""

from __future__ import annotations

import re
from typing import NamedTuple


class Known(NamedTuple):
    pattern: str
    """Regular expression that the message holds; codes stand alone, so that 207001 is not found in 1207001."""
    cause: str
    remedy: str


def _code(*codes: str) -> str:
    return rf"(?<![0-9A-Za-z])(?:{'|'.join(codes)})(?![0-9])"


TABLE: tuple[Known, ...] = (
    Known(
        _code("EI0006"),
        "HCCL could not connect the processes: a socket to another rank timed out",
        "check that every rank started and none died first (look at the other logs), that HCCL_SOCKET_IFNAME names the "
        "right network card, that the ports from HCCL_IF_BASE_PORT (60000) on are free, and raise HCCL_CONNECT_TIMEOUT",
    ),
    Known(
        _code("EI0002"),
        "a rank waited too long for another one inside a collective",
        "one rank is slow, hangs or died: look at the other logs; raise HCCL_EXEC_TIMEOUT if the work is that long",
    ),
    Known(
        _code("EI0001", "EI0004"),
        "HCCL does not accept an environment variable or the rank table",
        "check the HCCL_* variables and RANK_TABLE_FILE (torchrun needs none) named in the message",
    ),
    Known(
        _code("507015", "507018", "507035"),
        "a kernel stopped with an exception on the device (AI Core, AI CPU or vector core)",
        "often an index out of range or a shape the operator does not take: set ASCEND_LAUNCH_BLOCKING=1 to find the "
        "operator, and look for the first EZ9999 line of the log (ASCEND_PROCESS_LOG_PATH)",
    ),
    Known(
        _code("507014", "507017", "507034", "507046"),
        "a kernel did not finish in time",
        "too much work in one call, or a device in trouble: lower batch.tokens, and look at `npu-smi info`",
    ),
    Known(
        _code("207001", "207018") + "|NPU out of memory",
        "the device has no memory left",
        "lower batch.tokens or rollout.cache_gb, set model.gradient_checkpointing, train an adapter (model.lora.rank), "
        "or use more devices; `npu-smi info` shows whether another process holds memory",
    ),
    Known(
        _code("107001"),
        "there is no device of that number",
        "ASCEND_RT_VISIBLE_DEVICES must name existing devices in ascending order, and torchrun must start no more "
        "processes than devices are visible",
    ),
    Known(
        _code("107002", "107003"),
        "the call reached no device context, or a stream of another one",
        "set the device before anything else in a process, and do not fork after the device was used: spawn",
    ),
    Known(
        _code("EZ9999", "EZ1001", "EZ3003"),
        "an operator failed inside CANN",
        "the lines after the code name the operator and the shape it refused; where torch, torch_npu and CANN do not "
        "belong together this is the usual symptom: run `lockstep doctor`",
    ),
    Known(
        _code("E19999", "E40021", "EE9999", "EE1001"),
        "CANN failed inside its runtime or graph engine",
        "run `lockstep doctor`: driver, CANN and torch_npu must belong together; the device log has the first cause",
    ),
    Known(
        r"libhccl\.so|libascendcl\.so",
        "the CANN libraries are not found",
        "install the CANN toolkit and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to do without",
    ),
    Known(
        r"fall back to run on the CPU",
        "an operator without a kernel for this device ran on the CPU",
        "use another version of torch_npu, or accept it: run.allow_fallback",
    ),
)


def explanation(message: str) -> str | None:
    """Cause and remedy of every row that the message holds; None where nothing is known of it."""
    found = [known for known in TABLE if re.search(known.pattern, message)]
    if not found:
        return None
    return "\n".join(f"what it means: {known.cause}\n-> {known.remedy}" for known in found)
