"""Where things are kept that can be made again at any time: deleting the folder, or a part of it, costs time alone."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`LOCKSTEP_CACHE`, or a folder in the user's own cache. RuntimeError where there is no home."""
    own = os.environ.get("LOCKSTEP_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
