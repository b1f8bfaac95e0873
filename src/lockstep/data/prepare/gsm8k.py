"""GSM8K as RL rows: from the data set's raw jsonl files, or from the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.data.prepare.write import asked, rl_row, write_files
from lockstep.data.read import RowSet, read_rows
from lockstep.errors import Problem, refuse_all
from lockstep.types import Row

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Think step by step, and give the final answer after ####."
COUNTS = {"train": 7473, "test": 1319}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def write_gsm8k(out: Path, *, source: Path | None = None, check_counts: bool = True) -> dict[str, int]:
    """Write train.parquet and test.parquet; returns rows by file. `source` holds the raw train.jsonl and test.jsonl."""
    written: dict[str, list[Row]] = {}
    problems: list[Problem] = []
    for split, expected in COUNTS.items():
        path = str(source / f"{split}.jsonl") if source is not None else f"hub:{DATA_SOURCE}:main:{split}"
        rows = read_rows(path)
        if check_counts and len(rows) != expected:
            problems.append(
                Problem(
                    path, f"has {len(rows):,} rows, the data set has {expected:,}", "get a whole copy of the data set"
                )
            )
        written[split] = list(_convert(rows, split, problems))
    refuse_all(problems, "rows")
    return write_files(out, written)


def _convert(rows: RowSet, split: str, problems: list[Problem]) -> Iterator[Row]:
    for index in range(len(rows)):
        row, origin = rows[index], rows.origin(index)
        question, answer = row.get("question"), row.get("answer")
        if not (isinstance(question, str) and question.strip() and isinstance(answer, str)):
            problems.append(Problem(str(origin), "needs a question and an answer, both text"))
            continue
        _, mark, final = answer.rpartition("####")
        truth = final.strip().replace(",", "")
        if not mark or not _NUMBER.fullmatch(truth):
            problems.append(Problem(str(origin), "the answer does not end with '#### number'"))
            continue
        prompt = asked(f"{question} {INSTRUCTION}")
        yield rl_row(DATA_SOURCE, prompt, truth, split=split, index=index, question=question, answer=answer)
