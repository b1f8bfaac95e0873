"""The command `lockstep replay`: repeats a recorded run on another device, dtype, engine or number of processes.

The exit code is 0 if the replay stays in step and 1 if it diverges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import Refusal
from lockstep.model.trials import judged_later
from lockstep.parity.checklist import checklist
from lockstep.parity.compare.logs.run_logs import recording_ranks
from lockstep.parity.replay.foreign_recording import replay_recording
from lockstep.parity.replay.replay_loop import (
    MODES,
    Mode,
    Replay,
    RunPart,
    replayed_recipe,
    reserved_name,
    run_replay,
    skipped_steps,
    steps_by_part,
)
from lockstep.parity.replay.replay_result import RESULT, Replayed, as_json, judge, show
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.renamed_keys import stored_recipe
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS, write
from lockstep.tape.tape_format import TapeFolder


@dataclass(frozen=True)
class ReplayRequest:
    run: Path
    mode: str
    overrides: tuple[str, ...]
    steps: tuple[int, ...]
    checklist: bool
    json: bool
    model: str | None = None
    """The folder of the model that was trained, which is needed only for recordings of other frameworks."""


def replay_run(request: ReplayRequest) -> int:
    """Runs `lockstep replay` and returns its exit code."""
    mode = next((each for each in MODES if each == request.mode), None)
    if mode is None:
        raise Refusal.at(
            "--mode", f"there is no mode {request.mode!r}", f"use one of {', '.join(MODES)}", code="unknown-name"
        )
    if recording_ranks(request.run):
        return _replay_recording(request, mode)
    if request.model is not None:
        raise Refusal.at(
            "--model",
            f"{request.run} is a lockstep run, whose recipe already names its model",
            "use model.path=FOLDER",
            code="unused-key",
        )
    console = Console.silent() if request.json else _console(request.run)
    if request.checklist:
        items = checklist.run_checklist(request.run, request.overrides, console)
        if not items:
            return 0  # a rank other than 0
        if request.json:
            write(json.dumps(checklist.as_json(items), indent=2))
        else:
            checklist.show(items, console)
        return int(any(item.passed is False for item in items))
    result = replay(request.run, mode, request.overrides, console, request.steps)
    # The result is None on ranks other than 0.
    return 0 if result is None else _report(request, result, console)


def _report(request: ReplayRequest, result: Replayed, console: Console, title: str | None = None) -> int:
    if request.json:
        write(json.dumps(as_json(result), indent=2))
    else:
        show(result, console, title)
    return int(not result.in_step)


def _replay_recording(request: ReplayRequest, mode: str) -> int:
    if mode != "forced" or request.checklist:
        raise Refusal.at(
            str(request.run),
            "is a recording of another framework, and only --mode forced without --checklist can replay it",
            "use --mode forced",
            code="not-replayable",
        )
    [first, *others] = recording_ranks(request.run).values()
    if others:
        remedy = f"choose one rank: lockstep replay {first} --model FOLDER"
        raise Refusal.at(
            str(request.run), f"contains the recordings of {len(others) + 1} ranks", remedy, code="several-candidates"
        )
    result = replay_recording(first, request.model, request.overrides, request.steps)
    title = "replay of a recording: each update starts from the recorded weights"
    return _report(request, result, Console.silent() if request.json else Console.open(), title)


def _console(run: Path) -> Console:
    method = TapeFolder(RunFolder(run).tape).manifest()["recipe"]["method"]
    return Console.open(ONLINE_COLUMNS if method in ONLINE else OFFLINE_COLUMNS)


def replay(
    run: Path, mode: Mode, overrides: Sequence[str], console: Console, steps: Sequence[int] = ()
) -> Replayed | None:
    """Repeats the recorded steps with some recipe keys changed, and compares them with the recorded run. Returns None
    on ranks other than 0."""
    source = RunFolder(run)
    tape = TapeFolder(source.tape)
    tape.manifest()
    forced = mode == "forced"
    found = [
        _replay_part(source, part, mode, overrides, console, mine)
        for part, mine in steps_by_part(source, tape, steps, forced=forced)
    ]
    results = [result for result in found if result is not None]
    if not results:
        return None
    # A resumed run may have several parts with different recipes. If a part diverges, the verdict on the first such
    # part is the verdict of the replay.
    first = next((result for result in results if not result.in_step), results[0])
    remarks = [remark for result in results for remark in result.remarks]
    result = replace(
        first,
        steps=[step for result in results for step in result.steps],
        checks=[check for result in results for check in result.checks],
        remarks=(*remarks, *skipped_steps(source, tape, steps, forced=forced)),
    )
    atomic_write_text(result.folder / RESULT, json.dumps(as_json(result), indent=2) + "\n")
    return result


def _replay_part(
    source: RunFolder, part: RunPart, mode: Mode, overrides: Sequence[str], console: Console, steps: Sequence[int]
) -> Replayed | None:
    """Replays one part of a run: the steps that were trained with the same recipe."""
    tape = TapeFolder(source.tape)
    loop = Replay(tape, mode, steps)
    with judged_later() as problems, reserved_name(source, mode) as name:
        folder = run_replay(loop, replayed_recipe(source, name, overrides, part.recipe), console)
    if folder is None:
        return None
    trained: dict[str, Any] = stored_recipe(yaml.safe_load(part.recipe.read_text(encoding="utf-8")))
    result = judge(tape, TapeFolder(RunFolder(folder).tape), mode, folder, trained=trained)
    remarks = [f"The check at load: {problem}" for problem in problems]
    if part.last is not None and result.steps:
        named = f"Steps {result.steps[0]} to {result.steps[-1]}"
        remarks.append(
            f"{named} were trained with the recipe {part.recipe.name}, and replayed with this recipe in {folder}."
        )
    result = replace(result, remarks=(*remarks, *result.remarks))
    if result.module is not None and result.step == loop.diverged_step:
        result = replace(result, operator=loop.located)
    return result
