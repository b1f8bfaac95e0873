"""The tracker for TensorBoard."""

from __future__ import annotations

import json
import time
from typing import Any

from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.trackers.tracker import import_tracker


class TensorboardSink:
    """Writes event files in the folder `tensorboard/` with the package tensorboard, without torch or tensorflow."""

    def __init__(self, folder: RunFolder, project: str, console: Console):
        import_tracker("tensorboard")
        self._folder = folder
        self._step = 0

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder.path / "tensorboard"))
        # A resumed run writes the events of the steps after `resumed_at` again. The event START makes TensorBoard drop
        # the earlier events of the repeated steps.
        self._step = resumed_at + 1 if resumed_at else 0
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=self._step, session_log=start))
        # Four spaces mark a code block on tensorboard's text page.
        self._text(
            "recipe", "\n".join("    " + line for line in json.dumps(recipe, indent=2, default=str).splitlines())
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._step = step
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]))

    def note(self, text: str) -> None:
        self._text("note", text)

    def close(self, ok: bool) -> None:
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=self._step, summary=summary))
        self._writer.flush()  # without this flush, a kill could lose the events of two minutes
