"""How the CPU's worker threads wait: asleep, not spinning.

GNU OpenMP lets a thread that waits for the others spin on its core. Where that core is shared (a second process, a
virtual machine), the one waited for cannot run. Measured once with the tiny model on two cores, tokens a second: beside
one busy loop 4,400 spinning, 7,200 asleep (beside another training, uncontrolled: 430 and 6,600); alone on the machine
15,800 spinning, 12,700 asleep. Whoever has the machine alone and trains something as small sets OMP_WAIT_POLICY=ACTIVE.
"""

from __future__ import annotations

import os
import sys


def wait_asleep() -> None:
    """Must come before torch is loaded: the library reads the variable once. The user's own setting stays."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
