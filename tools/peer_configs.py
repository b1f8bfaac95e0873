"""Writes the configuration keys and defaults of verl releases to `verl_configs.json` and `verl_keys.json`.

    python tools/peer_configs.py 0.4.1=FOLDER 0.5.0=FOLDER ...

FOLDER contains `verl/trainer/config` and, if the release has them, the configurations of `verl/experimental` and
`recipe`. The file has one line per key and configuration file: its default in each range of versions. A default is
stored as it is in the file, so that Hydra can compose the configuration and resolve its references. `verl_keys.json`
has the keys of all composed configurations with the versions that have them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.compat.hydra_overrides import StoredRelease, parse_overrides, stored_configs, stored_files
from lockstep.compat.key_table import FOLDER

NOTICE = (
    "Names and default values of the configuration files of verl, https://github.com/volcengine/verl, "
    "Copyright 2024 Bytedance Ltd. and/or its affiliates, Apache License 2.0. Comments and layout are left out. "
    "tools/peer_configs.py writes this file."
)
# Configurations outside of verl/trainer/config whose programs lockstep reads.
MORE = ("dapo", "entropy", "one_step_off_policy", "fully_async_policy")
# Configurations that no training program of lockstep uses.
LEFT_OUT = re.compile(r"^(_generated_|evaluation$|generation$)")
# How the names of configurations of programs end. The other files are parts of them.
MAIN = ("_trainer", "_engine")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)

Range = list[Any]
"""The first and the last version of a range, and the default in these versions."""


def config_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name (`actor/dp_actor`) and the path of each configuration file of a release."""
    main = folder / "verl" / "trainer" / "config"
    for path in sorted(main.rglob("*.yaml")):
        yield path.relative_to(main).with_suffix("").as_posix(), path
    for place in MORE:
        for parent in (folder / "recipe" / place / "config", folder / "verl" / "experimental" / place / "config"):
            for path in sorted(parent.glob("*_trainer.yaml")):
                yield path.stem, path


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves by dotted key. An empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if "." in str(name):
            raise SystemExit(f"{prefix}{name}: a name with a dot cannot be stored")
        nested = isinstance(value, dict) and value
        flat |= flat_values(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def file_values(path: Path) -> dict[str, Any]:
    """Returns the keys of one file. `defaults` is Hydra's list of included files, `@package` its package."""
    text = path.read_text(encoding="utf-8")
    values: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    values.pop("hydra", None)
    package = _PACKAGE.search(text)
    return ({"@package": package[1]} if package else {}) | flat_values(values)


def ranges(versions: Sequence[str], by_version: Mapping[str, Any]) -> list[Range]:
    """Returns the ranges of versions with the same default."""
    found: list[Range] = []
    for place, version in enumerate(versions):
        if version not in by_version:
            continue
        value = by_version[version]
        last = found[-1] if found else None
        if last and versions.index(last[1]) == place - 1 and json.dumps(last[2]) == json.dumps(value):
            last[1] = version
        else:
            found.append([version, version, value])
    return found


def main(arguments: Sequence[str]) -> None:
    releases = dict(argument.split("=", 1) for argument in arguments)
    versions = sorted(releases, key=lambda version: [int(part) for part in version.split(".")])
    files: dict[str, dict[str, dict[str, Any]]] = {}
    for version in versions:
        for name, path in config_files(Path(releases[version])):
            if not LEFT_OUT.match(name):
                for key, value in file_values(path).items():
                    files.setdefault(name, {}).setdefault(key, {})[version] = value
    lines = [f'{{"notice": {json.dumps(NOTICE)},', f'"versions": {json.dumps(versions)},', '"files": {']
    blocks = []
    for name in sorted(files):
        rows = [f"{json.dumps(key)}: {json.dumps(ranges(versions, found))}" for key, found in files[name].items()]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    (FOLDER / "verl_configs.json").write_text("\n".join([*lines, ",\n".join(blocks), "}}", ""]), encoding="utf-8")
    stored_configs.cache_clear()
    stored_files.cache_clear()
    write_keys(versions)


def composed_keys(version: str) -> Iterator[str]:
    """Yields the keys of all configurations of a release, with each choice of the engine's groups."""
    files = stored_files("verl", version)
    release = StoredRelease("verl", version)
    engines = [name.split("/")[1] for name in files if name.startswith("model_engine/")]
    backends = [name.split("/")[1] for name in files if name.startswith("engine/")]
    for config in files:
        if "/" in config or not config.endswith(MAIN):
            continue
        choices: list[list[str]] = [[]]
        if config == "ppo_trainer":
            choices += [[f"model_engine={name}"] for name in engines]
        if config == "sft_trainer_engine":
            choices += [[f"engine={name}", f"optim={name}"] for name in backends if f"optim/{name}" in files]
        for words in choices:
            yield from release.compose(config, parse_overrides(words).overrides).nodes


def write_keys(versions: Sequence[str]) -> None:
    by_key: dict[str, dict[str, bool]] = {}
    for version in versions:
        for key in composed_keys(version):
            by_key.setdefault(key, {})[version] = True
    rows = [
        f"{json.dumps(key)}: {json.dumps([[first, last] for first, last, _ in ranges(versions, by_key[key])])}"
        for key in sorted(by_key)
    ]
    head = f'{{"notice": {json.dumps(NOTICE)},\n"keys": {{\n'
    (FOLDER / "verl_keys.json").write_text(head + ",\n".join(rows) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
