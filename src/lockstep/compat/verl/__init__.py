"""Converts command lines of `main_ppo` and of the SFT trainers, for verl 0.4 and 0.9."""

from lockstep.compat.peer_modules import offer

offer("verl")
