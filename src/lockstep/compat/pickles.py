"""A restricted unpickler for checkpoints of other programs.

Code that a checkpoint refers to is not imported and not run. `torch.load` without `weights_only` would pass a
TorchScript archive to the loader of TorchScript, which runs methods of the archive. This reader creates only tensors
and plain containers. An object that is not a tensor or a plain container is replaced by an empty placeholder. A file
that refers to a function of Python's standard library is refused.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.model.pretrained import why_not_unpickled

_BUILTINS = [
    "set",
    "frozenset",
    "dict",
    "list",
    "tuple",
    "int",
    "float",
    "bool",
    "str",
    "bytes",
    "bytearray",
    "complex",
    "slice",
    "range",
    "object",
]
_ALLOWED = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("torch", "Size"), ("torch", "device")}
_REBUILDS = [
    "_rebuild_tensor",
    "_rebuild_tensor_v2",
    "_rebuild_tensor_v3",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
]
# Standard library modules whose classes appear in a trainer's settings and counters. Objects of classes in these
# modules are replaced by placeholders.
_DATA = [
    "argparse",
    "collections",
    "copyreg",
    "_codecs",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "numbers",
    "pathlib",
    "random",
    "types",
    "typing",
    "uuid",
]
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_ZIP = b"PK\x03\x04"
_TORCHSCRIPT = ("constants.pkl", "code/")
_UNTRUSTED = "do not load the file with torch.load either; request a safetensors copy from its author"


class _StandIn:
    """Replaces an object of an unknown class in a checkpoint; accepts any state and stores nothing."""

    def __init__(self, *arguments: Any, **named: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Creates objects of allowed classes, reads tensor storages with `storage`, and imports no other class."""

    def __init__(self, file: io.BytesIO, storage: Callable[[Any], Any]):
        super().__init__(file, encoding="utf-8")
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        # torch.save writes pickle protocol 2, which uses Python 2's names such as `__builtin__ set`.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module == "builtins" and name in _BUILTINS) or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch._utils" and name in _REBUILDS:
            # Return a new object each time, because a pickle can set attributes of the object that it gets.
            return partial(getattr(torch._utils, name))
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names and root not in _DATA:
            raise _Forbidden(f"{module}.{name}")
        return type(name, (_StandIn,), {})

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


class _Forbidden(Exception):
    """Raised for a reference to standard library code that no checkpoint needs."""


def read_pickle(path: Path) -> Any:
    """Reads a file written by `torch.save`; tensors are on the CPU."""
    try:
        if _is_zip(path):
            return _from_zip(path)
        # A file that is no zip archive has the format before torch 1.6, which `weights_only=True` can read.
        return torch.load(path, map_location="cpu", weights_only=True)
    except Refusal:
        raise
    except _Forbidden as error:
        raise Refusal.at(
            path,
            f"refers to {error}, which no checkpoint needs: the file was not read",
            _UNTRUSTED,
            code="untrusted-code",
        ) from error
    except Exception as error:  # a manipulated file can raise any exception
        raise _unread(path, error) from error


def _is_zip(path: Path) -> bool:
    """Returns whether the file is a zip archive, not torch's older format."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _refuse_torchscript(names: Sequence[str], path: Path) -> None:
    if any(name.partition("/")[2].startswith(_TORCHSCRIPT) for name in names):
        why = "is a TorchScript archive, whose methods would run: the file was not read"
        raise Refusal.at(
            path, why, "save the weights alone: torch.save(model.state_dict(), FILE)", code="untrusted-code"
        )


def _from_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        _refuse_torchscript(names, path)
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refusal.at(
                path, "contains no data.pkl of torch.save", "check that the file is a checkpoint", code="damaged-file"
            )
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") != b"little":
            raise Refusal.at(
                path,
                "was written on a big-endian machine",
                "save the file again on a little-endian machine",
                code="unsupported-format",
            )
        storages: dict[str, torch.storage.TypedStorage] = {}

        def storage(pid: Any) -> torch.storage.TypedStorage:
            kind, dtype, key, _, count = pid
            if kind != "storage" or not isinstance(dtype, torch.dtype):
                raise ValueError(f"an unknown persistent id: {pid!r:.80}")
            if key not in storages:
                storages[key] = _storage(archive, f"{folder}data/{key}", dtype, count)
            return storages[key]

        return _Unpickler(io.BytesIO(archive.read(pickles[0])), storage).load()


def _storage(archive: zipfile.ZipFile, name: str, dtype: torch.dtype, count: int) -> torch.storage.TypedStorage:
    info = archive.getinfo(name)
    # torch stores tensors without compression, so their sizes on disk and in memory are equal.
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != count * dtype.itemsize:
        raise ValueError(f"{name} has {info.file_size:,} bytes, not {count:,} numbers of {dtype}")
    content = bytearray(archive.read(name))
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return torch.storage.TypedStorage(wrap_storage=flat.untyped_storage(), dtype=dtype, _internal=True)


def read_sharded(path: Path) -> dict[str, Any]:
    """Reads a shard of an FSDP checkpoint: plain and distributed tensors by name."""
    import torch.distributed.tensor

    try:
        if _is_zip(path):
            with zipfile.ZipFile(path) as archive:
                _refuse_torchscript(archive.namelist(), path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Refusal:
        raise
    except Exception as error:  # a manipulated file can raise any exception
        raise _unread(path, error) from error
    if not isinstance(loaded, dict):
        raise Refusal.at(path, f"contains a {type(loaded).__name__}, not a dict of weights", code="damaged-file")
    return loaded


def _unread(path: Path, error: Exception) -> Refusal:
    return Refusal.at(
        path, f"cannot be read: {why_not_unpickled(error)}", "check that the file is complete", code="unreadable"
    )
