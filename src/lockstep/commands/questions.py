"""The questions of a command that has no recipe: columns are named by options."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.commands.options import as_options
from lockstep.data.columns import ColumnFinder
from lockstep.data.prompts import ASKED, find_question_columns, read_questions
from lockstep.data.read import RowSet
from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Question

OPTIONS = {"data.prompt_key": "--prompt-key", "data.label_key": "--label-key"}


@dataclass(frozen=True)
class NamedColumns:
    """Columns that options name; None where they are found by the names that rows have."""

    prompt: str | None = None
    label: str | None = None


BY_NAME = NamedColumns()


def asked_questions(
    rows: RowSet, limit: int | None, named: NamedColumns, *, first: int = 0, asked: frozenset[str] = ASKED
) -> list[Question]:
    """What is refused advises options, not keys of a recipe."""
    source = Source(path=rows.files[0].name, prompt_key=named.prompt, label_key=named.label)
    try:
        columns = find_question_columns(ColumnFinder(source, Data(train=[source]), rows.columns), asked)
        return read_questions(rows, limit, columns, first=first)
    except Refusal as refusal:
        raise as_options(refusal, OPTIONS) from refusal
