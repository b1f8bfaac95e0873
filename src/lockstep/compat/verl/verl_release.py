"""Finds the release of verl that a command is written for, and reads the command with that release's configuration.

The release is the newest one whose Hydra accepts every override: a key without `+` exists, a key with `+` does not. If
there is no such release, it is the newest of those that refuse the fewest overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.compat.hydra_overrides import (
    Applied,
    Composed,
    ParsedOverrides,
    PlacedOverride,
    StoredRelease,
    flattened,
    parse_overrides,
    stored_files,
    stored_versions,
)
from lockstep.compat.key_table import FOLDER, Setting, load_tables, nearest_name
from lockstep.errors import Problem, Refusal, first_line


@dataclass(frozen=True)
class Candidate:
    """A release with the configuration that the command uses, and the overrides that its Hydra would refuse."""

    release: StoredRelease
    config: str
    composed: Composed
    groups: tuple[PlacedOverride, ...]
    refused: tuple[PlacedOverride, ...]


@dataclass
class ReadCommand:
    """A command as verl's release reads it."""

    version: str
    config: str
    """The name of the configuration, such as `ppo_trainer`."""
    why: str
    """Why this release was chosen."""
    given: dict[str, Setting]
    applied: Applied
    added: set[str]
    """Keys that the command adds with `+` or `++` and that the release does not have."""
    groups: frozenset[str]
    """The groups of keys of the configuration."""
    problems: list[Problem]
    remarks: list[str]


def read_command(
    program: str, words: Sequence[str], locations: Sequence[str], rows: Iterable[str], version: str | None = None
) -> ReadCommand:
    """Reads `verl PROGRAM WORDS`. `rows` are the keys of the table; `version` is the release that the user names."""
    parsed = parse_overrides(words, locations)
    configs, folder, problems = _configs(program, parsed)
    overrides = [placed for placed in parsed.overrides if not _is_hydras(placed)]
    try:
        found = _candidate(configs, folder, overrides, version)
    except Refusal as refusal:
        if folder is None:
            raise
        problems, folder = [*problems, *refusal.problems], None  # the user's file cannot be used
        configs = load_tables("verl")["configs"][program]
        found = _candidate(configs, folder, overrides, version)
    values = [placed for placed in overrides if placed not in found.groups]
    applied = Applied(found.composed, values, {*stored_keys(), *(row for row in rows if "*" not in row)})
    given, unresolved = _given(applied)
    for placed in parsed.overrides:
        if placed in found.groups or _is_hydras(placed):
            given[placed.name] = Setting(placed.override.value(), placed.where)
    patterns = [row for row in rows if "*" in row]
    unknown = [placed for placed in applied.unknown if not any(fnmatchcase(placed.key, row) for row in patterns)]
    for placed in applied.unknown:
        if placed not in unknown:  # a row with a pattern covers it
            given[placed.key] = Setting(placed.override.value(), placed.where)
    problems = [*parsed.problems, *problems, *applied.problems, *unresolved, *map(_no_such_key, unknown)]
    added = {placed.key for placed in values if placed.override.is_add() or placed.override.is_force_add()}
    return ReadCommand(
        found.release.version,
        found.config,
        _why(found, version, configs, folder, overrides),
        given,
        applied,
        {key for key in given if any(key == name or key.startswith(name + ".") for name in added)}
        - found.composed.nodes.keys(),
        frozenset(key for key, value in found.composed.nodes.items() if value == {}),
        problems,
        _remarks(found),
    )


def _is_hydras(placed: PlacedOverride) -> bool:
    return placed.key.startswith(("hydra.", "hydra/"))


# The configuration ---------------------------------------------------------------------------------------------------


def _configs(program: str, parsed: ParsedOverrides) -> tuple[list[str], str | None, list[Problem]]:
    """Returns the names of the configurations that the command may use, and the user's folder, if it is needed."""
    own: list[str] = load_tables("verl")["configs"][program]
    name = parsed.config.removesuffix(".yaml") if parsed.config is not None else None
    if name is None:
        return own, None, []
    file = Path(parsed.folder or ".") / (name if name.endswith(".yml") else f"{name}.yaml")
    if file.is_file():
        problems = _file_problems(file, f"--config-name {parsed.config}")
        return (own, None, problems) if problems else ([name], str(file.parent.resolve()), [])
    if any(name in stored_files("verl", version) for version in stored_versions("verl")):
        return [name], None, []
    why = "is a custom configuration file, and its keys are not on the command line"
    remedy = f"convert where {file} exists, or print the configuration with `--cfg job --resolve` and pass its keys"
    return own, None, Refusal.at(f"--config-name {parsed.config}", why, remedy, code="unsupported-setting").problems


def _file_problems(file: Path, where: str) -> list[Problem]:
    """Returns a problem if the user's configuration file is not a mapping of keys."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values: Any = OmegaConf.load(file)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as error:
        why = f"{file} is not YAML: {' '.join(str(error).split())}"
        return Refusal.at(where, why, "fix the file", code="invalid-yaml").problems
    if not OmegaConf.is_dict(values) or not values:
        return Refusal.at(where, f"{file} has no keys", "fix the file", code="invalid-yaml").problems
    return []


# The release ---------------------------------------------------------------------------------------------------------


def _candidate(
    configs: Sequence[str], folder: str | None, overrides: Sequence[PlacedOverride], version: str | None
) -> Candidate:
    """Returns the newest release that accepts every override, or that refuses the fewest."""
    best: Candidate | None = None
    releases = _releases(configs, folder, version)
    # A release that refuses more overrides than another one is not composed.
    most = 1 + min(len(_surely_refused(release.version, overrides)) for _, release in releases)
    errors: list[Problem] = []
    for config, release in releases:
        if folder is None and len(_surely_refused(release.version, overrides)) >= most:
            continue
        try:
            found = _fit(release, config, overrides)
        except Refusal as refusal:
            errors += refusal.problems
            continue
        if best is None or len(found.refused) < len(best.refused):
            best, most = found, len(found.refused)
        if not best.refused:
            break
    if best is None:
        raise Refusal(errors[:1])
    return best


def _releases(configs: Sequence[str], folder: str | None, version: str | None) -> list[tuple[str, StoredRelease]]:
    known = stored_versions("verl")
    if version is not None:
        known = [name for name in known if name == version or name.startswith(f"{version}.")]
        if not known:
            versions = ", ".join(stored_versions("verl"))
            raise Refusal.at(
                "--peer-version", f"verl {version} is unknown", f"use one of {versions}", code="unknown-name"
            )
    releases = [(config, StoredRelease("verl", name, folder)) for config in configs for name in reversed(known)]
    found = [(config, release) for config, release in releases if release.has(config)]
    if not found:
        why = f"has no configuration {' or '.join(configs)}"
        raise Refusal.at(f"verl {version}", why, "name another version", code="unknown-name")
    return found


def _fit(release: StoredRelease, config: str, overrides: Sequence[PlacedOverride]) -> Candidate:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    groups = tuple(
        placed for placed in overrides if release.is_group(placed.key) and not isinstance(placed.override.value(), dict)
    )
    try:
        composed = release.compose(config, groups)
    except (HydraException, OmegaConfBaseException) as error:
        where = groups[0].shown if groups else f"--config-name {config}"
        why = f"Hydra cannot compose the configuration of verl {release.version}: {first_line(error)}"
        raise Refusal.at(
            where, why, "correct the name, or convert where all files are", code="unsupported-setting"
        ) from error
    refused = tuple(placed for placed in overrides if placed not in groups and composed.lacks(placed))
    return Candidate(release, config, composed, groups, refused)


@cache
def stored_keys() -> dict[str, list[str]]:
    """Returns all keys of verl's configurations, groups included, with the versions that have them."""
    content = json.loads((FOLDER / "verl_keys.json").read_text(encoding="utf-8"))["keys"]
    order = stored_versions("verl")
    return {
        key: [name for first, last in spans for name in order[order.index(first) : order.index(last) + 1]]
        for key, spans in content.items()
    }


def _surely_refused(version: str, overrides: Sequence[PlacedOverride]) -> list[PlacedOverride]:
    """Returns overrides of keys that no configuration of the release has. This needs no composition."""
    keys = stored_keys()
    return [
        placed
        for placed in overrides
        if not (placed.override.is_add() or placed.override.is_force_add() or placed.override.package)
        and version not in keys.get(placed.key, ())
        and not StoredRelease("verl", version).is_group(placed.key)
    ]


def _why(
    found: Candidate,
    version: str | None,
    configs: Sequence[str],
    folder: str | None,
    overrides: Sequence[PlacedOverride],
) -> str:
    """Returns why this release was chosen: what the next newer release refuses."""
    if version is not None:
        return "as --peer-version says"
    known = stored_versions("verl")
    newer = known[known.index(found.release.version) + 1 :]
    if found.refused:
        return f"no known release has all keys of the command; this one fits best, without {found.refused[0].key}"
    if not newer:
        return "the newest known release; it has all keys of the command"
    for config in configs:
        release = StoredRelease("verl", newer[0], folder)
        if release.has(config):
            lacking = _fit(release, config, overrides).refused
            if lacking:
                verb = "has already" if lacking[0].override.is_add() else "does not have"
                return f"the newest known release with all keys of the command; verl {newer[0]} {verb} {lacking[0].key}"
    return "the newest known release that has the program"


def _remarks(found: Candidate) -> list[str]:
    where = [f"{placed.shown}{_elsewhere(placed.key)}" for placed in found.refused]
    if not where:
        return []
    return [
        f"verl {found.release.version} refuses keys of the command, which are converted nevertheless: "
        + ", ".join(where)
    ]


def _elsewhere(key: str) -> str:
    versions = stored_keys().get(key)
    return f" (a key of verl {versions[-1]})" if versions else ""


def _no_such_key(placed: PlacedOverride) -> Problem:
    near = nearest_name(placed.key, list(stored_keys()))
    remedy = f"did you mean {near}?" if near else "remove the key; `lockstep help verl-keys` lists the known keys"
    return Problem(placed.shown, "no release of verl has such a key", remedy, code="unknown-key")


# Settings ------------------------------------------------------------------------------------------------------------


def _given(applied: Applied) -> tuple[dict[str, Setting], list[Problem]]:
    """Returns the settings of the command, with references resolved."""
    from omegaconf.errors import OmegaConfBaseException

    given: dict[str, Setting] = {}
    problems = []
    for key, where in applied.places.items():
        try:
            value = applied.value(key)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            why = f"refers to a value that is unknown: {first_line(error)}"
            place = f"{where}: {key}" if where else key
            problems.append(Problem(place, why, "write the value itself", code="unresolved-reference"))
            continue
        if isinstance(value, dict) and value:
            given |= {f"{key}.{name}": Setting(inner, where) for name, inner in flattened(value).items()}
        else:
            given[key] = Setting(value, where)
    return given, problems


def defaults_of(applied: Applied, keys: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the values of `keys` in the configuration. `names` has further names of a key, which take precedence. If
    the release does not have a key, its value is that of `keys`."""
    from omegaconf.errors import OmegaConfBaseException

    defaults: dict[str, Any] = {}
    for key, fallback in keys.items():
        value, present = fallback, False
        for name in (*names.get(key, ()), key):
            if not applied.has(name):
                continue
            try:
                found = applied.value(name)
            except (OmegaConfBaseException, ValueError, RecursionError):
                continue
            if not present or value is None:
                value, present = found, True
        if value is not None:
            defaults[key] = value
    return defaults
