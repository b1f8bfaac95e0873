"""Atomic checkpoints. A checkpoint is written to a temporary folder, checksummed and then renamed.

A run of one process writes `model.safetensors` (all trained weights, or only the adapter) and `optimizer.safetensors`
(moments, master weights, random states). If the run trains a critic, the checkpoint also has a model file and an
optimizer file of the critic. A run of several ranks writes the same tensors as shards in the folder `shards/`. Every
checkpoint also has `state.json` and `manifest.json`. The manifest is written last and has the size and SHA-256 of each
file (for a large file, the SHA-256 of the digests of its blocks). A run with any number of processes can read sharded
and unsharded checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lockstep.errors import Refusal
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.recipe.measure import Measure
from lockstep.recipe.renamed_keys import stored_recipe
from lockstep.run.files import BLOCK, block_checksum, checksum, write_private, written_aside
from lockstep.run.folder import read_object
from lockstep.run.tensor_file import write_files

VERSION, SHARDED_VERSION = 1, 2
SHARDS = "shards"
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"
# Free disk space that a checkpoint needs in addition to its tensors, for headers, JSON files and later metrics.
SPARE_BYTES = 4 * 2**20


@dataclass
class State:
    """The part of a run's state that is neither a tensor nor in the recipe."""

    step: int
    rows_seen: int
    recipe: dict[str, Any]
    data: dict[str, Any]
    world_size: int
    measured: dict[str, float] = field(default_factory=dict)
    """The finite metrics of the step, which are used to find the best checkpoints."""
    loss_scale: list[float] = field(default_factory=list)
    skipped: int = 0
    end_tokens: list[int] = field(default_factory=list)
    planned: int | None = None
    """Planned number of steps, which determines the learning rate schedule."""
    kind: str = ""
    """The type of the trained model, which is `policy` or `value`. In checkpoints of earlier lockstep versions, `kind`
    is empty."""
    files: dict[str, str] = field(default_factory=dict)
    """Additional text files that the exported model needs, such as the chat template, by file name."""
    carried: dict[str, float] = field(default_factory=dict)
    """Values that the training loop keeps between steps, by name."""
    decay_rule: str = ""
    """Which parameters have no weight decay. `role` means that biases and norms have no weight decay. In checkpoints of
    earlier lockstep versions, `decay_rule` is empty, and one-dimensional parameters have no weight decay."""
    probe: dict[str, Any] = field(default_factory=dict)
    """A few token sequences and the model outputs for them, which the exported model must reproduce. In checkpoints of
    earlier lockstep versions, `probe` is empty."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each recipe key that names a model: the `path` of the model and the digests of its `files`. In checkpoints of
    earlier lockstep versions, `models` is empty."""
    version: int = VERSION


@dataclass
class Checkpoint:
    """A checkpoint. A tensor is read from disk when it is accessed."""

    state: State
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    path: Path
    critic: Mapping[str, torch.Tensor] = field(default_factory=dict)
    critic_optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step}"


def steps_in(checkpoints: Path) -> list[int]:
    """Returns the steps that have a checkpoint folder, oldest first."""
    found = [p.name.removeprefix("step_") for p in checkpoints.glob("step_*") if p.is_dir()]
    return sorted(int(step) for step in found if step.isdigit())


def save(checkpoints: Path, state: State, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    """Writes a checkpoint atomically. `tensors` maps file names to their tensors. Existing checkpoints are not
    changed."""
    require_disk(checkpoints, sum(map(bytes_of, tensors.values())), "a checkpoint")
    return write(folder_of(checkpoints, state.step), json.dumps(asdict(state), indent=2), tensors)


def write(target: Path, state: str, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    """Writes the folder of a checkpoint, with `state` as the text of its state.json."""
    try:
        with written_aside(target) as aside:
            aside.mkdir(parents=True)
            files = write_files({aside / name: content for name, content in tensors.items()})
            write_private(aside / STATE, state)
            entries = {file.name: entry for file, entry in files.items()}
            write_manifest(aside, {**entries, **told_of(aside, [aside / STATE])})
    except OSError as error:
        raise unwritten_checkpoint(target, str(error)) from error
    return target


def told_of(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Returns the manifest entries (size and checksum) of files in the folder."""
    entries = {}
    for file in files:
        size = file.stat().st_size
        large = {"block": BLOCK, "sha256_blocks": block_checksum(file, BLOCK)} if size > BLOCK else None
        entries[file.relative_to(folder).as_posix()] = {"bytes": size, **(large or {"sha256": checksum(file)})}
    return entries


def write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2), encoding="utf-8")


def unwritten_checkpoint(target: Path, why: str) -> Refusal:
    return Refusal.at(
        str(target),
        f"could not be written: {why}",
        "free some disk; earlier checkpoints are unchanged",
        code="disk-full",
    )


def require_disk(folder: Path, needed: int, what: str, keys: str = "lower checkpoint.keep_last") -> None:
    """Raises `Refusal`, before anything is written, if the disk is too full. `keys` is a part of the error message that
    says which recipe keys save space."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise Refusal.at(
            str(folder),
            f"{what} needs {(needed + SPARE_BYTES) / 2**20:,.0f} MiB, but the disk has {free / 2**20:,.0f} MiB free",
            f"free some disk, {keys}, or move run.folder; nothing was overwritten",
            code="disk-full",
        )


def prune(checkpoints: Path, *, keep_last: int, keep_best: int, measure: Measure, warn: Callable[[str], None]) -> None:
    """Removes checkpoints that are neither among the newest nor among the best. A folder is renamed before it is
    deleted, so that a kill leaves no partial checkpoint.

    A checkpoint with unreadable metrics is renamed with a warning and not removed, because it may be the best.
    """
    steps = steps_in(checkpoints)
    kept = set(steps[-keep_last:])
    if keep_best:
        values: dict[int, float | None] = {}
        for step in steps:
            try:
                values[step] = _measured(folder_of(checkpoints, step), measure)
            except Refusal as refusal:
                warn(f"{refusal.problems[0].where} {refusal.problems[0].why}; set aside as damaged-step_{step}")
                _set_aside(folder_of(checkpoints, step))
        kept |= set(_ranked(values, measure)[:keep_best])
        steps = list(values)
    for step in steps:
        if step not in kept:
            doomed = checkpoints / f".removing-step_{step}"
            folder_of(checkpoints, step).rename(doomed)
            shutil.rmtree(doomed)


def best_step(checkpoints: Path, measure: Measure) -> tuple[int, float] | None:
    """Returns the step of the best checkpoint and its metric value. If several steps are equally good, the first of
    these steps is returned."""
    values = {step: _measured(folder_of(checkpoints, step), measure) for step in steps_in(checkpoints)}
    for step in _ranked(values, measure):
        if (value := values[step]) is not None:
            return step, value
    return None


def _ranked(values: Mapping[int, float | None], measure: Measure) -> list[int]:
    """Returns the steps that have a metric value, best step first."""
    ranked = [(measure.rank(value), step) for step, value in values.items() if value is not None]
    return [step for _, step in sorted(ranked)]


def sweep(checkpoints: Path) -> None:
    """Deletes temporary folders of killed processes, and makes state.json readable only for the user."""
    for pattern in (".writing-*", ".removing-*"):
        for leftover in checkpoints.glob(pattern):
            shutil.rmtree(leftover)
    for state in checkpoints.glob(f"step_*/{STATE}"):
        with contextlib.suppress(OSError):  # owned by another user
            state.chmod(0o600)


def set_damaged_aside(checkpoints: Path, warn: Callable[[str], None]) -> None:
    """Renames damaged checkpoints, with a warning, until the newest remaining checkpoint is complete. Raises if all
    checkpoints are damaged."""
    steps = steps_in(checkpoints)
    for step in reversed(steps):
        path = folder_of(checkpoints, step)
        damage = damage_of(path)
        if damage is None:
            return
        if step == steps[0]:
            raise Refusal.at(
                str(checkpoints),
                f"every checkpoint in this folder is damaged ({damage})",
                "start again with another run.name",
                code="damaged-checkpoint",
            )
        warn(f"checkpoint {path.name} is damaged ({damage}); using the checkpoint before it")
        _set_aside(path)


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def newest(checkpoints: Path) -> Checkpoint | None:
    """Reads the newest checkpoint. The caller must have called `set_damaged_aside` before."""
    steps = steps_in(checkpoints)
    return read(folder_of(checkpoints, steps[-1])) if steps else None


def damage_of(path: Path) -> str | None:
    """Returns a description of the damage of a checkpoint folder. Returns None if every file matches the manifest."""
    try:
        manifest = read_object(path / MANIFEST)
    except Refusal as refusal:
        return f"{MANIFEST} {refusal.problems[0].why}"
    if damage := _damage_of_manifest(manifest, path):
        return f"{MANIFEST} {damage}"
    try:
        return next(
            (damage for name, entry in manifest.items() if (damage := _damage_of_file(path / name, entry))), None
        )
    except OSError as error:
        return f"cannot be read: {error}"


def _damage_of_manifest(manifest: dict[str, Any], path: Path) -> str:
    if (path / SHARDS).is_dir():
        needed = [f"{SHARDS}/{file.name}" for file in sorted((path / SHARDS).iterdir())]
    else:
        needed = [MODEL, OPTIMIZER, *(name for name in (CRITIC, CRITIC_OPTIMIZER) if (path / name).exists())]
    for name in (*needed, STATE):
        if name not in manifest:
            return f"has no entry for {name}"
    for name, entry in manifest.items():
        if (
            Path(name).name != name.removeprefix(f"{SHARDS}/")
            or not isinstance(entry, dict)
            or not ({"bytes", "sha256"} <= entry.keys() or _has_blocks(entry))
        ):
            return f"has no size and checksum of {name!r}"
    return ""


def _has_blocks(entry: dict[str, Any]) -> bool:
    """Returns whether the manifest entry has the checksum of the blocks of a file."""
    block = entry.get("block")
    return {"bytes", "sha256_blocks"} <= entry.keys() and type(block) is int and block > 0


def _damage_of_file(file: Path, entry: dict[str, Any]) -> str:
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
    blocks = _has_blocks(entry)
    found = block_checksum(file, entry["block"]) if blocks else checksum(file)
    if found != entry["sha256_blocks" if blocks else "sha256"]:
        return f"{file.name} has a wrong checksum"
    return ""


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint. The caller must have verified the files with `damage_of` before."""
    values = _current(read_object(path / STATE))
    try:
        version = values.get("version")
        if version not in (VERSION, SHARDED_VERSION):
            raise Refusal.at(
                str(path),
                f"the checkpoint has format {version}; this version reads the formats {VERSION} and {SHARDED_VERSION}",
                code="unsupported-version",
            )
        _refuse_paths(values.get("files", {}), path / STATE)
        stored = _shards(path) if version == SHARDED_VERSION else _files(path)
        parts = {name: one for name in (CRITIC, CRITIC_OPTIMIZER) if (one := stored(name))}
        return Checkpoint(State(**values), stored(MODEL), stored(OPTIMIZER), path, *parts.values())
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise Refusal.at(str(path), f"cannot be read: {error}", code="unreadable") from error


def _refuse_paths(files: Any, where: Path) -> None:
    """Raises `Refusal` if a file name contains a path, because an export writes these files into its folder."""
    for name, text in files.items() if isinstance(files, dict) else [(files, "")]:
        plain = isinstance(name, str) and isinstance(text, str) and Path(name).name == name and "\0" not in name
        if not plain or name in ("", ".."):
            why = f"its entry `files` has {name!r:.80}, which is not a plain file name with a text"
            raise Refusal.at(
                str(where),
                why,
                "the checkpoint was changed after it was written: use another checkpoint",
                code="damaged-checkpoint",
            )


def _files(path: Path) -> Callable[[str], StoredTensors]:
    return lambda part: StoredTensors([path / part] if part in (MODEL, OPTIMIZER) or (path / part).is_file() else [])


def _shards(path: Path) -> Callable[[str], StoredTensors]:
    files = list((path / SHARDS).glob("*.safetensors"))
    return lambda part: StoredTensors(files, part_prefix(part))


def part_prefix(part: str) -> str:
    """Returns the prefix of tensor names in sharded files, which contain the tensors of several parts (`part`: model,
    optimizer or critic)."""
    return f"{part.removesuffix('.safetensors')}/"


def _measured(path: Path, measure: Measure) -> float | None:
    """Returns the value of the metric at a checkpoint. Returns None if the metric is missing or not finite."""
    measured = _current(read_object(path / STATE)).get("measured", {})
    value = measured.get(measure.name) if isinstance(measured, dict) else measured
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        why = f"its {measure.name} is {value!r}"
        raise Refusal.at(
            str(path / STATE),
            why,
            "remove the checkpoint, or choose another checkpoint with --step",
            code="damaged-checkpoint",
        )
    return measure.value({measure.name: value}) if value is not None else None


def _current(values: dict[str, Any]) -> dict[str, Any]:
    """Converts the content of a state.json of an earlier lockstep version. Renames recipe keys, and moves `val_loss` to
    `measured`."""
    if "recipe" in values:
        values = {**values, "recipe": stored_recipe(values["recipe"])}
    if "val_loss" not in values:
        return values
    loss = values["val_loss"]
    rest = {name: value for name, value in values.items() if name != "val_loss"}
    return {**rest, "measured": {} if loss is None else {"val/loss": loss}}


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the size of the unsharded tensors in bytes, even if this rank has only shards."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
