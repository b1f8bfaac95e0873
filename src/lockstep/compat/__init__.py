"""Converts command lines and scripts of verl and OpenRLHF to lockstep recipes, with a report on every setting."""
