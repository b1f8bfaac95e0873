"""How many seconds what hangs is given. Only that: a busy machine of half the speed must never get there."""

HANG = 1800
