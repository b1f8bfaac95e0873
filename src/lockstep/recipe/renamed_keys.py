"""The old names of recipe keys. An old key name works for one release, with a warning. Stored recipes are converted."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from lockstep.errors import Problem, RenamedKey

# Maps the old name of a recipe key to its new name. The old and the new key are in the same group.
RENAMED = {
    "run.stop_early": "run.early_stopping",
    "data.reader_limit": "data.reader_timeout",
    "batch.rows": "batch.micro_batch_size",
    "rollout.hand_over": "rollout.weight_sync",
    "rollout.truncated": "rollout.truncated_sampling",
    "rollout.function_limit": "rollout.function_timeout",
    "rollout.server.start_limit": "rollout.server.start_timeout",
    "rollout.server.answer_limit": "rollout.server.request_timeout",
    "algorithm.function_limit": "algorithm.function_timeout",
    "algorithm.cov_share": "algorithm.cov_ratio",
    "algorithm.kl.compared": "algorithm.kl.before_baseline",
    "algorithm.correction": "algorithm.rollout_correction",
    "algorithm.dynamic_sampling.rounds": "algorithm.dynamic_sampling.max_gen_batches",
    "algorithm.filtration": "algorithm.pf_ppo",
    "algorithm.overlong.cut": "algorithm.overlong.truncated_reward",
    "algorithm.overlong.skip": "algorithm.overlong.mask_truncated",
    "rm.centre": "rm.center_rewards_coef",
    "parallel.context": "parallel.context_parallel",
    "parallel.tensor": "parallel.tensor_parallel",
}
# Groups that contain a renamed key. The search for old names skips groups that are not listed here.
_GROUPS = {".".join(parts[:end]) for parts in (old.split(".") for old in RENAMED) for end in range(1, len(parts))}


def current_key(key: str) -> str:
    """Returns the dotted key with its new name."""
    old = _old_name(key)
    return key if old is None else RENAMED[old] + key[len(old) :]


def with_current_names(values: dict[str, Any], group: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """Returns nested values with the new names of keys, and warns about each old name.

    `group`: the dotted key of the group that contains the values. Also returns a problem for each key that is set by
    both its old and its new name.
    """
    found: list[str] = []
    renamed = _renamed(values, group, found)
    problems = [_both(old) for old in found if _contains(values, RENAMED[old], group)]
    for old in found:
        warn_renamed(old)
    return renamed, problems


def stored_recipe(values: Any) -> Any:
    """Renames the old keys in the stored recipe of a run, checkpoint or tape, and returns this recipe. A value that is
    not a dict is returned unchanged."""
    return _renamed(values, "", []) if isinstance(values, dict) else values


def both_names(keys: Iterable[str]) -> list[Problem]:
    """Returns one problem for each key whose old and new name are both among the given dotted keys."""
    given = list(keys)
    old_names = {old for key in given if (old := _old_name(key)) is not None}
    return [_both(old) for old in sorted(old_names) if any(_within(key, RENAMED[old]) for key in given)]


def warn_renamed(key: str) -> None:
    """Warns if the dotted key, or a group that contains it, is an old name."""
    if (old := _old_name(key)) is not None:
        note = f"{old} is now {RENAMED[old]}; the old name works until the next release"
        # All warnings are raised on this line, because Python shows a warning with the same text and line only once.
        warnings.warn(note, RenamedKey, stacklevel=1)


def new_attribute(name: str, fields: Iterable[str]) -> str | None:
    """Returns the current name of the field that had the old name `name`, or None if no field of `fields` had this
    name."""
    names = [new.rpartition(".")[2] for old, new in RENAMED.items() if old.rpartition(".")[2] == name]
    return next((new for new in names if new in fields), None)


def _renamed(values: dict[str, Any], group: str, found: list[str]) -> dict[str, Any]:
    """Returns the values with new key names and adds the old names to `found`. If both names of a key are set, the
    value of the new name is used."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{group}.{name}" if group else str(name)
        new = name
        if key in RENAMED:
            found.append(key)
            key = RENAMED[key]
            new = key.rpartition(".")[2]
            if new in values:
                continue
        result[new] = _renamed(value, key, found) if key in _GROUPS and isinstance(value, dict) else value
    return result


def _old_name(key: str) -> str | None:
    return next((old for old in RENAMED if _within(key, old)), None)


def _within(key: str, group: str) -> bool:
    return key == group or key.startswith(f"{group}.")


def _contains(values: Any, key: str, group: str) -> bool:
    for part in key.removeprefix(f"{group}.").split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _both(old: str) -> Problem:
    return Problem(
        RENAMED[old], f"both this key and its old name {old} are given", f"remove {old}", code="conflicting-keys"
    )
