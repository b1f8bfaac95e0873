"""Supervised fine-tuning: the tiny model learns nine sums by heart.

lockstep tiny model
python examples/sft.py model
"""

from __future__ import annotations

import sys

import lockstep

ROWS = [(f"{a}+1=", str(a + 1)) for a in range(9)]


def main(folder: str, steps: int = 50) -> list[float]:
    """The loss of each step."""
    model = lockstep.load(folder, lr=3e-3)
    rows = [model.example(prompt, response) for prompt, response in ROWS]
    losses = []
    for step in range(steps):
        losses.append(model.forward_backward(rows, "nll")["loss"])
        model.optim_step()
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    answers = model.sample([prompt for prompt, _ in ROWS], max_tokens=4, temperature=0.0)
    right = sum(answer.text == wanted for answer, (_, wanted) in zip(answers, ROWS, strict=True))
    print(f"{right} of {len(ROWS)} answers are right")
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
