"""May this run go on from that checkpoint? Said with the difference when it may not."""

from __future__ import annotations

from typing import Any

from lockstep.errors import Problem, Refusal
from lockstep.masking import comparable
from lockstep.recipe.facts import facts_of
from lockstep.recipe.schema import Optim
from lockstep.run.checkpoint import State
from lockstep.train.optim import learning_rate


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted keys."""
    if isinstance(values, dict):
        pairs = values.items()
    elif isinstance(values, list):
        pairs = {str(i): value for i, value in enumerate(values)}.items()
    else:
        return {prefix.rstrip("."): values}
    return {k: v for name, value in pairs for k, v in flatten(value, f"{prefix}{name}.").items()}


def refuse_changed_recipe(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Refuse a recipe that would train something else; returns the harmless changes as sentences."""
    # A harmless group of keys that the version which wrote the checkpoint did not have is no change.
    unknown = {name: group for name, group in now.items() if name not in before and facts_of(name).resumable}
    # Another secret, or another way to the same one, is no change of what is trained.
    old, new = (_without_secrets(flatten(values)) for values in ({**unknown, **before}, now))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    harmful = [key for key in changed if not facts_of(key).resumable]
    if harmful:
        raise Refusal(
            [
                Problem(
                    key,
                    f"the checkpoint was trained with {old.get(key)!r}, the recipe now says {new.get(key)!r}",
                    "set it back, or start a new run with another run.name",
                )
                for key in harmful
            ]
        )
    return [f"{key} changed from {old.get(key)!r} to {new.get(key)!r}" for key in changed]


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    return {key: comparable(value, key.rpartition(".")[2]) for key, value in values.items()}


def stretched(state: State, steps: int, optim: Optim) -> list[str]:
    """What another number of steps does to the learning rate of a run that goes on."""
    before, step = state.planned, state.step
    if before is None or before == steps or step >= steps:
        return []
    was = f"{learning_rate(step, before, optim):.3g}" if step < before else "none, it was done"
    now = learning_rate(step, steps, optim)
    if step < before and now == learning_rate(step, before, optim):
        return []
    return [
        f"the learning rate up to step {step} was planned for {before} steps and from there on for {steps}: step "
        f"{step + 1} has {now:.3g} (before: {was}); its curve is not that of a run of {steps} steps"
    ]


def refuse_changed_data(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse rows other than those the run began with: their order would no longer mean the same."""
    problems = []
    for part in ("train", "val"):
        old, new = before.get(part, []), now.get(part, [])
        if [source["fingerprint"] for source in old] == [source["fingerprint"] for source in new]:
            continue
        problems += [
            Problem(f"data.{part}", difference, "restore the file, or start a new run with another run.name")
            for difference in _differences(old, new)
        ]
    if not problems and before["kept"] != now["kept"]:
        problems.append(
            Problem(
                "data.max_tokens",
                f"the checkpoint was trained on {_kept(before)}, the limit on row length now leaves {_kept(now)}",
                "set data.max_tokens, or batch.tokens where it is the limit, back to what it was",
            )
        )
    if problems:
        raise Refusal(problems)


def _kept(data: dict[str, Any]) -> str:
    return f"{data['kept']['rows']:,} rows of {data['kept']['tokens']:,} tokens"


def _differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    before = [file for source in old for file in source["files"]]
    now = [file for source in new for file in source["files"]]
    found = [
        f"{b['name']} had {b['rows']} rows and {b['bytes']} bytes, {n['name']} now has {n['rows']} and {n['bytes']}"
        + (" (same size, other content)" if b["bytes"] == n["bytes"] else "")
        for b, n in zip(before, now, strict=False)
        if b["sha256"] != n["sha256"]
    ]
    if len(before) != len(now):
        found.append(f"the checkpoint was trained on {len(before)} files, now there are {len(now)}")
    return found or ["the files are in another order or grouping"]
