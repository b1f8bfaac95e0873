"""A variant of torch.distributed.checkpoint's safetensors reader that takes a list of files.

This is a separate module, because importing torch.distributed.checkpoint takes a second, and few runs need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata


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
