"""Best of n, and learning from it: sample, keep the best response of each prompt, train on it, again.

lockstep tiny model
python examples/best_of_n.py model
"""

from __future__ import annotations

import sys

import lockstep

PROMPTS = ["Say it in digits.", "Numbers only!", "Count for me."]


def score(text: str) -> float:
    """The share of digits."""
    return sum(letter.isascii() and letter.isdigit() for letter in text) / max(len(text), 1)


def main(folder: str, rounds: int = 8, n: int = 24) -> list[float]:
    """The mean score of all responses of each round."""
    model = lockstep.load(folder, lr=3e-3)
    means = []
    for number in range(rounds):
        responses = model.sample(PROMPTS, n=n, max_tokens=8)
        scores = [score(response.text) for response in responses]
        groups = [range(first, first + n) for first in range(0, len(responses), n)]
        best = [responses[max(group, key=lambda i: scores[i])] for group in groups]
        for _ in range(3):
            model.forward_backward(best, "nll")
            model.optim_step()
        means.append(sum(scores) / len(scores))
        print(f"round {number}: mean score {means[-1]:.3f}, best {max(scores):.3f}")
    return means


if __name__ == "__main__":
    main(sys.argv[1])
