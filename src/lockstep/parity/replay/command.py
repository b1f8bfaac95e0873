"""`lockstep replay`: run it, show it, and say with the exit code whether it stayed in step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.parity.checklist import checklist
from lockstep.parity.compare.logs.run_logs import recording_ranks
from lockstep.parity.replay.loop import MODES
from lockstep.parity.replay.recording import replay_recording
from lockstep.parity.replay.replay import as_json, replay
from lockstep.parity.replay.show import show
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS, write
from lockstep.tape.format import TapeFolder


@dataclass(frozen=True)
class ReplayRequest:
    run: Path
    mode: str
    overrides: tuple[str, ...]
    steps: tuple[int, ...]
    checklist: bool
    json: bool
    model: str | None = None
    """Of a recording of another framework: the folder of the model that was trained."""


def replay_run(request: ReplayRequest) -> int:
    mode = next((known for known in MODES if known == request.mode), None)
    if mode is None:
        raise Refusal.at("--mode", f"there is no mode {request.mode!r}", f"use one of {', '.join(MODES)}")
    if recording_ranks(request.run):
        return _recorded(request, mode)
    if request.model is not None:
        raise Refusal.at("--model", f"{request.run} has a recipe, which names its model", "use model.path=FOLDER")
    console = Console.silent() if request.json else _console(request.run)
    if request.checklist:
        items = checklist.run_checklist(request.run, request.overrides, console)
        if not items:
            return 0  # a rank that only took part
        if request.json:
            write(json.dumps(checklist.as_json(items), indent=2))
        else:
            checklist.show(items, console)
        return int(any(item.passed is False for item in items))
    result = replay(request.run, mode, request.overrides, console, request.steps)
    if result is None:
        return 0  # a rank that only took part
    if request.json:
        write(json.dumps(as_json(result), indent=2))
    else:
        show(result, console)
    return int(not result.in_step)


def _recorded(request: ReplayRequest, mode: str) -> int:
    if mode != "forced" or request.checklist:
        raise Refusal.at(str(request.run), "is a recording, whose updates are replayed one by one", "use --mode forced")
    [first, *others] = recording_ranks(request.run).values()
    if others:
        remedy = f"name one of them: lockstep replay {first} --model FOLDER"
        raise Refusal.at(str(request.run), f"holds the tapes of {len(others) + 1} ranks", remedy)
    result = replay_recording(first, request.model, request.overrides, request.steps)
    if request.json:
        write(json.dumps(as_json(result), indent=2))
    else:
        show(result, Console.open(), "replay of a recording: each update from the recorded weights")
    return int(not result.in_step)


def _console(run: Path) -> Console:
    method = TapeFolder(RunFolder(run).tape).manifest()["recipe"]["method"]
    return Console.open(ONLINE_COLUMNS if method in ONLINE else OFFLINE_COLUMNS)
