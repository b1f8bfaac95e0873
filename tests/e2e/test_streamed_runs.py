"""Runs on streamed rows: killed and resumed bit for bit, the same on one and two ranks, and what they refuse."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commands import lockstep
from conftest import chat_rows, question_rows, run, write_jsonl, write_online_recipe
from kills import killed, lines
from runs import facts

STREAMED = ["data.streaming=true", "data.shuffle_buffer=16", "checkpoint.every=2", "checkpoint.keep_last=9"]


def shards(folder: Path, rows: list[dict[str, object]], files: int = 4) -> Path:
    """The rows in several files; the last is a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for part in range(files - 1):
        write_jsonl(folder / f"{part}.jsonl", rows[part::files])
    pq.write_table(pa.Table.from_pylist(rows[files - 1 :: files]), folder / f"{files - 1}.parquet")
    return folder


def weights(folder: Path, step: int) -> dict[str, object]:
    return {
        name: tensor.tolist()
        for name, tensor in load_file(folder / "checkpoints" / f"step_{step}" / "model.safetensors").items()
    }


@pytest.mark.slow
def test_a_resumed_run_ends_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    rows = [{**row, "unread": number} for number, row in enumerate(chat_rows(44))]
    settings = [f"data.train={shards(tmp_path / 'rows', rows)}", "run.steps=8", "run.export=false", *STREAMED]
    for name in ("whole", "part"):
        assert run("train", recipe_file, f"run.name={name}", *settings) == 0
    part, whole = tmp_path / "runs" / "part", tmp_path / "runs" / "whole"
    # As after a kill in step 6: the later checkpoints never came to be.
    for step in (6, 8):
        shutil.rmtree(part / "checkpoints" / f"step_{step}")
    assert run("train", recipe_file, "run.name=part", *settings) == 0
    assert facts(part) == facts(whole)
    assert weights(part, 8) == weights(whole, 8)
    # 64 rows are one epoch of 44 rows, and more.
    assert (dict(facts(whole))[8]["data/streamed"], int(dict(facts(whole))[8]["train/epoch"])) == (64.0, 1)


@pytest.mark.slow
def test_a_killed_run_ends_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    settings = [f"data.train={shards(tmp_path / 'rows', chat_rows(44))}", "run.steps=12", *STREAMED]
    assert lockstep("train", recipe_file, "run.name=whole", *settings).returncode == 0
    folder, whole = tmp_path / "runs" / "killed", tmp_path / "runs" / "whole"
    killed(["train", recipe_file, "run.name=killed", *settings], lines(folder / "metrics.jsonl", 7))
    done = lockstep("train", recipe_file, "run.name=killed", *settings)
    assert done.returncode == 0, done.stderr
    assert "resum" in done.stdout + done.stderr
    assert facts(folder) == facts(whole)
    assert weights(folder, 12) == weights(whole, 12)
    (last,) = [values for step, values in facts(whole) if step == 12]
    # 96 rows of 44 are two epochs and 8 rows.
    assert (last["data/streamed"], int(last["train/epoch"])) == (96.0, 2)


@pytest.mark.slow
def test_two_ranks_train_the_rows_of_one(recipe_file: Path, tmp_path: Path) -> None:
    settings = [f"data.train={shards(tmp_path / 'rows', chat_rows(44))}", "run.steps=3", "run.export=false", *STREAMED]
    assert lockstep("train", recipe_file, "run.name=one", *settings).returncode == 0
    done = lockstep("train", recipe_file, "run.name=two", "parallel.devices=2", *settings)
    assert done.returncode == 0, done.stderr
    one, two = (dict(facts(tmp_path / "runs" / name)) for name in ("one", "two"))
    for step in (1, 2, 3):
        for key in ("train/tokens", "train/trained_tokens", "data/streamed"):
            assert one[step][key] == two[step][key]
        assert one[step]["train/loss"] == pytest.approx(two[step]["train/loss"], rel=1e-5)


@pytest.mark.slow
def test_an_online_run_on_streamed_prompts_resumes(tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_online_recipe(tmp_path, tiny_folder)
    rows = shards(tmp_path / "prompts", question_rows(20))
    settings = [f"data.train={rows}", "run.export=false", *STREAMED]
    for name in ("whole", "part"):
        assert run("train", recipe, f"run.name={name}", *settings) == 0
    part, whole = tmp_path / "runs" / "part", tmp_path / "runs" / "whole"
    shutil.rmtree(part / "checkpoints" / "step_4")
    assert run("train", recipe, "run.name=part", *settings) == 0
    assert facts(part) == facts(whole)
    assert weights(part, 4) == weights(whole, 4)
    assert dict(facts(whole))[4]["data/streamed"] == 16.0


def test_changed_files_are_refused_at_a_resume(
    recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = shards(tmp_path / "rows", chat_rows(44))
    settings = [f"data.train={rows}", "run.export=false", *STREAMED]
    assert run("train", recipe_file, "optim.warmup=0", "run.steps=2", *settings) == 0
    write_jsonl(rows / "1.jsonl", chat_rows(7))
    assert run("train", recipe_file, "optim.warmup=0", "run.steps=4", *settings) != 0
    assert "changed-data" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "code", "where"),
    [
        (["run.steps=null"], "not-set", "run.steps"),
        (["run.steps=null", "run.epochs=2"], "not-set", "run.steps"),
        (["data.max_rows=5"], "unsupported-combination", "data.max_rows"),
        (["data.drop_last=true"], "unused-key", "data.drop_last"),
        (["data.reader=rows.py:read"], "unsupported-combination", "data.reader"),
        (["method=rm"], "unsupported-combination", "data.streaming"),
        (["method=dpo", "preference.precompute=true"], "unsupported-combination", "preference.precompute"),
        (["data.streaming=false", "data.shuffle_buffer=5"], "needs-key", "data.shuffle_buffer"),
        (["method=dpo", "data.long_text=split"], "unused-key", "data.long_text"),
    ],
)
def test_what_streaming_cannot_do(
    recipe_file: Path, capfd: pytest.CaptureFixture[str], settings: list[str], code: str, where: str
) -> None:
    assert run("train", recipe_file, "data.streaming=true", *settings) != 0
    printed = " ".join(capfd.readouterr().err.split())
    assert f"{where} [{code}]" in printed


def test_a_plan_counts_rows_and_is_refused(recipe_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("plan", recipe_file, "data.streaming=true") != 0
    assert "data.streaming [unsupported-combination]" in " ".join(capfd.readouterr().err.split())
    assert run("data", "show", recipe_file, "data.streaming=true", "--rows", "1") == 0


def test_preference_pairs_are_streamed(recipe_file: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": f"{n}+1?", "chosen": f"#### {n + 1}", "rejected": f"{n} or so"} for n in range(24)
    ]
    settings = ["method=dpo", f"data.train={shards(tmp_path / 'pairs', rows)}", "data.val=[]", "run.export=false"]
    assert run("train", recipe_file, *settings, "run.steps=4", *STREAMED) == 0
    losses = dict(facts(tmp_path / "runs" / "run"))
    assert losses[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[4]["data/streamed"] == 32.0


@pytest.mark.daily("streamed")
@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "streamed"])
def test_a_split_text_trains_alike_in_any_packing(recipe_file: Path, tmp_path: Path, streaming: bool) -> None:
    text = tmp_path / "long.txt"
    text.write_text("".join(f"What is {n} plus {n}? It is {2 * n}. " for n in range(60)) + "\nShort.\n")
    settings = [f"data.train={text}", "data.val=[]", "data.long_text=split", "data.max_tokens=48", "run.export=false"]
    settings += ["run.steps=3", *(STREAMED if streaming else [])]
    packings = {"packed": ["batch.tokens=48"], "wide": ["batch.tokens=300"]}
    packings["padded"] = ["batch.tokens=null", "batch.micro_batch_size=2"]
    found = {}
    for name, keys in packings.items():
        assert run("train", recipe_file, f"run.name={name}", *settings, *keys) == 0
        found[name] = dict(facts(tmp_path / "runs" / name))
    for step in (1, 2, 3):
        for name in ("wide", "padded"):
            assert found[name][step]["train/trained_tokens"] == found["packed"][step]["train/trained_tokens"]
            assert found[name][step]["train/loss"] == pytest.approx(found["packed"][step]["train/loss"], rel=2e-6)


@pytest.mark.slow
def test_a_run_that_stopped_at_a_bad_row_resumes_without_it(
    recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = chat_rows(320)
    rows[290] = {"messages": [{"role": "user", "content": "hi"}]}
    settings = [f"data.train={write_jsonl(tmp_path / 'rows.jsonl', rows)}", "data.shuffle=false", "run.steps=6"]
    settings += ["batch.rows_per_update=64", "batch.tokens=2048", "run.export=false", *STREAMED]
    assert run("train", recipe_file, *settings) != 0
    assert "rows.jsonl line 291 [no-answer]" in " ".join(capfd.readouterr().err.split())
    assert run("train", recipe_file, *settings, "data.bad_rows=drop") == 0
    last = dict(facts(tmp_path / "runs" / "run"))[6]
    # Five updates have 320 rows, so the sixth starts the second epoch: 319 rows and 65 rows.
    assert (last["data/streamed"], last["data/dropped"]) == (384.0, 1.0)
