"""The tracker for MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.trackers.tracker import import_tracker, remember_id, tracker_id


class MlflowSink:
    """Sends metrics to the MLflow server of MLFLOW_TRACKING_URI. If the variable is not set, writes files in
    `mlflow/`."""

    def __init__(self, folder: RunFolder, project: str, console: Console):
        self._mlflow = import_tracker("mlflow")
        self._folder, self._project, self._console = folder, project, console
        self._notes: list[str] = []

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        # By default mlflow blocks for four minutes before it reports an unreachable server.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri())
        run_id, resumed = tracker_id(self._folder, "mlflow", resumed_at)
        if resumed:
            run = client.get_run(run_id)
            client.update_run(run_id, status="RUNNING")
            self._notes = [text for text in [run.data.tags.get("mlflow.note.content")] if text]
        else:
            experiment = client.get_experiment_by_name(self._project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._project)
            run_id = client.create_run(experiment_id, run_name=name).info.run_id
            self._log_recipe(run_id, recipe)
        self._run_id = run_id
        remember_id(self._folder, "mlflow", run_id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(_mlflow_name(metric), value, now, step) for metric, value in metrics.items()
        ]
        for batch in _batches(entries, 1000):
            self._client.log_batch(self._run_id, metrics=batch)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._client.set_tag(self._run_id, "mlflow.note.content", "\n\n".join(self._notes))

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ok else "FAILED")

    def _uri(self) -> str:
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            return uri
        # Metrics are stored as files, because the package mlflow-skinny has no database. For file storage, mlflow 3
        # requires this variable.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        store = (self._folder.path / "mlflow").resolve()
        self._console.say(
            "mlflow: MLFLOW_TRACKING_URI is not set, so metrics are written to files; view them with "
            f"`MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {store}`"
        )
        return store.as_uri()

    def _log_recipe(self, run_id: str, recipe: dict[str, Any]) -> None:
        # mlflow rejects values that are longer than 6000 characters. The file recipe.yaml has the full values.
        parameters = [
            self._mlflow.entities.Param(_mlflow_name(key), str(value)[:6000]) for key, value in _flatten(recipe)
        ]
        for batch in _batches(parameters, 100):
            self._client.log_batch(run_id, params=batch)


def _mlflow_name(name: str) -> str:
    """Replaces characters that mlflow does not allow in names, such as the `@` of `mean@32`."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
