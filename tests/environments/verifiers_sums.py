"""A task set of verifiers: sums. A reply that contains the answer is right."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.messages[-1].content))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for number in range(4):
            yield SumTask(SumData(prompt=f"{number}+{number}?", answer=str(2 * number)), self.config.task)


__all__ = ["Sums"]
