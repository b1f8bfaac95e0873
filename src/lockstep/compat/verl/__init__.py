"""verl's command lines, of the versions 0.4 and 0.9: `main_ppo` and its SFT trainers."""
