"""How the CPU's worker threads wait: asleep, not spinning.

GNU OpenMP lets a thread that waits for the others spin on its core. Where that core is shared (a second process, a
virtual machine), the one waited for cannot run: two threads on two cores beside one busy process were measured at a
twentieth of the speed that sleeping ones have. Alone on the machine the difference is within the noise.
"""

from __future__ import annotations

import os
import sys


def wait_asleep() -> None:
    """Must come before torch is loaded: the library reads the variable once. The user's own setting stays."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
