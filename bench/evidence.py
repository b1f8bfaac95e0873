"""The table of docs/support.md: every algorithm of OpenRLHF's Ascend document, on real models and GSM8K, on two sides.

    python bench/evidence.py ROW --pair cpu-cuda --model FOLDER --data GSM8K --out DIR               # all of it
    python bench/evidence.py ROW --pair cpu-cuda --model FOLDER --data GSM8K --out DIR --side cpu    # one side ...
    python bench/evidence.py ROW --pair cpu-cuda --model FOLDER --out DIR --compare                  # ... then this
    python bench/evidence.py ROW --pair cpu-cuda --model FOLDER --out DIR --replay     # where the sides part
    python bench/evidence.py table DIR ... --results bench/results/evidence --page docs/support.md

ROW is sft, dpo, kto, rm, prm, ppo, reinforce_pp, reinforce_pp-vllm, reinforce_pp-ring, grpo or grpo-vllm; `all` stands
for every row. The pairs are cpu-cuda (CPU in fp32, card in bf16), kernels (the card with plain torch, and with
lockstep's kernels) and npu (CPU in fp32, Ascend in bf16; the emulated Ascend in fp32). GSM8K is a folder with the
public train.jsonl and test.jsonl. DIR/data has the training rows; copy DIR to the machine of the other side. A finished
run is not repeated. `--steps N` and KEY=VALUE at the end change both sides.

The exit code is that of `lockstep compare`: 0 is a pass, 1 out of step or a failed run, 2 anything else.

DIR/ROW-PAIR-MODEL has the runs, report.html and curves.svg (the curves), and result.json: the mean error by the
document's formula, the verdict of `lockstep compare` and its power. `table` copies each result.json to RESULTS/ROW, and
writes the page and the curves of that folder, and the table of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from evidence_results import EvidenceError, Result, result_of
from evidence_rows import PAIRS, RING, ROWS, EvidencePair, EvidenceRow, digest_of, prepare, recipe_of, side_recipe
from evidence_table import curves_svg, write_table
from lockstep.device.base import EMULATED
from lockstep.device.select import select
from lockstep.parity.compare.compare_report import EXIT_CODES, write_report
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.verdict import LOSS, REWARDS
from lockstep.run.metrics import read_metrics

DONE, FAILED, SETTINGS, RESULT, REPLAY = "done.json", "failed.json", "settings.json", "result.json", "replay.json"
REPLAY_STEPS = 2
LOG_TAIL = 40  # lines of the log of a failed run that are kept


def main() -> int:
    args = _arguments()
    try:
        if args.row == "table":
            page = write_table(_result_files([Path(word) for word in args.words]), args.results, args.page)
            print(f"{page} results in the table")
            return 0
        codes = [_evidence(name, args) for name in (ROWS if args.row == "all" else [args.row])]
        return max(codes)
    except EvidenceError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2


def _evidence(name: str, args: argparse.Namespace) -> int:
    row, pair = ROWS[name], PAIRS[args.pair]
    folder = args.out / f"{name}-{args.pair}-{args.model.name}"
    sides = [args.side] if args.side else [] if args.compare or args.replay else [pair.a, pair.b]
    unknown = [side for side in sides if side not in pair.sides]
    if unknown:
        raise EvidenceError(f"the pair {args.pair} has no side {unknown[0]}: it has {pair.a} and {pair.b}")
    if sides or not (folder / SETTINGS).exists():
        _settle(folder, name, args)
    failed = [
        side
        for side in sides
        for number in range(1, pair.sides[side].runs + 1)
        if not _run(folder, row, pair, side, number)
    ]
    if failed:
        print(f"{name}: {', '.join(sorted(set(failed)))} failed")
        return 1
    if args.replay:
        _replay(folder, row, pair)
    if args.side:
        return 0
    result = _compared(folder, name, pair)
    print(f"{name}, {args.pair}: {result.text()}")
    return EXIT_CODES[result.verdict]


# Settings ------------------------------------------------------------------------------------------------------------


def _settle(folder: Path, name: str, args: argparse.Namespace) -> None:
    """Prepares the data and writes the settings of the row, or refuses settings that differ from those of the first
    side."""
    row, pair = ROWS[name], PAIRS[args.pair]
    steps = args.steps or pair.steps
    if args.data is None:
        raise EvidenceError("--data is missing: name the folder with GSM8K's train.jsonl and test.jsonl")
    rows = prepare(args.out / "data", row, pair, args.model, args.data, full=not args.part)
    recipe = recipe_of(row, pair, args.model.resolve(), rows.resolve(), steps)
    settings = {
        "row": name,
        "pair": args.pair,
        "model": args.model.name,
        "steps": steps,
        "words": list(args.words),
        "rows_digest": digest_of(rows),
        "recipe": {key: value for key, value in recipe.items() if key not in ("model", "data", "reward")},
    }
    file = folder / SETTINGS
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        other = [key for key in settings if before.get(key) != settings[key]]
        if other:
            raise EvidenceError(
                f"{file}: the first side had another {', '.join(other)}; use the same settings and the same DIR/data, "
                "or another --out"
            )
    folder.mkdir(parents=True, exist_ok=True)
    _write(file, settings)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


# Runs ----------------------------------------------------------------------------------------------------------------


def _run(folder: Path, row: EvidenceRow, pair: EvidencePair, side: str, number: int, *words: str) -> bool:
    """Trains one run of a side, unless it is finished. Returns whether it is finished."""
    name = f"{side}-{number}"
    if _finished(folder / name, _settings(folder)["steps"]) and not words:
        print(f"{folder.name}/{name} is finished")
        return True
    shutil.rmtree(folder / name, ignore_errors=True)
    print(f"{folder.name}/{name} ...", flush=True)
    began = time.monotonic()
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            _command(folder, row, pair, side, number, words), stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = round(time.monotonic() - began, 1)
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        (folder / name).mkdir(exist_ok=True)
        _write(folder / name / FAILED, {"exit_code": code, "seconds": seconds, "log": tail})
        print("\n".join(tail))
        return False
    shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
    _write(folder / name / DONE, {"seconds": seconds, "commit": _commit()})
    print(f"{folder.name}/{name}: {seconds:,.0f} s", flush=True)
    return True


def _command(
    folder: Path, row: EvidenceRow, pair: EvidencePair, side: str, number: int, words: tuple[str, ...]
) -> list[str]:
    own, name = pair.sides[side], f"{side}-{number}"
    dtype = "fp32" if os.environ.get(EMULATED) == own.device else own.dtype
    processes = _processes(row, own.device)
    shared = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    file = folder / f"{side}.yaml"
    recipe = side_recipe(shared, row, own, dtype, processes)
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    settings = _settings(folder)
    start = ["-m", "lockstep"]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *start]
    named = [f"run.folder={folder.resolve()}", f"run.name={name}", f"batch.tokens={pair.tokens_of(number)}"]
    return [sys.executable, *start, "train", str(file), *named, *settings["words"], *words]


def _processes(row: EvidenceRow, device: str) -> int:
    """Ring attention needs two processes. A machine with one card trains the row in one process; the other side has
    the ring then."""
    if not row.ring:
        return 1
    return RING if device == "cpu" else min(RING, select(device).count())


def _finished(run: Path, steps: int) -> bool:
    """Whether the run ended well and logged the judged metric of every step."""
    return (run / DONE).exists() and not _lacking(run, steps)


def _lacking(run: Path, steps: int) -> str:
    file = run / "metrics.jsonl"
    if not file.exists():
        return "it has no metrics.jsonl"
    found = dict(read_metrics(file))
    name = next((name for name in (*REWARDS, LOSS) if name in found.get(1, {})), None)
    if name is None:
        return f"step 1 has none of {', '.join((*REWARDS, LOSS))}"
    missing = [step for step in range(1, steps + 1) if not math.isfinite(found.get(step, {}).get(name, math.nan))]
    return f"step {missing[0]} of {steps} has no finite {name}" if missing else ""


def _settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip()[:12] or None


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


# The comparison ------------------------------------------------------------------------------------------------------


def _compared(folder: Path, name: str, pair: EvidencePair) -> Result:
    """Compares the sides and writes report.html, curves.svg and result.json. A pair with an unfinished run has no
    result; an earlier one is removed."""
    (folder / RESULT).unlink(missing_ok=True)
    settings = _settings(folder)
    runs: dict[str, list[Path]] = {
        side: [folder / f"{side}-{number}" for number in range(1, pair.sides[side].runs + 1)]
        for side in (pair.a, pair.b)
    }
    for run in (run for side in runs.values() for run in side):
        if (run / FAILED).exists():
            code = json.loads((run / FAILED).read_text(encoding="utf-8"))["exit_code"]
            raise EvidenceError(f"{run} failed with exit code {code}: see {run}.log")
        if not (run / DONE).exists():
            raise EvidenceError(f"{run} is not finished: run --side {run.name.rsplit('-', 1)[0]} on its machine")
        if why := _lacking(run, settings["steps"]):
            raise EvidenceError(f"{run}: {why}")
    (a, *more_a), (b, *more_b) = (runs[side] for side in (pair.a, pair.b))
    repeats = [read_log(str(run)) for run in (*more_a, *more_b)]
    comparison = compare(read_log(str(a)), read_log(str(b)), repeats)
    write_report(comparison, folder / "report.html")
    replay = json.loads((folder / REPLAY).read_text(encoding="utf-8")) if (folder / REPLAY).exists() else None
    envs = [json.loads((run / "env.json").read_text(encoding="utf-8")) for run in (a, b)]
    result = result_of(comparison, settings, (pair.a, pair.b), len(more_a), envs, replay)
    (folder / "curves.svg").write_text(curves_svg(name, {f"{pair.a}, {pair.b}": result}), encoding="utf-8")
    _write(folder / RESULT, result.as_json())
    return result


def _replay(folder: Path, row: EvidenceRow, pair: EvidencePair) -> None:
    """Records two steps of A and replays each of them with B's setting, from A's weights. Needs both devices."""
    name = f"{pair.a}-0"
    words = (f"run.steps={REPLAY_STEPS}", "tape.record=true", "tape.every=1", "tape.weights=true")
    if not (folder / name / DONE).exists() and not _run(folder, row, pair, pair.a, 0, *words):
        raise EvidenceError(f"{folder / name} failed: see its log")
    own = pair.sides[pair.b]
    dtype = "fp32" if os.environ.get(EMULATED) == own.device else own.dtype
    keys = [f"device={own.device}", f"model.dtype={dtype}"]
    keys += [f"model.{key}={value}" for key, value in own.keys.get("model", {}).items()]
    if row.engine != "native" and own.device != "cpu":
        keys.append(f"rollout.engine={row.engine}")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "replay", str(folder / name), "--json", *keys],
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "replay.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise EvidenceError(f"the replay of {folder / name} ended with exit code {done.returncode}: see replay.log")
    found = json.loads(done.stdout)
    kept = {key: found[key] for key in ("in_step", "stage", "step", "steps", "stages", "module", "operator", "remarks")}
    _write(folder / REPLAY, kept)
    shutil.rmtree(folder / name / "tape", ignore_errors=True)


def _result_files(folders: list[Path]) -> list[Path]:
    """The results of the given evidence folders and of those in the given folders. One without a result is refused."""
    files = []
    for folder in folders:
        found = sorted([*folder.glob(SETTINGS), *folder.glob(f"*/{SETTINGS}")])
        if not found:
            raise EvidenceError(f"{folder} has no evidence: no {SETTINGS} in it or in one of its folders")
        for settings in found:
            file = settings.parent / RESULT
            if not file.exists():
                raise EvidenceError(
                    f"{settings.parent} has no {RESULT}: finish both sides and run --compare, or remove it"
                )
            files.append(file)
    return files


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=[*ROWS, "all", "table"])
    changes = "KEY=VALUE: changes of the recipe of both sides; for table: evidence folders"
    parser.add_argument("words", nargs="*", help=changes)
    parser.add_argument("--pair", choices=PAIRS)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--data", type=Path, help="the folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, help="the folder of the evidence")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--side", help="run this side only")
    parser.add_argument("--compare", action="store_true", help="compare finished sides, and run none")
    parser.add_argument("--replay", action="store_true", help="find the first stage that differs, then compare")
    parser.add_argument("--part", action="store_true", help="accept a part of GSM8K, as tests do")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "evidence")
    parser.add_argument("--page", type=Path, help="table: the page whose table is written")
    args = parser.parse_intermixed_args()
    if args.row == "table":
        absent = [word for word in args.words if not Path(word).is_dir()]
        unread = [
            args.pair,
            args.model,
            args.data,
            args.out,
            args.steps,
            args.side,
            args.compare,
            args.replay,
            args.part,
        ]
        if any(unread):
            parser.error("a table takes folders, --results and --page only")
        if absent:
            parser.error(f"there is no folder {absent[0]}")
    if args.row != "table" and not (args.pair and args.model and args.out):
        parser.error("a row needs --pair, --model and --out")
    return args


if __name__ == "__main__":
    sys.exit(main())
