"""`python -m lockstep.compat.verl.examples.data_preprocess.gsm8k`: the rows of verl's data scripts.

The parquet files have the rows that verl's script of the same name writes (unchanged from verl 0.3 to 0.9).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.prepare.generated import assistant_message, rl_row, user_message, write_files
from lockstep.data.sources.read import RowSet, read_rows
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.reward.verl_scores import math_answer
from lockstep.run.output import never_fail_to_encode, write
from lockstep.types import Row

SPLITS = ("train", "test")
_ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class DataScript:
    """A data script of verl: the hub data set, the two text columns that it reads, and the row that it writes."""

    source: str
    columns: tuple[str, str]
    row: Callable[[str, str, str, int], Row | None]
    """Makes a row of question, answer, split and index. Returns None if the answer has no final result."""
    form: str
    """What an answer must contain."""
    config: str = ""


def _gsm8k(question: str, answer: str, split: str, index: int) -> Row | None:
    found = _GSM8K_ANSWER.search(answer)
    if found is None:
        return None
    prompt = user_message(f"{question} {_GSM8K_INSTRUCTION}")
    truth = found[1].replace(",", "")
    return rl_row("openai/gsm8k", prompt, truth, split=split, index=index, answer=answer, question=question)


def _gsm8k_chat(question: str, answer: str, split: str, index: int) -> Row:
    return {"messages": user_message(f"{question} {_GSM8K_INSTRUCTION}") + assistant_message(answer)}


def _math(problem: str, solution: str, split: str, index: int) -> Row | None:
    truth = math_answer(solution)
    if truth is None:
        return None
    prompt = user_message(f"{problem} {_MATH_INSTRUCTION}")
    return rl_row("DigitalLearningGmbH/MATH-lighteval", prompt, truth, split=split, index=index)


_GSM8K_COLUMNS, _GSM8K_FORM = ("question", "answer"), "#### and a number"
SCRIPTS: dict[str, DataScript] = {
    "gsm8k": DataScript("openai/gsm8k", _GSM8K_COLUMNS, _gsm8k, _GSM8K_FORM, "main"),
    "gsm8k_multiturn_sft": DataScript("openai/gsm8k", _GSM8K_COLUMNS, _gsm8k_chat, _GSM8K_FORM, "main"),
    "math_dataset": DataScript(
        "DigitalLearningGmbH/MATH-lighteval", ("problem", "solution"), _math, "a \\boxed{} with its result"
    ),
}
FOLDERS = {"gsm8k": "~/data/gsm8k", "gsm8k_multiturn_sft": "~/data/gsm8k_sft", "math_dataset": "~/data/math"}

_VERLS = "run verl's own script: lockstep reads its parquet files"
_TOOLS = f"writes rows for verl's example tools; {_VERLS} and its columns tools_kwargs and agent_name"
# Data scripts of verl that lockstep does not have, and what to do instead.
OTHERS = {
    "hellaswag": f"writes questions for which verl has no reward rule; {_VERLS}; set reward.function",
    "full_hh_rlhf": f"writes SFT, reward-model and RL rows of one data set; {_VERLS}",
    "geo3k": f"writes images; {_VERLS} (`lockstep help vision`)",
    "geo3k_multiturn_w_tool": f"writes images; {_VERLS} (`lockstep help vision`)",
    "pokemon": f"writes images; {_VERLS} (`lockstep help vision`)",
    "gsm8k_multiturn_w_tool": _TOOLS,
    "gsm8k_tool_agent_loop": _TOOLS,
    "aime2024_multiturn_w_tool": _TOOLS,
    "dapo_multiturn_w_tool": _TOOLS,
    "gsm8k_multiturn_w_interaction": "writes rows for verl's interactions; write an environment instead",
    "multiturn": "writes six example conversations; write your own rows with a column `messages`",
    "preprocess_search_r1_dataset": f"writes rows with a search tool; {_VERLS}",
}


def write_script_rows(name: str, raw: Path | None, out: Path) -> dict[str, int]:
    """Writes train.parquet and test.parquet of the script `name`. `raw` is a folder with the raw rows; if it is None,
    they come from the Hugging Face hub. Returns the number of rows by file."""
    script = SCRIPTS[name]
    problems: list[Problem] = []
    files = {split: list(_rows(_raw_rows(script, raw, split), script, split, problems)) for split in SPLITS}
    refuse_all(problems, "rows")
    return write_files(out, files)


def _rows(rows: RowSet, script: DataScript, split: str, problems: list[Problem]) -> Iterator[Row]:
    for index in range(len(rows)):
        row = dict(rows[index])
        question, answer = (row.pop(name, None) for name in script.columns)
        where = str(rows.origin(index))
        if not isinstance(question, str) or not isinstance(answer, str):
            why = f"the row needs the columns {' and '.join(script.columns)}, both as text"
            problems.append(Problem(where, why, "give the raw data set", code="missing-column"))
            continue
        made = script.row(question, answer, split, index)
        if made is None:
            why = f"the column {script.columns[1]} does not contain {script.form}"
            problems.append(Problem(where, why, "correct or remove the row", code="invalid-label"))
            continue
        yield {**row, **made}  # verl keeps the other columns, before its own


def _raw_rows(script: DataScript, raw: Path | None, split: str) -> RowSet:
    if raw is None:
        try:
            return read_rows(f"hub:{script.source}:{script.config}:{split}")
        except Refusal as refusal:
            more = f"or download {script.source} elsewhere, and give its folder: --local_dataset_path FOLDER"
            raise Refusal(
                [
                    Problem(each.where, each.why, f"{each.remedy}; {more}" if each.remedy else more, code=each.code)
                    for each in refusal.problems
                ]
            ) from refusal
    for folder in (raw / script.config, raw, raw / "data"):  # a copy of the hub's repository has subfolders
        for ending in _ENDINGS:
            if (file := folder / f"{split}{ending}").is_file():
                return read_rows(str(file))
        if list(folder.glob(f"{split}-*.parquet")):
            return read_rows(str(folder / f"{split}-*.parquet"))
    remedy = f"give a folder with {split}.jsonl or {split}-*.parquet, such as a copy of {script.source}"
    if not raw.is_dir():
        raise Refusal.at(raw, "is not a folder", remedy, code="not-a-folder")
    raise Refusal.at(raw, f"has no file with the rows of the split {split}", remedy, code="missing-file")


def main(name: str, words: Sequence[str]) -> None:
    """Runs the data script `name` with the words of its command line."""
    never_fail_to_encode()
    try:
        counts, folder = _run(name, words)
    except Refusal as refusal:
        from lockstep.run.console import print_problems

        print_problems(refusal)
        sys.exit(2)
    for file, rows in counts.items():
        write(f"wrote {folder / file}: {rows:,} rows")


def _run(name: str, words: Sequence[str]) -> tuple[dict[str, int], Path]:
    if name not in SCRIPTS:
        why = OTHERS.get(name, "is not a data script of verl that lockstep knows")
        remedy = f"lockstep has {', '.join(SCRIPTS)}"
        raise Refusal.at(f"examples.data_preprocess.{name}", why, remedy, code="unknown-name")
    parser = argparse.ArgumentParser(prog=name, description=f"Writes {SCRIPTS[name].source} as verl's script does.")
    parser.add_argument("raw", nargs="?", help="folder with the raw data set (same as --local_dataset_path)")
    parser.add_argument("--local_dataset_path", help="folder with the raw data set [default: the Hugging Face hub]")
    parser.add_argument("--local_dir", help="folder of the rows (name in verl 0.4)")
    parser.add_argument("--local_save_dir", default=FOLDERS[name], help="folder of the rows [default: %(default)s]")
    parser.add_argument("--hdfs_dir", help="not supported")
    given = parser.parse_args(list(words))
    if given.hdfs_dir is not None:
        remedy = f"remove the flag, and copy the folder afterwards: hdfs dfs -put FOLDER {given.hdfs_dir}"
        raise Refusal.at("--hdfs_dir", "lockstep does not write to HDFS", remedy, code="unsupported-setting")
    raw = given.local_dataset_path or given.raw
    folder = Path(given.local_dir or given.local_save_dir).expanduser()
    return write_script_rows(name, Path(raw).expanduser() if raw else None, folder), folder
