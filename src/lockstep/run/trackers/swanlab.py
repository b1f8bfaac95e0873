"""The tracker for SwanLab."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lockstep.errors import Refusal
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.trackers.tracker import earlier_steps, import_tracker, remember_id, tracker_id


class SwanlabSink:
    """Sends metrics to SwanLab in the configured mode. If no mode is configured and there is no API key, writes the
    metrics to local files."""

    def __init__(self, folder: RunFolder, project: str, console: Console):
        self._swanlab = import_tracker("swanlab")
        self._folder, self._project, self._console = folder, project, console
        self._step = 0

    def check(self) -> None:
        settings = self._swanlab.Settings()
        if settings.mode in ("cloud", "online") and "mode" in settings.model_fields_set and not settings.api_key:
            raise Refusal.at(
                "sink swanlab",
                f"the mode is {settings.mode!r}, but there is no API key",
                "set SWANLAB_API_KEY, run `swanlab login`, or set SWANLAB_MODE=local",
                code="missing-secret",
            )

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        swanlab = self._swanlab
        run_id, resumed = tracker_id(self._folder, "swanlab", resumed_at)
        mode = self._mode()
        # Interactive prompts are off, so a missing API key is an error. SwanLab's terminal capture is off too, because
        # it conflicts with the progress bar.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        self._run = swanlab.init(
            project=self._project,
            name=name,
            id=run_id,
            resume="allow" if resumed else None,
            config=recipe,
            mode=mode,
            log_dir=str(self._folder.path / "swanlab"),
            settings=settings,
        )
        remember_id(self._folder, "swanlab", run_id)
        self._step = resumed_at
        if mode in ("local", "offline"):  # local files have only the steps of their process, so earlier steps are added
            for step, metrics in earlier_steps(self._folder, resumed_at):
                self.log(step, metrics)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        self._run.log(metrics, step=step)

    def note(self, text: str) -> None:
        self._run.log({"note": self._swanlab.Text(text)}, step=self._step)

    def close(self, ok: bool) -> None:
        self._run.finish(state="success" if ok else "crashed")

    def _mode(self) -> str:
        settings = self._swanlab.Settings()
        mode: str = settings.mode
        if "mode" in settings.model_fields_set or settings.api_key:
            return mode
        where = self._folder.path / "swanlab"
        if find_spec("swanboard") is not None:
            self._console.say(f"swanlab: no API key and no SWANLAB_MODE; view the run with `swanlab watch {where}`")
            return "local"
        self._console.say(
            "swanlab: no API key and no SWANLAB_MODE, so the run is logged offline; upload it with "
            f"`swanlab sync {where / 'run-*'}`"
        )
        return "offline"
