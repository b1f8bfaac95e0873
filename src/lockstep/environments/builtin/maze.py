"""The environment `maze`: the model looks for the exit of a maze, one step per turn.

The `ground_truth` of a row is the number of its maze. Without it, the seed selects the maze.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from lockstep.environments.environment import Reply, Start, Turn

Cell = tuple[int, int]

STEPS: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_STEP = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


def open_steps(size: int, number: int) -> dict[Cell, set[str]]:
    """Returns the possible steps in each cell. There is exactly one path between two cells: a random depth-first search
    opens the walls."""
    draw, here = Random(number), (0, 0)
    ways: dict[Cell, set[str]] = {(x, y): set() for x in range(size) for y in range(size)}
    trail, seen = [here], {here}
    while trail:
        here = trail[-1]
        new = [step for step in STEPS if (there := after(here, step)) in ways and there not in seen]
        if not new:
            trail.pop()
            continue
        step = draw.choice(new)
        there = after(here, step)
        ways[here].add(step)
        ways[there].add({"up": "down", "down": "up", "left": "right", "right": "left"}[step])
        trail.append(there)
        seen.add(there)
    return ways


def after(cell: Cell, step: str) -> Cell:
    return cell[0] + STEPS[step][0], cell[1] + STEPS[step][1]


class Maze:
    """A maze of `size` x `size` cells with the start in the upper left and the exit in the lower right corner. The
    reward is 1 for the exit within `moves` turns; a step into a wall and a reply without a step cost a turn."""

    def __init__(self, size: int = 3, moves: int = 12):
        if size < 2:
            raise ValueError(f"size is {size}, but a maze has at least 2 x 2 cells")
        self.size, self.moves = size, moves
        self.ways: dict[Cell, set[str]] = {}
        self.here: Cell = (0, 0)
        self.made = 0
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        given = str(row.get("ground_truth") or "").strip()
        number = int(given) if given.isdigit() else seed
        self.ways, self.here, self.made = open_steps(self.size, number), (0, 0), 0
        self.info = {"maze": number, "path": [[0, 0]]}
        *before, last = row.get("prompt") or [{"role": "user", "content": rules(self.size, self.moves)}]
        return Start([*before, {**last, "content": f"{last['content']}\n{self._view()}"}], anchor=str(self.here))

    def step(self, reply: Reply) -> Turn:
        self.made += 1
        found = _STEP.findall(reply.content or reply.text)
        step = found[-1].lower() if found else ""
        free = step in self.ways[self.here]
        if free:
            self.here = after(self.here, step)
            self.info["path"].append(list(self.here))
        if self.here == (self.size - 1, self.size - 1):
            return Turn(reward=1.0, done=True, metrics={"success": 1.0, "moves": self.made})
        if self.made == self.moves:
            return Turn(done=True, metrics={"success": 0.0, "moves": self.made})
        said = self._view() if free else f"{'a wall' if step else 'a step!'}; {self._view()}"
        return Turn([{"role": "user", "content": said}], anchor=str(self.here))

    def _view(self) -> str:
        return f"open: {', '.join(step for step in STEPS if step in self.ways[self.here])}"


def rules(size: int, moves: int) -> str:
    return (
        f"You are in the upper left corner of a maze of {size} x {size} cells. The exit is in the lower right corner. "
        f"Say up, down, left or right. You have {moves} turns."
    )
