"""Data scripts with verl's names. The file data_scripts.json has raw rows, and what verl's own scripts made of them.

The scripts of verl 0.4.1 and of its main branch wrote the same rows, also for all 8,792 rows of GSM8K.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from conftest import write_jsonl
from lockstep.compat.migrate import migrated
from lockstep.compat.verl.data_preprocess import OTHERS, SCRIPTS, main, write_script_rows
from lockstep.errors import CODES, Refusal

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "migration" / "data_scripts.json").read_text(encoding="utf-8")
)


def raw_folder(folder: Path, name: str) -> Path:
    for split, rows in CASES[name].items():
        write_jsonl(folder / f"{split}.jsonl", rows["raw"])
    return folder


def test_all_scripts_have_a_case() -> None:
    assert set(CASES) == set(SCRIPTS)
    assert not set(SCRIPTS) & set(OTHERS)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_verls_script(name: str, tmp_path: Path) -> None:
    write_script_rows(name, raw_folder(tmp_path, name), tmp_path / "out")
    for split, rows in CASES[name].items():
        assert pyarrow.parquet.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() == rows["written"]


def test_the_module_of_verls_script_writes_the_rows(tmp_path: Path) -> None:
    raw = raw_folder(tmp_path, "gsm8k")
    module = "lockstep.compat.verl.examples.data_preprocess.gsm8k"
    command = [sys.executable, "-m", module, "--local_dataset_path", str(raw), "--local_dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet")
    assert table.to_pylist() == CASES["gsm8k"]["train"]["written"]


def test_a_copy_of_the_hubs_repository_is_read(tmp_path: Path) -> None:
    for split, rows in CASES["gsm8k"].items():
        (tmp_path / "main").mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows["raw"])
        pyarrow.parquet.write_table(table, tmp_path / "main" / f"{split}-00000-of-00001.parquet")
    main("gsm8k", [str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    table = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet")
    assert table.to_pylist() == CASES["gsm8k"]["train"]["written"]


def test_an_answer_without_its_mark_is_refused(tmp_path: Path) -> None:
    raw = raw_folder(tmp_path, "gsm8k")
    write_jsonl(raw / "test.jsonl", [{"question": "1+1?", "answer": "#### 2"}, {"question": "1+2?", "answer": "####3"}])
    with pytest.raises(Refusal) as refusal:
        write_script_rows("gsm8k", raw, tmp_path / "out")
    assert [(each.code, "line 2" in each.where) for each in refusal.value.problems] == [("invalid-label", True)]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("geo3k", [], "unknown-name"),
        ("nothing", [], "unknown-name"),
        ("gsm8k", ["absent"], "not-a-folder"),
        ("gsm8k", ["."], "missing-file"),
        ("math_dataset", ["--hdfs_dir", "hdfs://x"], "unsupported-setting"),
    ],
)
def test_refusals_have_a_code_and_a_remedy(
    name: str, words: list[str], code: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(name, words)
    told = capsys.readouterr().err
    assert (stopped.value.code, f"[{code}]" in told, "->" in told) == (2, True, True)
    assert code in CODES


def test_migrate_passes_over_data_scripts() -> None:
    text = "python3 verl/examples/data_preprocess/gsm8k.py --local_dir d\npython -m verl.trainer.main_eval a=b\n"
    commands, problems, _ = migrated(text)
    assert (commands, [problem.code for problem in problems]) == ([], ["not-training"])
    assert "main_eval" in problems[0].where
