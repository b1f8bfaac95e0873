"""Reads a Hydra command line with Hydra's own parser, and composes a stored configuration with Hydra and OmegaConf.

`parse_overrides` parses the words of a command. `StoredRelease` is one release of the other trainer: its configuration
files in memory (`tables/*_configs.json`, written by tools/peer_configs.py). `StoredRelease.compose` includes files as
their lists of defaults and the groups of the command (`engine=fsdp`) request; `apply` then applies the other overrides,
`${...}` included. Hydra (extra `migrate`) is imported when a command is read.
"""

from __future__ import annotations

import copy
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from lockstep.compat.key_table import FOLDER
from lockstep.errors import Problem, first_line, missing_extra

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

_OF_HYDRA = ("hydra.", "hydra/")


# Words ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedOverride:
    """An override that Hydra's parser has read, and the script line of its word."""

    override: Override
    where: str

    @property
    def key(self) -> str:
        return str(self.override.key_or_group)

    @property
    def name(self) -> str:
        """The key, or the group with its package (`actor@actor_rollout_ref.actor`)."""
        return f"{self.key}@{self.override.package}" if self.override.package else self.key

    @property
    def shown(self) -> str:
        return _place(self.where, self.name)


@dataclass
class ParsedOverrides:
    """The parsed words of a Hydra command line."""

    overrides: list[PlacedOverride] = field(default_factory=list)
    config: str | None = None
    """The value of `--config-name`."""
    folder: str | None = None
    """The value of `--config-path` or `--config-dir`."""
    problems: list[Problem] = field(default_factory=list)


def require_hydra() -> None:
    """Refuses to read a command if Hydra is not installed."""
    try:
        import hydra.version
    except ImportError:
        raise missing_extra("hydra-core", "migrate", "commands of verl") from None
    hydra.version.setbase(None)  # as verl's programs: the behaviour of the installed version of Hydra


def parse_overrides(words: Sequence[str], locations: Sequence[str] = ()) -> ParsedOverrides:
    """Parses the words of a command. `locations` has the script line of each word."""
    require_hydra()
    parsed = ParsedOverrides()
    position = 0
    while position < len(words):
        word, where = words[position], locations[position] if position < len(locations) else ""
        position += 1
        if word.startswith("-"):
            position += _option(word, words[position:], where, parsed)
        else:
            _override(word, where, parsed)
    return parsed


def _option(word: str, rest: Sequence[str], where: str, parsed: ParsedOverrides) -> int:
    """Reads one of Hydra's options; returns the number of further words that it uses."""
    name, equals, value = word.partition("=")
    used = 0
    if not equals and rest:
        value, used = rest[0], 1
    if name in ("--config-name", "-cn"):
        parsed.config = value
    elif name in ("--config-path", "-cp", "--config-dir", "-cd"):
        parsed.folder = value
    else:
        why = "is an option of Hydra that changes no setting"
        parsed.problems.append(Problem(_place(where, word), why, "remove it", code="unused-key"))
        return 0
    return used


@cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _override(word: str, where: str, parsed: ParsedOverrides) -> None:
    from hydra.errors import HydraException

    try:
        override = _parser().parse_override(word)
        value = None if override.is_sweep_override() else override.value()
    except HydraException as error:
        remedy = "write key=value, +key=value, ++key=value or ~key, and quote a value with special characters"
        why = f"Hydra cannot read it: {first_line(error)}"
        parsed.problems.append(Problem(_place(where, word), why, remedy, code="invalid-syntax"))
        return
    if override.is_sweep_override():
        why = "has several values, which Hydra reads as a sweep over several runs"
        remedy = f"write a list {override.key_or_group}=[a,b], or quote the value"
        parsed.problems.append(Problem(_place(where, str(override.key_or_group)), why, remedy, code="invalid-syntax"))
    elif not str(override.key_or_group).startswith(_OF_HYDRA) or value is not None:
        parsed.overrides.append(PlacedOverride(override, where))


def _place(where: str, word: str) -> str:
    return f"{where}: {word}" if where else word


# Stored configurations -----------------------------------------------------------------------------------------------


@cache
def stored_configs(peer: str) -> dict[str, Any]:
    """Returns the content of `tables/PEER_configs.json`."""
    found: dict[str, Any] = json.loads((FOLDER / f"{peer}_configs.json").read_text(encoding="utf-8"))
    return found


def stored_versions(peer: str) -> list[str]:
    """Returns the versions with stored configurations, the oldest first."""
    versions: list[str] = stored_configs(peer)["versions"]
    return versions


@cache
def stored_files(peer: str, version: str) -> dict[str, dict[str, Any]]:
    """Returns the configuration files of one version: their keys and defaults, by dotted key."""
    content = stored_configs(peer)
    order = {name: place for place, name in enumerate(content["versions"])}
    files: dict[str, dict[str, Any]] = {}
    for name, keys in content["files"].items():
        for key, spans in keys.items():
            for first, last, value in spans:
                if order[first] <= order[version] <= order[last]:
                    files.setdefault(name, {})[key] = value
    return files


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings of dotted keys."""
    values: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        group = values
        for parent in parents:
            group = group.setdefault(parent, {})
        group[leaf] = copy.deepcopy(value)
    return values


def flattened(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted key. An empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, dict) and value
        flat |= flattened(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


@cache
def _stored_source(peer: str, version: str) -> Any:
    """Returns Hydra's view of the stored files."""
    from hydra.plugins.config_source import ConfigResult, ConfigSource
    from omegaconf import OmegaConf

    files = stored_files(peer, version)
    groups = {posixpath.dirname(name) for name in files} - {""}

    def normal(path: str) -> str:
        return posixpath.normpath(path).removesuffix(".yaml")

    class StoredSource(ConfigSource):
        @staticmethod
        def scheme() -> str:
            return "stored"

        def load_config(self, config_path: str) -> ConfigResult:
            flat = dict(files[normal(config_path)])
            package = flat.pop("@package", None)
            return ConfigResult(self.provider, self.path, OmegaConf.create(nested(flat)), {"package": package})

        def is_group(self, config_path: str) -> bool:
            return normal(config_path) in groups

        def is_config(self, config_path: str) -> bool:
            return normal(config_path) in files

        def available(self) -> bool:
            return True

        def list(self, config_path: str, results_filter: Any) -> list[str]:
            return sorted(posixpath.basename(name) for name in files if posixpath.dirname(name) == normal(config_path))

    return StoredSource(f"{peer} {version}", f"stored://{version}")


# Composition ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Composed:
    """A composed configuration before the overrides of values."""

    config: DictConfig
    nodes: Mapping[str, Any]
    """All keys, groups included, with their values; `{}` for a group, references unresolved."""
    own: Mapping[str, str]
    """The keys that files of the user's folder set, and the names of these files."""

    def lacks(self, placed: PlacedOverride) -> bool:
        """Returns whether Hydra would refuse the override: a key without `+` must exist, with `+` it must not."""
        override, key = placed.override, placed.key
        value = override.value()
        if override.is_force_add():
            return False
        if override.is_delete() or override.is_add():
            exists = self.nodes.get(key) is not None
            return exists is override.is_add() and not (override.is_add() and isinstance(value, dict | list))
        inner = flattened({key: value}) if isinstance(value, dict) and value else {key: value}
        return any(name not in self.nodes for name in inner)


@dataclass(frozen=True)
class StoredRelease:
    """One release of another trainer, and the user's folder with further configuration files."""

    peer: str
    version: str
    folder: str | None = None

    def is_group(self, key: str) -> bool:
        return any(source.is_group(key) for source in self._sources())

    def has(self, config: str) -> bool:
        return any(source.is_config(config) for source in self._sources())

    def _sources(self) -> list[Any]:
        from hydra._internal.core_plugins.file_config_source import FileConfigSource

        own = [FileConfigSource("own", f"file://{self.folder}")] if self.folder is not None else []
        return [*own, _stored_source(self.peer, self.version)]

    def compose(self, config: str, groups: Sequence[PlacedOverride] = ()) -> Composed:
        """Composes a configuration with the groups of the command."""
        lines = tuple(str(placed.override.input_line) for placed in groups)
        if self.folder is None:
            return _composed(self, config, lines)
        return _composed.__wrapped__(self, config, lines)  # the user's files may change


@cache
def _composed(release: StoredRelease, config: str, lines: tuple[str, ...]) -> Composed:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
    from hydra._internal.defaults_list import create_defaults_list
    from omegaconf import OmegaConf

    search = ConfigSearchPathImpl()
    repository = ConfigRepository(search)
    repository.sources = [*release._sources(), StructuredConfigSource("schema", "structured://")]
    caching = CachingConfigRepository(repository)
    defaults = create_defaults_list(
        repo=caching,
        config_name=config,
        overrides_list=_parser().parse_overrides(list(lines)),
        prepend_hydra=False,
        skip_missing=False,
    )
    loader = ConfigLoaderImpl(search)
    found = loader._compose_config_from_defaults_list(defaults=defaults.defaults, repo=caching)
    found.pop("hydra", None)
    own: dict[str, str] = {}
    for default in defaults.defaults:
        result = loader._load_single_config(default, caching)
        if result.provider == "own":
            keys = flattened(_container(result.config))
            own |= {key: f"{default.config_path}.yaml" for key in keys if not key.startswith(_OF_HYDRA)}
    OmegaConf.set_struct(found, True)
    return Composed(found, _nodes(_container(found)), own)


def _container(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=False)
    return values


def _nodes(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found[f"{prefix}{name}"] = {} if isinstance(value, dict) else value
        if isinstance(value, dict):
            found |= _nodes(value, f"{prefix}{name}.")
    return found


class Applied:
    """A configuration with the overrides of a command."""

    def __init__(self, composed: Composed, overrides: Iterable[PlacedOverride], known: Iterable[str]):
        """`known` has keys of other releases; Hydra accepts them here, too."""
        self.config = copy.deepcopy(composed.config)
        self.places: dict[str, str] = dict(composed.own)
        self.problems: list[Problem] = []
        self.unknown: list[PlacedOverride] = []
        """Overrides of keys that no release has."""
        known = set(known)
        for placed in overrides:
            self._apply(placed, known)

    def _apply(self, placed: PlacedOverride, known: set[str]) -> None:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra.core.override_parser.types import OverrideType
        from hydra.errors import HydraException

        override, key = placed.override, placed.key
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], self.config)
        except HydraException as error:
            if override.is_delete() or override.package is not None:
                remedy = "remove it" if override.is_delete() else "correct the name of the group"
                why = f"Hydra refuses it: {first_line(error)}"
                self.problems.append(Problem(placed.shown, why, remedy, code="unknown-key"))
                return
            if key not in known and not override.is_add():
                self.unknown.append(placed)
                return
            forced = copy.copy(override)
            forced.type = OverrideType.FORCE_ADD
            try:
                ConfigLoaderImpl._apply_overrides_to_config([forced], self.config)
            except HydraException as worse:
                why = f"Hydra refuses it: {first_line(worse)}"
                self.problems.append(Problem(placed.shown, why, "correct the value", code="invalid-value"))
                return
        gone = [name for name in self.places if name == key or name.startswith(key + ".")]
        value = override.value()
        if override.is_delete() or not isinstance(value, dict):
            for name in gone:
                del self.places[name]
        if not override.is_delete():
            inner = flattened({key: value}) if isinstance(value, dict) and value else {key: value}
            for name in inner:
                self.places.pop(name, None)  # the last setting of a key determines its position
                self.places[name] = placed.where

    def value(self, key: str) -> Any:
        """Returns the value of a key with all references resolved. Raises OmegaConf's errors."""
        from omegaconf import OmegaConf

        value = OmegaConf.select(self.config, key, throw_on_missing=False)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def has(self, key: str) -> bool:
        """Returns whether the configuration has a value for the key, which may be null. Hydra writes a value that the
        command must set as `???`."""
        from omegaconf import OmegaConf

        *parents, leaf = key.split(".")
        group = OmegaConf.select(self.config, ".".join(parents)) if parents else self.config
        return OmegaConf.is_dict(group) and leaf in group.keys() and not OmegaConf.is_missing(group, leaf)  # noqa: SIM118
