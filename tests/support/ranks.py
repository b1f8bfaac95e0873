"""The processes of a run, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

from hang import wait_until


def ranks_of(run: Path) -> dict[int, int]:
    """Processes of a run by rank: those that were told its folder and a rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            told = dict(one.split("=", 1) for one in (folder / "environ").read_text().split("\0") if "=" in one)
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, UnicodeDecodeError):
            continue
        if f"run.folder={run}" in words and "RANK" in told and state != "Z":
            found[int(told["RANK"])] = int(folder.name)
    return found


def assert_none_left(run: Path) -> None:
    wait_until(lambda: not ranks_of(run))
