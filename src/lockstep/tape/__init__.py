"""The tape of a run: the recorded numbers that another device needs to repeat it."""
