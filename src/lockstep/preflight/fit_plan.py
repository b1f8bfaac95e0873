"""Finds the settings with which a recipe fits into the memory of one device, for `lockstep plan --fit`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.device.chips import CHIPS, chip_named, nearest_chip
from lockstep.errors import Refusal
from lockstep.preflight.cluster import TargetCluster
from lockstep.preflight.cluster_plan import Outlook, with_keys
from lockstep.preflight.fit_levers import LEVERS, Lever, Option
from lockstep.preflight.memory_plan import Phase
from lockstep.preflight.model_sizes import count_parameters
from lockstep.recipe import Recipe
from lockstep.recipe.loader import value_text
from lockstep.recipe.recipe_checks import combination_problems

GRAMMAR = "a device (h200), a memory size (24 GB), or both (h200:80 for a device of which 80 GB may be used)"
# Without the name of a device, the speeds of this one order the settings.
TYPICAL = "h200"
UNITS = {"gb": 10**9, "gib": 2**30}
# At most this many settings are listed for each choice of trained weights.
MOST_OF_A_KIND = 3


def device_to_fit(text: str) -> TargetCluster:
    """Parses the value of `--fit`. GB are 10^9 bytes, GiB are 2^30 bytes."""
    found = re.fullmatch(r"([a-z][\w.-]*)|(?:([a-z][\w.-]*):)?(\d+\.?\d*) ?(gb|gib)?", text.strip().lower())
    limit = None if found is None or found[3] is None else int(float(found[3]) * UNITS[found[4] or "gb"])
    if found is None or limit == 0:
        remedy = f"known devices: {', '.join(CHIPS)}"
        raise Refusal.at("--fit", f"{text!r} is not {GRAMMAR}", remedy, code="invalid-syntax")
    name = found[1] or found[2]
    chip = chip_named(name or TYPICAL)
    if chip is None:
        nearest = nearest_chip(name or "")
        raise Refusal.at(
            "--fit",
            f"unknown device {name!r}",
            f"known devices: {', '.join(CHIPS)}" + (f"; did you mean {nearest}?" if nearest else ""),
            code="unknown-device",
        )
    if limit is None:
        return TargetCluster(1, 1, chip)
    if name is not None and chip.memory is not None and limit > chip.memory:
        raise Refusal.at(
            "--fit",
            f"{chip.name} has only {chip.memory / 1e9:.1f} GB",
            f"use --fit {chip.name}, or a smaller size",
            code="out-of-range",
        )
    shown = f"{limit / 1e9:g} GB"
    return TargetCluster(1, 1, replace(chip, memory=limit, name=shown if name is None else f"{chip.name}:{shown}"))


@dataclass(frozen=True)
class FittingSetting:
    """Recipe keys with their predicted peak memory and step time. `seconds` is None if the speed of the device is
    unknown."""

    labels: tuple[str, ...]
    words: tuple[str, ...]
    """The changed keys as `key=value` arguments."""
    kind: tuple[str, ...]
    """The labels of the levers that decide which weights are trained, how they are stored, and by which optimizer."""
    peak: Phase
    seconds: float | None
    tokens: float
    """The tokens of a step."""

    @property
    def label(self) -> str:
        return ", ".join(label for label in self.labels if label)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts settings: the fastest first, then the smallest, then the fewest changes."""
        return self.seconds or 0.0, self.peak.total, len(self.words)


class FitSearch:
    """Tries all combinations of the levers. `reload` returns the recipe with further `key=value` arguments."""

    def __init__(self, outlook: Outlook, target: TargetCluster, reload: Callable[[Sequence[str]], Recipe]):
        self.outlook, self.target, self.reload = outlook, target, reload
        self.smallest: FittingSetting | None = None
        """The setting with the lowest peak memory, whether it fits or not."""

    def settings(self) -> list[FittingSetting]:
        """Returns the settings that fit, the fastest first. A setting is left out if another one that trains the same
        weights is at least as fast and as small."""
        found: list[FittingSetting] = []
        for setting in sorted(self._fitting(), key=lambda one: one.rank):
            alike = [one for one in found if one.kind == setting.kind]
            if len(alike) < MOST_OF_A_KIND and all(one.peak.total > 1.01 * setting.peak.total for one in alike):
                found.append(setting)
        return found

    def _fitting(self) -> Iterator[FittingSetting]:
        weights = [lever for lever in LEVERS if lever.weights]
        others = [lever for lever in LEVERS if not lever.weights]
        for outlook, labels, words in self._weights(weights, self.outlook, (), ()):
            yield from self._expanded(others, outlook, _Chosen(outlook.recipe, labels, words))

    def _weights(
        self, levers: Sequence[Lever], outlook: Outlook, labels: tuple[str, ...], words: tuple[str, ...]
    ) -> Iterator[tuple[Outlook, tuple[str, ...], tuple[str, ...]]]:
        """Yields the recipe with each combination of the levers that change the weights. The recipe is loaded again,
        so that all defaults that depend on the keys are derived, and its parameters are counted."""
        if not levers:
            yield outlook, labels, words
            return
        for option in levers[0].options(outlook, self.target):
            more = words + tuple(f"{key}={value_text(value)}" for key, value in option.keys.items())
            try:
                changed = self._recounted(outlook, more) if option.keys else outlook
            except Refusal:  # the model or the method does not support these keys
                continue
            yield from self._weights(levers[1:], changed, (*labels, option.label), more)

    def _recounted(self, outlook: Outlook, words: tuple[str, ...]) -> Outlook:
        recipe = self.reload(words)
        counted = count_parameters(recipe, outlook.models.config)
        return replace(outlook, recipe=recipe, models=replace(outlook.models, counted=counted))

    def _expanded(self, levers: Sequence[Lever], outlook: Outlook, chosen: _Chosen) -> Iterator[FittingSetting]:
        if not levers:
            setting = self._judged(outlook, chosen)
            if self.smallest is None or setting.peak.total < self.smallest.peak.total:
                self.smallest = setting
            if setting.peak.total <= self.target.memory:
                yield setting
            return
        lever, rest = levers[0], levers[1:]
        for option in lever.options(outlook, self.target):
            changed = outlook.with_recipe(with_keys(outlook.recipe, option.keys))
            if list(combination_problems(changed.recipe)):
                continue
            fits = False
            for setting in self._expanded(rest, changed, chosen.with_option(option)):
                fits = True
                yield setting
            if fits and lever.falls_back:
                return

    def _judged(self, outlook: Outlook, chosen: _Chosen) -> FittingSetting:
        peak = max(outlook.phases(self.target), key=lambda phase: phase.total)
        times = outlook.times(self.target)
        seconds = None if times is None else sum(time.open for time in times)
        whole = outlook.steps.work(outlook.recipe).whole
        kind = chosen.labels[: sum(lever.weights for lever in LEVERS)]
        return FittingSetting(chosen.labels, chosen.all_words(), kind, peak, seconds, whole)


@dataclass(frozen=True)
class _Chosen:
    """The options that a combination has so far. `start` is the recipe with the keys of the weights, `words`."""

    start: Recipe
    labels: tuple[str, ...]
    words: tuple[str, ...]
    keys: tuple[tuple[str, Any], ...] = ()

    def with_option(self, option: Option) -> _Chosen:
        return replace(self, labels=(*self.labels, option.label), keys=(*self.keys, *option.keys.items()))

    def all_words(self) -> tuple[str, ...]:
        """The arguments of all keys whose value differs from the recipe's."""
        changed = {key: value for key, value in self.keys if _value(self.start, key) != value}
        return (*self.words, *(f"{key}={value_text(value)}" for key, value in changed.items()))


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def refuse_no_setting(search: FitSearch, target: TargetCluster) -> None:
    """Raises a refusal that names the missing memory and the smallest setting."""
    smallest = search.smallest
    assert smallest is not None
    missing, peak = smallest.peak.total - target.memory, smallest.peak
    words = " ".join(smallest.words) or "the unchanged recipe"
    raise Refusal.at(
        f"--fit {target.chip.name}",
        f"no setting fits: the smallest needs {peak.total / 1e9:,.1f} GB in the phase {peak.name}, "
        f"{missing / 1e9:,.1f} GB more than the device has ({words})",
        "use a larger device, a smaller model, shorter rows (data.max_tokens, rollout.max_tokens), or several devices "
        "(lockstep plan --cluster)",
        code="not-enough-memory",
    )
