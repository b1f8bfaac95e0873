"""Converts command lines of verl 0.4 and 0.9: `main_ppo` and the SFT trainers."""
