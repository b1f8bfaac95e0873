"""The tracker for Weights & Biases."""

from __future__ import annotations

from typing import Any

from lockstep.errors import Refusal
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.trackers.tracker import earlier_steps, import_tracker, remember_id, tracker_id


class WandbSink:
    """Sends metrics to Weights & Biases in the mode of WANDB_MODE. If the variable is not set, the mode is online with
    an API key, otherwise offline."""

    def __init__(self, folder: RunFolder, project: str, console: Console):
        self._wandb = import_tracker("wandb")
        self._folder, self._project, self._console = folder, project, console

    def check(self) -> None:
        self._mode()

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        wandb = self._wandb
        run_id, resumed = tracker_id(self._folder, "wandb", resumed_at)
        mode = self._mode()
        # The console capture of wandb conflicts with the progress bar, and its summary repeats the output of lockstep.
        settings = wandb.Settings(console="off", silent=mode == "offline")
        self._run = wandb.init(
            project=self._project,
            name=name,
            id=run_id,
            resume="allow" if resumed else None,
            config=recipe,
            mode=mode,
            dir=str(self._folder.path),
            settings=settings,
        )
        remember_id(self._folder, "wandb", run_id)
        # The wandb server may already have steps after the step of the checkpoint. Steps that the server already has
        # are not logged again, because the resumed run repeats them with the same values.
        self._next = self._run.step
        for step, metrics in earlier_steps(self._folder, resumed_at):
            self.log(step, metrics)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._next:
            self._run.log(metrics, step=step)

    def note(self, text: str) -> None:
        self._run.notes = f"{self._run.notes}\n{text}" if self._run.notes else text

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)

    def _mode(self) -> str:
        settings = self._wandb.setup().settings
        mode: str = settings.mode
        if mode not in ("online", "shared") or self._wandb.login(prompt=False, verify=False):
            return mode
        if "mode" in settings.model_fields_set:
            raise Refusal.at(
                "sink wandb",
                f"the mode is {mode!r}, but there is no API key",
                "set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline",
                code="missing-secret",
            )
        self._console.say(
            "wandb: no API key and no WANDB_MODE, so the run is logged offline; upload it with "
            f"`wandb sync {self._folder.path / 'wandb' / 'offline-run-*'}`"
        )
        return "offline"
