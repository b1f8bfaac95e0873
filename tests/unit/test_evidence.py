"""`bench/evidence.py`: recipes of all rows, the table from result files, and what must never look like a pass."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.recipe import load_recipe

ROOT = Path(__file__).parents[2]
STORED = ROOT / "bench" / "results" / "evidence"
sys.path.insert(0, str(ROOT / "bench"))

evidence: Any = import_module("evidence")
rows: Any = import_module("evidence_rows")
results: Any = import_module("evidence_results")
table: Any = import_module("evidence_table")
reward: Any = import_module("evidence_reward")

FALLING = [2.0 - 0.03 * step + 0.01 * (step % 3) for step in range(30)]


def values_of(b: list[float], **changes: Any) -> dict[str, Any]:
    """A result file of the SFT row on the card, with the curve `b` against FALLING."""
    shifts = (0.0, 0.001, -0.001)
    curves = {
        "steps": list(range(1, 31)),
        "a": [list(FALLING)],
        "b": [[value + shift * (-1) ** at for at, value in enumerate(b)] for shift in shifts],
    }
    again = results.recompute("train/loss", curves["steps"], curves["a"], curves["b"])
    values = {
        "row": "sft",
        "pair": "cpu-cuda",
        "model": "smollm2",
        "parameters": 134_515_008,
        "steps": 30,
        "metric": "train/loss",
        "bar_percent": 2.0,
        "scaled": False,
        "mean_error_percent": again.mean_error_percent,
        "scaled_error_percent": again.scaled_error_percent,
        "power_percent": again.power_percent,
        "verdict": again.verdict,
        "reason": again.explanation,
        "sides": ["cpu", "cuda"],
        "hardware": ["cpu", "NVIDIA H200"],
        "dtypes": ["fp32", "bf16"],
        "versions": ["", ""],
        "emulated": False,
        "throughput_ratio": 9.0,
        "differences": [],
        "curves": curves,
        "replay": None,
        "settings": {},
    }
    return {**values, **changes}


def written(folder: Path, values: dict[str, Any], name: str = "result.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder / name


def page_in(folder: Path) -> Path:
    (folder / "page.md").write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    return folder / "page.md"


# The table -----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_cell_for_a_result_and_says_what_is_not_measured(tmp_path: Path) -> None:
    # 0.004 above at every second step and 0.002 below at the others: a mean error of 0.3 %.
    near = [value + (0.004 if at % 2 else -0.002) for at, value in enumerate(FALLING)]
    file, page = written(tmp_path, values_of(near)), page_in(tmp_path)
    assert table.write_table([file], tmp_path / "results", page) == 1
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 11  # a head, and the rows of the document
    (sft,) = [line for line in lines if line.startswith("| [SFT](results/sft/README.md) |")]
    cells = [cell.strip() for cell in sft.split("|")[2:-1]]
    assert cells == ["in step, 0.3 %", *["not measured"] * 4, "0.19 %"]
    assert "CPU fp32, H200 bf16 (135M, 30 steps)" in lines[0]
    assert "| DPO | not measured |" in text  # no folder, no link
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("results/**/*.*"))
    assert files == [f"results/sft/{name}" for name in ("README.md", "cpu-cuda.json", "curves.svg")]
    page_of_row = (tmp_path / "results" / "sft" / "README.md").read_text(encoding="utf-8")
    assert "[Support](../../page.md)" in page_of_row
    assert "| [CPU fp32, H200 bf16 (135M)](cpu-cuda.json) | in step | 0.3 % | " in page_of_row


def test_a_pair_that_is_out_of_step_is_bold_and_shows_what_replay_found(tmp_path: Path) -> None:
    far = [value + 0.1 for value in FALLING]
    replay = json.loads((STORED / "sft" / "cpu-cuda.json").read_text(encoding="utf-8"))["replay"]
    file, page = written(tmp_path, values_of(far, replay=replay)), page_in(tmp_path)
    table.write_table([file], tmp_path / "results", page)
    text = page.read_text(encoding="utf-8")
    assert "| **out of step**, 10 % [1] |" in text
    assert "in step, 10" not in text
    assert "the first difference is in stage log-probs at step 1, forward of module `model.layers.11.mlp`" in text
    assert "No operator is named: the replay's operators are correct (float64 reference: replay 0.42 times" in text
    page_of_row = (tmp_path / "results" / "sft" / "README.md").read_text(encoding="utf-8")
    assert "| gradient | 2 |" in page_of_row
    assert "| **exceeded** |" in page_of_row


def test_a_wrong_operator_is_named() -> None:
    found = {"side": "replay", "operator": "aten.rsqrt", "why": "it is wrong", "judge": None}
    assert table._operator_text(found) == "Wrong operator: `aten.rsqrt` of the replay: it is wrong."
    assert table._operator_text(None) == ""


def test_rows_that_fail_for_one_reason_share_a_note() -> None:
    stored = results.stored_results(STORED)
    rows_of_first_column = {key: each for key, each in stored.items() if key[1] == "cpu-cuda"}
    text = table.table_text(rows_of_first_column, {})
    (note,) = [line for line in text.splitlines() if "; REINFORCE++, vLLM; " in line]
    number = note.partition(".")[0]
    assert text.count(f" [{number}] |") == note.partition("(")[0].count(";") + 1
    assert "so the scaled error decides" in note


def test_copies_are_named_as_the_reason_of_unknown_noise() -> None:
    """Three equal runs of each side, which miss the bar."""
    draw = [0.05 * (-1) ** (at * at // 3) for at in range(30)]
    b = [value + shift for value, shift in zip(FALLING, draw, strict=True)]
    steps = list(range(1, 31))
    assert results.recompute("train/loss", steps, [FALLING] * 3, [b] * 3).unsettled == "copies"
    assert results.recompute("train/loss", steps, [FALLING], [b]).unsettled == "no repeats"


def test_a_stated_pass_is_not_believed(tmp_path: Path) -> None:
    """An out-of-step pair must never appear as passed, whatever its file says."""
    far = [value + 0.1 for value in FALLING]
    for verdict in ("in step", "within noise", "cannot tell"):
        with pytest.raises(results.EvidenceError, match=f"it states {verdict}, and its curves are out of step"):
            results.read_result(written(tmp_path, values_of(far, verdict=verdict)))
    with pytest.raises(results.EvidenceError, match=r"it states a mean error of 0\.1 %, and its curves have 10 %"):
        results.read_result(written(tmp_path, values_of(far, mean_error_percent=0.1)))


def test_a_worse_verdict_than_that_of_the_curves_stays(tmp_path: Path) -> None:
    """Runs that are not comparable stay so, though their curves agree."""
    file = written(tmp_path, values_of(FALLING, verdict="not comparable"))
    assert "**not comparable**" in table.cell(results.read_result(file))


def test_equal_constants_show_nothing() -> None:
    for value in (0.0, 0.7):
        found = results.recompute("critic/rewards/mean", list(range(1, 31)), [[value] * 30], [[value] * 30])
        assert found.verdict == "cannot tell"
        assert "at every step" in found.explanation


def _without_a_step(values: dict[str, Any]) -> None:
    values["curves"]["steps"].pop()
    for run in (*values["curves"]["a"], *values["curves"]["b"]):
        run.pop()


def _without_a_repeat(values: dict[str, Any]) -> None:
    values["curves"]["b"].pop()


def _with_a_gap(values: dict[str, Any]) -> None:
    values["curves"]["b"][1][7] = None


def _without_a_key(values: dict[str, Any]) -> None:
    del values["power_percent"]


def _on_a_tiny_model(values: dict[str, Any]) -> None:
    values["parameters"] = 1_000_000


def _shorter(values: dict[str, Any]) -> None:
    _without_a_step(values)
    values["steps"] = 29
    again = results.recompute("train/loss", values["curves"]["steps"], values["curves"]["a"], values["curves"]["b"])
    values |= {"mean_error_percent": again.mean_error_percent, "verdict": again.verdict}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_a_step, "the curves have 29 of 30 steps"),
        (_without_a_repeat, "side cuda has 2 of 3 runs"),
        (_with_a_gap, "run 2 of side cuda has steps without a number"),
        (_without_a_key, "is not a result"),
        (_on_a_tiny_model, "no column for the pair cpu-cuda with 1,000,000 parameters"),
        (_shorter, "29 steps, and the column cpu-cuda needs at least 30"),
    ],
)
def test_incomplete_results_are_refused(tmp_path: Path, damage: Any, said: str) -> None:
    values = values_of([value + 0.001 for value in FALLING])
    damage(values)
    file, page = written(tmp_path, values), page_in(tmp_path)
    with pytest.raises(results.EvidenceError, match=said):
        table.write_table([file], tmp_path / "results", page)
    assert "old" in page.read_text(encoding="utf-8")


def test_page_and_row_folders_are_those_of_the_stored_curves() -> None:
    """Every verdict, figure and curve of the documents is computed again from the JSON files."""
    page = ROOT / "docs" / "support.md"
    stored = results.stored_results(STORED)
    for file, text in table.files_of(stored, STORED, page).items():
        assert file.read_text(encoding="utf-8") == text, (
            f"{file}: python bench/evidence.py table --page docs/support.md"
        )
    lines = page.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("|") for line in lines) <= 25
    assert {path.name for path in STORED.iterdir()} == {row for row, _ in stored}


def test_a_result_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    written(tmp_path, values_of(FALLING), "sft.cpu-cuda.json")
    with pytest.raises(results.EvidenceError, match=r"its contents belong into sft/cpu-cuda\.json"):
        results.stored_results(tmp_path)


# Folders -------------------------------------------------------------------------------------------------------------


def run_in(folder: Path, name: str, curve: list[float], *, done: bool = True) -> Path:
    """A run folder of lockstep in its smallest form."""
    run = folder / name
    run.mkdir(parents=True)
    side = rows.PAIRS["cpu-cuda"].sides[name[:-2]]
    lines = [json.dumps({"step": step, "data": {"train/loss": value}}) for step, value in enumerate(curve, start=1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe = {"method": "sft", "device": side.device, "run": {"steps": 30}, "model": {"dtype": side.dtype}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    model = {"architecture": "LlamaForCausalLM", "parameters": 134_515_008}
    env = {"model": model, "device": {"name": side.device, "chip": "x", "emulated": False}}
    (run / "env.json").write_text(json.dumps(env), encoding="utf-8")
    if done:
        written(run, {"seconds": 1.0}, "done.json")
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The evidence of a finished row, whose sides are close."""
    folder = tmp_path / "evidence" / "sft-cpu-cuda-smollm2"
    settings = {"row": "sft", "pair": "cpu-cuda", "model": "smollm2", "steps": 30, "words": [], "rows_digest": "x"}
    written(folder, settings, "settings.json")
    run_in(folder, "cpu-1", FALLING)
    for number in (1, 2, 3):
        run_in(folder, f"cuda-{number}", [value + 0.001 * (-1) ** (at + number) for at, value in enumerate(FALLING)])
    return folder


def program(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["evidence.py", *map(str, words)])
    code: int = evidence.main()
    return code


def compare_words(folder: Path) -> list[object]:
    return ["sft", "--pair", "cpu-cuda", "--model", "smollm2", "--out", folder.parent, "--compare"]


def test_changes_of_the_recipe_may_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sft", "--pair", "cpu-cuda", "--model", "smollm2", "--out", "evidence", "optim.lr=1e-5"]
    monkeypatch.setattr(sys, "argv", ["evidence.py", *words])
    args = evidence._arguments()
    assert (args.out, args.words) == (Path("evidence"), ["optim.lr=1e-5"])


def test_finished_sides_are_compared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(monkeypatch, *compare_words(folder)) == 0
    assert "sft, cpu-cuda: in step, mean error 0.1 %" in capsys.readouterr().out
    assert {"report.html", "curves.svg", "result.json"} <= {file.name for file in folder.iterdir()}
    assert (folder / "curves.svg").read_text(encoding="utf-8").count("<polyline") == 4
    page = page_in(tmp_path)
    words = [folder.parent, "--results", tmp_path / "results", "--page", page]
    assert program(monkeypatch, "table", *words) == 0
    assert "| in step, 0.1 % |" in page.read_text(encoding="utf-8")


def _fails(folder: Path) -> None:
    written(folder / "cuda-2", {"exit_code": 1, "log": []}, "failed.json")


def _is_unfinished(folder: Path) -> None:
    (folder / "cuda-3" / "done.json").unlink()


def _stops_early(folder: Path) -> None:
    file = folder / "cpu-1" / "metrics.jsonl"
    file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_fails, "cuda-2 failed with exit code 1"),
        (_is_unfinished, "cuda-3 is not finished: run --side cuda on its machine"),
        (_stops_early, "step 30 of 30 has no finite train/loss"),
    ],
)
def test_folders_with_an_unfinished_run_have_no_result_and_no_table(
    folder: Path,
    tmp_path: Path,
    damage: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program(monkeypatch, *compare_words(folder)) == 0  # the result of an earlier comparison
    damage(folder)
    assert program(monkeypatch, *compare_words(folder)) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "result.json").exists()
    assert program(monkeypatch, "table", folder.parent, "--results", tmp_path / "results") == 2
    assert "has no result.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--out", "evidence"], ["nowhere"], ["--compare"]], ids=str)
def test_a_table_reads_every_folder_that_is_given(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        program(monkeypatch, "table", *words)
    assert ended.value.code == 2


def test_a_folder_without_evidence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(monkeypatch, "table", tmp_path, "--results", tmp_path / "results") == 2
    assert "has no evidence" in capsys.readouterr().err


def test_sides_that_part_give_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        file = folder / f"cuda-{number}" / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line["data"]["train/loss"] += 0.1
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert program(monkeypatch, *compare_words(folder)) == 1
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["verdict"] == "out of step"


# Recipes and data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", rows.PAIRS)
def test_both_sides_of_every_row_have_valid_recipes_with_equal_training(pair: str, tmp_path: Path) -> None:
    for name, row in rows.ROWS.items():
        shared = rows.recipe_of(row, rows.PAIRS[pair], tmp_path / "model", tmp_path / "rows.parquet", 30)
        loaded = {}
        for side, own in rows.PAIRS[pair].sides.items():
            file = tmp_path / f"{name}-{side}.yaml"
            recipe = rows.side_recipe(shared, row, own, own.dtype, 2 if row.ring else 1)
            file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            loaded[side] = load_recipe(str(file), [])
        one, other = loaded.values()
        for part in ("method", "optim", "batch", "data", "algorithm", "preference", "reward", "prm"):
            assert getattr(one, part) == getattr(other, part), (name, part)
        assert one.run.steps >= 30


def test_half_of_the_steps_have_one_wrong_result() -> None:
    answer = "He has 3*2=<<3*2=6>>6 pens.\nSo 6+1=<<6+1=7>>7 pens.\n#### 7"
    row = {"extra_info": {"question": "How many?", "answer": answer}}
    assert rows.judged_steps(row, 0) == {
        "prompt": "How many?",
        "completions": ["He has 3*2=<<3*2=6>>6 pens.", "So 6+1=<<6+1=7>>7 pens."],
        "labels": [True, True],
    }
    for number in (1, 3, 5, 7):
        wrong = rows.judged_steps(row, number)
        *good, bad = wrong["labels"]
        assert all(good)
        assert not bad
        assert wrong["completions"][:-1] == ["He has 3*2=<<3*2=6>>6 pens."][: len(good)]
        assert wrong["completions"][-1] not in answer


def test_the_reward_counts_result_and_numbers() -> None:
    info = {"answer": "He has 3*2=<<3*2=6>>6 pens.\n6+1,000=<<6+1000=1006>>1,006\n#### 1,006"}
    wanted = len({"3", "2", "6", "1000", "1006"})
    assert reward.score("", "", "1,006", info) == 0.0
    assert reward.score("", "3 and 6 make 9", "1,006", info) == pytest.approx(0.5 * 2 / wanted)
    assert reward.score("", "It is 1006", "1,006", info) == pytest.approx(0.5 + 0.5 / wanted)
