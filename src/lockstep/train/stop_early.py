"""When a run ends before its last step because a metric has stopped to improve.

What was measured before a resume is read from the metrics of the run, so the decision is that of an undisturbed run
also where the settings changed in between. The number is that of the first process, and all processes decide by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.parallel.world import World
from lockstep.recipe.measure import Measure, measure_of
from lockstep.recipe.schema import StopEarly


class EarlyStop:
    """Without settings it never stops."""

    def __init__(self, settings: StopEarly | None, world: World):
        self.settings, self.world = settings, world
        self._measure: Measure | None = None if settings is None else measure_of(settings.metric)
        self._best: tuple[float, int] | None = None
        """The best value so far that was an improvement, and its step."""
        self._waited = 0
        """Measurements since."""

    @property
    def reached(self) -> bool:
        return self.settings is not None and self._waited >= self.settings.patience

    @property
    def validated(self) -> bool:
        """Whether only a validation can decide."""
        return self._measure is not None and self._measure.validated

    def recall(self, logged: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Steps of the run that were logged before, in order."""
        for step, metrics in self.world.gather(list(logged) if self.settings is not None else [])[0]:
            self._count(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, float], *, validated: bool) -> bool:
        """A step's metrics; whether the run ends with it. Every process calls it, and gets the same answer."""
        if self._measure is None or (self._measure.validated and not validated):
            return False
        name = self._measure.name
        told = self.world.gather({name: metrics[name]} if name in metrics else {})[0]
        self._count(step, told)
        return self.reached

    def missed(self, metrics: Mapping[str, float]) -> str | None:
        """What to say of a validation that should have measured the metric and did not: nothing was counted."""
        if self._measure is None or not self._measure.validated or self._measure.name in metrics:
            return None
        return f"run.stop_early.metric: this validation has no {self._measure.name}, so it does not count"

    def _count(self, step: int, metrics: Mapping[str, float]) -> None:
        measure, settings = self._measure, self.settings
        if measure is None or settings is None or measure.name not in metrics or self.reached:
            return
        value = measure.value(metrics)
        # A value that is no number has improved nothing.
        if value is not None and (
            self._best is None or measure.rank(value) < measure.rank(self._best[0]) - settings.min_delta
        ):
            self._best, self._waited = (value, step), 0
        else:
            self._waited += 1

    def sentence(self, step: int) -> str:
        """Why the run ended."""
        assert self.settings is not None
        assert self._measure is not None
        name, times = self._measure.name, self.settings.patience
        if self._best is None:
            return f"stopped early after step {step}: {name} was no number {times} times"
        value, at = self._best
        least = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        return (
            f"stopped early after step {step}: {name} did not get better than {value:.6g} (step {at}){least} "
            f"in {times} measurements"
        )
