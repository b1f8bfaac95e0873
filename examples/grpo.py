"""GRPO with its own reward and its own advantage: lockstep tiny model && python examples/grpo.py model"""

import sys

import lockstep

PROMPTS = ["shout!", "louder, please", "I cannot hear you"]


def reward(text: str) -> float:
    """The share of capital letters."""
    return sum(letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for letter in text) / max(len(text), 1)


def advantages(rewards: list[float]) -> list[float]:
    """Of one group: how far each is above the mean, in units of the deviation."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((one - mean) ** 2 for one in rewards) / len(rewards)) ** 0.5
    return [(one - mean) / (deviation + 1e-6) for one in rewards]


def main(folder: str, steps: int = 12, n: int = 16) -> list[float]:
    model = lockstep.load(folder, lr=3e-3)
    means = []
    for step in range(steps):
        rollouts = model.sample(PROMPTS, n=n, max_tokens=8)
        rewards = [reward(rollout.text) for rollout in rollouts]
        groups = [advantages(rewards[first : first + n]) for first in range(0, len(rewards), n)]
        gained = [advantage for group in groups for advantage in group]
        batch = [r.datum(advantage=a, old=r.logprobs) for r, a in zip(rollouts, gained, strict=True)]
        model.forward_backward(batch, "clip")
        model.optim_step()
        means.append(sum(rewards) / len(rewards))
        print(f"step {step}: reward {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    main(sys.argv[1])
