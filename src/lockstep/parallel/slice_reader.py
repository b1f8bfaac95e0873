"""A variant of torch.distributed.checkpoint's safetensors reader that takes a list of files, and reads in threads.

This is a separate module, because importing torch.distributed.checkpoint takes a second, and few runs need it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

# Threads that read tensors at the same time. One thread is slower than a fast disk.
THREADS = 8


class _Files(FileSystem):
    def __init__(self, files: list[Path]):
        super().__init__()
        self.files = files

    def ls(self, path: Any) -> list[str]:
        return [str(file) for file in self.files]


class SliceReader(HuggingFaceStorageReader):
    """Reads the given files instead of a folder. The headers of the files are read once."""

    def __init__(self, files: list[Path]):
        super().__init__(str(files[0].parent) if files else ".")
        self.fs = _Files(files)
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the parts of tensors that the plan asks for. Each thread reads every n-th part."""
        count = max(1, min(THREADS, os.cpu_count() or 1, len(plan.items)))

        def read(items: list[ReadItem]) -> None:
            for name, some in groupby(items, lambda item: self.storage_data[item.storage_index].relative_path):
                with safe_open(name, framework="pt") as file:
                    for item in some:
                        self._process_read_request(file, item, planner)

        ordered = sorted(plan.items, key=lambda item: str(self.storage_data[item.storage_index].relative_path))
        if count == 1:
            read(ordered)
        else:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(read, [ordered[first::count] for first in range(count)]))
        done: Future[None] = Future()
        done.set_result(None)
        return done
