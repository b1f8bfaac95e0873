"""Who loads torch_npu: lockstep, when the device is asked for, and not `import torch` on its own.

An installed torch_npu registers itself with torch's backend entry points. Where CANN is missing, broken or of another
version, `import torch` then raises for everybody, also for a run on another device, and no reason can be given: a
failed `import torch` cannot be repeated in the same process. So the automatic load is put off, and `device/npu.py`
imports torch_npu itself, where a failure is a reason and not a traceback.

A value that the user has set is left alone, and after a successful load the variable is as it was, so that child
processes behave as they would without lockstep.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_deferred = False


def defer() -> None:
    """Keep `import torch` from loading torch_npu, if that is installed and torch is not imported yet."""
    global _deferred
    if VARIABLE in os.environ or "torch" in sys.modules or find_spec("torch_npu") is None:
        return
    os.environ[VARIABLE] = "0"
    _deferred = True


def restore() -> None:
    """Undo `defer` for the processes started from here on."""
    global _deferred
    if _deferred:
        os.environ.pop(VARIABLE, None)
        _deferred = False
