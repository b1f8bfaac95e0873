"""Converts command lines and scripts of verl and OpenRLHF to recipes, with a report on every setting."""
