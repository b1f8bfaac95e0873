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

# Explicit, because a chunk in which every `failure` is null must have the same schema.
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
    """A response as a row; `question` is its row index in the data."""
    question_row, score = rollout.prompt.question, rollout.score
    if isinstance(score, Failure):
        scores: dict[str, Any] = {"reward": None, "rewards": None, "failure": f"{score.part}: {score.why}"}
    else:
        scores = {"reward": score.total, "rewards": json.dumps(score.parts), "failure": None}
    return {
        "data_source": question_row.data_source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in question_row.prompt],
        "ground_truth": question_row.ground_truth,
        "extra_info": json.dumps(question_row.extra_info, ensure_ascii=False, default=str),
        "response": rollout.text,
        **scores,
        "stop": rollout.stop,
        "tokens": len(rollout.ids),
        "question": question,
        "sample": rollout.sample,
    }


class Parts:
    """The chunks of `out`, in the folder `OUT.parts`. `manifest` describes the inputs."""

    def __init__(self, out: Path, manifest: dict[str, Any]):
        self.out, self.manifest = out, manifest
        self.folder = out.with_name(f"{out.name}.parts")

    def check(self) -> None:
        """Rejects an OUT that cannot be written, or whose finished chunks have other inputs."""
        if self.out.suffix != ".parquet":
            raise Refusal.at(
                str(self.out),
                "is not a parquet file name",
                "use a name that ends with .parquet",
                code="unsupported-format",
            )
        if self.out.exists():
            raise Refusal.at(str(self.out), "already exists", "choose another OUT, or remove it", code="already-exists")
        if self._manifest.is_file():
            self._refuse_changes(read_object(self._manifest, f"remove the folder {self.folder}, or choose another OUT"))
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.glob("*.parquet"))):
            raise Refusal.at(
                str(self.folder),
                "has no manifest.json, so its inputs are undefined",
                "remove the folder, or choose another OUT",
                code="damaged-file",
            )

    def reward_output(self, rank: int) -> Path:
        """File with the last printed lines of the rewards; it remains after the merge."""
        return worker_output(self.out.with_name(f"{self.out.name}.rewards"), rank)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder and locks it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal.at(
                str(self.folder),
                f"cannot be created: {error.strerror}",
                "choose an OUT in a writable folder",
                code="unwritable",
            ) from error
        with RunFolder(self.folder).lock():
            # Another process may have changed the folder since the first check.
            self.check()
            if not self._manifest.is_file():
                atomic_write_text(self._manifest, json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n")
            yield

    def finished(self, chunks: int) -> set[int]:
        """The finished chunks. A damaged one is an error before the others are sampled."""
        numbers = {number for number in range(chunks) if self._part(number).is_file()}
        for number in sorted(numbers):
            try:
                pq.read_metadata(self._part(number))
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(number, error) from error
        return numbers

    def write(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        with _replacing(self._part(number)) as aside:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), aside)

    def merge(self, chunks: int) -> None:
        """Merges all chunks in order to OUT and deletes the folder."""
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
        remedy = "remove it and run the same command again"
        return Refusal.at(str(self._part(number)), f"is damaged: {error}", remedy, code="damaged-file")

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
                        f"{self.folder} was started with {old.get(key)!r}, and now it is {new.get(key)!r}",
                        f"set it back, remove the folder {self.folder}, or choose another OUT",
                        code="changed-setting",
                    )
                    for key in changed
                ]
            )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` after it is complete and on disk."""
    try:
        with written_aside(path) as aside:
            yield aside
    except OSError as error:
        raise unwritten(path, error, "run the same command to resume from the finished chunks") from error
