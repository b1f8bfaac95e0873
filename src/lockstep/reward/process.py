"""The part `process`: a process reward model judges each step of a response."""

from __future__ import annotations

# Beside the weights of a process reward model: the words it was trained with.
PROCESS = "process_reward.json"
