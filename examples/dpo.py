"""DPO written out: a loss of one's own on the log-probabilities of two responses and on a column of the example.

lockstep tiny model
python examples/dpo.py model
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import logsigmoid

import lockstep

PAIRS = [
    ("How are you?", "Fine, thank you.", "Go away."),
    ("Can you help me?", "Of course.", "No."),
    ("Good morning!", "Good morning to you.", "Is it?"),
]


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, *, reference: tuple[float, float]) -> torch.Tensor:
    """-log sigmoid(beta h), h being how much more than the reference the policy prefers the chosen response."""
    return -logsigmoid(0.1 * ((chosen.sum() - reference[0]) - (rejected.sum() - reference[1])))


def main(folder: str, steps: int = 10) -> list[float]:
    """The loss of each step; it starts at log 2."""
    model = lockstep.load(folder, lr=1e-4, reference=True)
    pairs = [model.pair(*row) for row in PAIRS]
    # The reference never changes, so it is asked once: two vectors for each pair.
    said = [float(logprobs.sum()) for logprobs in model.logprobs(pairs, reference=True)]
    pairs = [pair.having(reference=(said[2 * i], said[2 * i + 1])) for i, pair in enumerate(pairs)]
    losses = []
    for step in range(steps):
        losses.append(model.forward_backward(pairs, dpo)["loss"])
        model.optim_step()
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
