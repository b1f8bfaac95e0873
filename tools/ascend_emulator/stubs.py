"""C source of the CANN entry points that are not emulated.

A stub that returned success would turn a missing piece into a passing test. So each one fails and names itself, except
the few below that a normal run calls and whose effect no program can see.
"""

from __future__ import annotations

from collections.abc import Iterable

ERROR = 500000  # ACL_ERROR_INTERNAL_ERROR

HARMLESS: dict[str, str] = {
    "aclmdlInitDump": "prepares writing operator inputs to files, which nobody asked for",
    "aclmdlSetDump": "sets up the same",
    "aclmdlFinalizeDump": "ends the same",
    "aclrtDeviceEnablePeerAccess": "all emulated devices share the host's memory",
    "MsprofGetHashId": "belongs to the profiler of CANN, which is off",
    "MsprofRegisterCallback": "belongs to the profiler of CANN, which is off",
    "MsprofReportAdditionalInfo": "belongs to the profiler of CANN, which is off",
    "MsprofReportApi": "belongs to the profiler of CANN, which is off",
    "MsprofReportCompactInfo": "belongs to the profiler of CANN, which is off",
    "MsprofSysCycleTime": "belongs to the profiler of CANN, which is off",
}

# These hand out an object, and say that they cannot by handing out none.
_MAKERS = ("aclCreate", "aclopCreate")

_HEAD = """// Generated from the symbols that the installed torch_npu links to.
#include <stdio.h>
#include <stdlib.h>
"""


def source(missing: Iterable[str]) -> str:
    """One C function for each entry point that no file of the emulator defines."""
    return _HEAD + "\n".join(_function(name) for name in sorted(missing)) + "\n"


def _function(name: str) -> str:
    if name in HARMLESS:
        say = f'if (getenv("ASCEND_EMULATOR_TRACE")) {_say("ignored", name)}'
        return f"int {name}(void) {{ {say} return 0; }}"
    say = _say("not emulated", name)
    if name.startswith(_MAKERS):
        return f"void* {name}(void) {{ {say} return NULL; }}"
    return f"int {name}(void) {{ {say} return {ERROR}; }}"


def _say(what: str, name: str) -> str:
    return f'fprintf(stderr, "[ascend emulator] {what}: {name}\\n");'
