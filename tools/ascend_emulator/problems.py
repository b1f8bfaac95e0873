"""The one error of the tool: the emulator cannot be used here, and why."""

from __future__ import annotations


class CannotEmulate(Exception):
    """What is missing on this machine, in one plain sentence."""
