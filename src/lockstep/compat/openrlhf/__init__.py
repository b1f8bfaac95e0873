"""Converts command lines of OpenRLHF 0.7 (flat flags) and 0.11 (dotted flags)."""

from lockstep.compat.peer_modules import offer

offer("openrlhf")
