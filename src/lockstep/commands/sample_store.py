"""Sampled responses on disk: one file per finished chunk, merged at the end."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import Problem, Refusal, unwritten
from lockstep.run.files import atomic_write_text, written_aside
from lockstep.run.folder import RunFolder, read_object, worker_output
from lockstep.train.resume import flatten
from lockstep.types import Failure, Rollout

# Said, not inferred: a chunk whose every `failure` is null must have the same columns as the others.
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("failure", pa.string()),
        ("stop", pa.string()),
        ("tokens", pa.int64()),
        ("question", pa.int64()),
        ("sample", pa.int64()),
    ]
)


def sample_row(rollout: Rollout, question: int) -> dict[str, Any]:
    """A response as a row; `question` is the number of its row in the data."""
    asked, score = rollout.prompt.question, rollout.score
    if isinstance(score, Failure):
        judged: dict[str, Any] = {"reward": None, "rewards": None, "failure": f"{score.part}: {score.why}"}
    else:
        judged = {"reward": score.total, "rewards": json.dumps(score.parts), "failure": None}
    return {
        "data_source": asked.data_source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in asked.prompt],
        "ground_truth": asked.ground_truth,
        "extra_info": json.dumps(asked.extra_info, ensure_ascii=False, default=str),
        "response": rollout.text,
        **judged,
        "stop": rollout.stop,
        "tokens": len(rollout.ids),
        "question": question,
        "sample": rollout.sample,
    }


class Parts:
    """The chunks of `out`, in a folder beside it. `manifest` says what they were made of."""

    def __init__(self, out: Path, manifest: dict[str, Any]):
        self.out, self.manifest = out, manifest
        self.folder = out.with_name(f"{out.name}.parts")

    def check(self) -> None:
        """Refuse an OUT that cannot be written, or whose finished chunks were made of something else."""
        if self.out.suffix != ".parquet":
            raise Refusal.at(str(self.out), "is not the name of a parquet file", "let OUT end in .parquet")
        if self.out.exists():
            raise Refusal.at(str(self.out), "exists already", "choose another OUT, or remove it")
        if self._manifest.is_file():
            self._refuse_changes(read_object(self._manifest, f"remove the folder {self.folder}, or choose another OUT"))
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.glob("*.parquet"))):
            raise Refusal.at(
                str(self.folder),
                "does not say what it was made of: it has no manifest.json",
                "remove the folder, or choose another OUT",
            )

    def reward_output(self, rank: int) -> Path:
        """Where the last lines that rewards print are kept; they stay when the chunks are merged."""
        return worker_output(self.out.with_name(f"{self.out.name}.rewards"), rank)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other processes out of it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal.at(
                str(self.folder), f"cannot be made: {error.strerror}", "choose an OUT in a folder you can write to"
            ) from error
        with RunFolder(self.folder).lock():
            # Another process may have finished, or begun something else, since the first look.
            self.check()
            if not self._manifest.is_file():
                atomic_write_text(self._manifest, json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n")
            yield

    def finished(self, chunks: int) -> set[int]:
        """The chunks that are there; one that is damaged is refused before the others are sampled."""
        found = {number for number in range(chunks) if self._part(number).is_file()}
        for number in sorted(found):
            try:
                pq.read_metadata(self._part(number))
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(number, error) from error
        return found

    def write(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        with _replacing(self._part(number)) as aside:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), aside)

    def merge(self, chunks: int) -> None:
        """All chunks in order as OUT; then the folder is not needed any more."""
        with _replacing(self.out) as aside, pq.ParquetWriter(aside, SCHEMA) as writer:
            for number in range(chunks):
                try:
                    with pq.ParquetFile(self._part(number)) as part:
                        rows = part.read()
                except (OSError, pa.ArrowException) as error:
                    raise self._damaged(number, error) from error
                writer.write_table(rows)
        shutil.rmtree(self.folder)

    def _damaged(self, number: int, error: Exception) -> Refusal:
        remedy = "remove it, and the same command samples its questions again"
        return Refusal.at(str(self._part(number)), f"is damaged: {error}", remedy)

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:05}.parquet"

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        old, new = flatten(before), flatten(self.manifest)
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        if changed:
            raise Refusal(
                [
                    Problem(
                        key.replace(".", " ", 1),
                        f"{self.folder} was begun with {old.get(key)!r}, and now it is {new.get(key)!r}",
                        f"set it back, remove the folder {self.folder}, or choose another OUT",
                    )
                    for key in changed
                ]
            )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write aside; it takes the place of `path` when it is whole and on the disk."""
    try:
        with written_aside(path) as aside:
            yield aside
    except OSError as error:
        raise unwritten(path, error, "the same command goes on from the finished chunks") from error
