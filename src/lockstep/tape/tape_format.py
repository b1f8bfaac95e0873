"""The files of a tape. A tape is the recording of a run and consists of safetensors, parquet and JSON files.

    tape/tape.json                     version, recipe, device, fingerprints
    tape/step_000001.safetensors       tensors of a step; the metadata key `lockstep` has JSON
    tape/step_000001.rollouts.parquet  online: responses with tokens, log-probabilities and scores
    tape/step_000001.rows.parquet      offline: rows as token ids
    tape/images/HASH                   the image files of all steps, each once
    tape/weights_000001.safetensors    weights and optimizer state before the step (optional)
    tape/left_000001.safetensors       digests of the weights after the step, before the next one

Every file is written under a temporary name and then renamed, so a file with a final name is always complete.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.errors import Refusal
from lockstep.recipe.renamed_keys import stored_recipe
from lockstep.run.files import replace_text, written_aside

VERSION = 1
MANIFEST = "tape.json"
METADATA = "lockstep"
# `STACKS` is the metadata key with the names of stacked tensors. `SMALL` is the maximum number of elements of a tensor
# that is stacked.
STACKS, SMALL = "stacks", 64
# The thread switch interval of Python in seconds while the writer thread runs. With Python's default of 5 ms, the
# writer thread would delay the training thread, which mostly launches device operations.
SWITCH_INTERVAL = 2e-4


@dataclass(frozen=True)
class StepRecord:
    """The recorded values of one training step, as JSON (`info`) and as tensors. `step` counts from 1, as in
    metrics.jsonl."""

    step: int
    info: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class TapeFolder:
    """Reads and writes the files of one tape."""

    path: Path

    def step_file(self, step: int) -> Path:
        return self.path / f"step_{step:06d}.safetensors"

    def rollouts_file(self, step: int) -> Path:
        return self.path / f"step_{step:06d}.rollouts.parquet"

    def rows_file(self, step: int) -> Path:
        return self.path / f"step_{step:06d}.rows.parquet"

    def weights_file(self, step: int) -> Path:
        return self.path / f"weights_{step:06d}.safetensors"

    def left_file(self, step: int) -> Path:
        return self.path / f"left_{step:06d}.safetensors"

    @property
    def manifest_file(self) -> Path:
        return self.path / MANIFEST

    def steps(self) -> list[int]:
        """Returns the steps that are completely recorded."""
        return self._numbers(r"step_(\d{6})\.safetensors")

    def weighed(self) -> list[int]:
        """Returns the steps whose weights are recorded."""
        return self._numbers(r"weights_(\d{6})\.safetensors")

    def _numbers(self, pattern: str) -> list[int]:
        found = (re.fullmatch(pattern, file.name) for file in self.path.glob("*.safetensors"))
        return sorted(int(match[1]) for match in found if match)

    def rewind(self, step: int) -> None:
        """Deletes the files of steps after `step`, and the partial files of a killed run."""
        if not self.path.is_dir():
            return
        for file in self.path.iterdir():
            number = re.match(r"(?:step|weights|left)_(\d{6})\.", file.name)
            if file.name.startswith(".writing-") or (number and int(number[1]) > step):
                file.unlink()

    def write_manifest(self, values: dict[str, Any]) -> None:
        text = json.dumps({"version": VERSION, **values}, indent=2) + "\n"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.manifest_file, text, private=True)
        except OSError as error:
            raise _unwritten(self.manifest_file, error) from error

    def manifest(self) -> dict[str, Any]:
        try:
            values = json.loads(self.manifest_file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise Refusal.at(
                str(self.path),
                "there is no tape",
                "record one: `lockstep train RECIPE tape=true run.name=NEW`",
                code="no-tape",
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise _unread(self.manifest_file, error) from error
        version = values.get("version") if isinstance(values, dict) else None
        if version != VERSION:
            raise Refusal.at(
                str(self.manifest_file),
                f"the tape has format {version}; this version of lockstep reads format {VERSION}",
                "record the run again, or use the lockstep version that recorded it",
                code="unsupported-version",
            )
        if not isinstance(values.get("recipe"), dict) or "method" not in values["recipe"]:
            raise _unread(self.manifest_file, ValueError("it has no recipe"))
        return {**values, "recipe": stored_recipe(values["recipe"])}

    def write_step(self, record: StepRecord) -> None:
        stacked, names = _stack(record.tensors)
        self._save(self.step_file(record.step), stacked, {**record.info, STACKS: names})

    def write_weights(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        self._save(self.weights_file(step), tensors, {})

    def read_step(self, step: int) -> StepRecord:
        return StepRecord(step, *_unstacked(self.step_file(step)))

    def write_left(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        stacked, names = _stack(tensors)
        self._save(self.left_file(step), stacked, {STACKS: names})

    def read_left(self, step: int) -> dict[str, torch.Tensor]:
        """Returns the digests of the weights after a step. Returns an empty dict if the step has no digests, or if the
        run was killed before it wrote them."""
        return _unstacked(self.left_file(step))[1] if self.left_file(step).is_file() else {}

    def read_weights(self, step: int) -> dict[str, torch.Tensor]:
        return _load(self.weights_file(step))[1]

    def write_table(self, file: Path, rows: list[dict[str, Any]]) -> None:
        table = pa.table({name: _column([row[name] for row in rows]) for name in (rows[0] if rows else {})})
        _write(file, lambda aside: pq.write_table(table, aside))

    def read_table(self, file: Path) -> list[dict[str, Any]]:
        try:
            return pq.read_table(file).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise _unread(file, error) from error

    def _save(self, file: Path, tensors: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
        # The tensors are copied, because safetensors rejects tensors that share memory.
        content = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        _write(file, lambda aside: save_file(content, aside, _metadata(info)))


def _stack(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Stacks small tensors of the same shape, because writing thousands of digests one by one is slow. Returns the
    tensors to write, and the names of the tensors in each stack."""
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype), []).append(name)
    groups = [names for (shape, _), names in alike.items() if shape.numel() <= SMALL and len(names) > 1]
    named = {f"stack/{number}": names for number, names in enumerate(groups)}
    inside = {name for names in groups for name in names}
    rest = {name: tensor for name, tensor in tensors.items() if name not in inside}
    return rest | {
        stack: torch.stack([tensors[n].detach().cpu() for n in names]) for stack, names in named.items()
    }, named


def _column(values: list[Any]) -> pa.Array:
    """Returns a table column. Lists of numbers are converted with NumPy, because the conversion of Python objects by
    pyarrow is slow."""
    if not values or not all(isinstance(value, list) for value in values):
        return pa.array(values)
    flat = np.array(list(chain.from_iterable(values)))
    if flat.dtype.kind not in "if":
        return pa.array(values)
    ends = np.cumsum([0, *(len(value) for value in values)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat))


def _write(file: Path, save: Callable[[Path], None]) -> None:
    try:
        with written_aside(file, durable=False) as aside:
            save(aside)
    except (OSError, SafetensorError) as error:  # safetensors has a separate error type for a full disk
        raise _unwritten(file, error) from error


def _unwritten(file: Path, error: Exception) -> Refusal:
    remedy = "free disk space, or lower tape.steps or tape.modules"
    return Refusal.at(str(file), f"the file could not be written: {error}", remedy, code="unwritable")


def _unread(file: Path, error: Exception) -> Refusal:
    if isinstance(error, FileNotFoundError):
        return Refusal.at(
            str(file),
            "the file is not on the tape",
            "check tape.steps and tape.every of the run",
            code="missing-on-tape",
        )
    return Refusal.at(
        str(file), f"cannot be read: {error}", "copy the tape again, or record it again", code="unreadable"
    )


def _metadata(info: dict[str, Any]) -> dict[str, str]:
    return {METADATA: json.dumps(info)}


def _unstacked(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    info, tensors = _load(file)
    try:
        for stack, names in info.pop(STACKS, {}).items():
            tensors |= zip(names, tensors.pop(stack).unbind(), strict=True)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _unread(file, error) from error
    return info, tensors


def _load(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(file, "pt") as opened:
            info = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            if not isinstance(info, dict):
                raise ValueError(f"the metadata {METADATA} is not a JSON object")
            return info, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise _unread(file, error) from error


def below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names start with `prefix`. The prefix is removed from the names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class TapeWriter:
    """Writes tape files in order in a background thread. An error of the thread is raised in the next call of
    `wait`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lockstep-tape")
        self._last: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Waits for the previous write, so that at most one step is kept in memory, and then starts `write` in the
        thread."""
        self.wait()
        self._last = self._thread.submit(_with_short_switches, write)

    def wait(self) -> None:
        """Waits until all submitted files are written."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _with_short_switches(write: Callable[[], None]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL))
    try:
        write()
    finally:
        sys.setswitchinterval(before)
