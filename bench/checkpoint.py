"""How long a checkpoint blocks training, and its writing, resuming and export beside the disk's own speed.

python bench/checkpoint.py [--parameters 1.2e9] [--device cuda] [--repeats 3] [--folder DIR] [--out result.json]

The tensors are those of full training with AdamW and master weights: bf16 weights, fp32 master weights and two fp32
moments, 14 bytes a parameter. The disk's own time is that of the same number of bytes in files of the same sizes,
written and flushed, or read, by the same number of threads without checksums. Before each reading the files are dropped
from the page cache. Checkpoint and disk take turns; the ratio is taken within a repeat, and its median is printed. A
first repeat is not counted, because it imports modules.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.device.select import DEVICES
from lockstep.parallel.sharded_files import fill_all
from lockstep.run import checkpoint as checkpoints
from lockstep.run.checkpoint_writers import LocalWriter
from lockstep.run.files import BLOCK, file_threads
from lockstep.run.tensor_file import link_model

LAYER = 16_000_000
MOMENTS = ("master", "exp_avg", "exp_avg_sq")


def made(parameters: int, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    sizes = [min(LAYER, parameters - first) for first in range(0, parameters, LAYER)]
    weights = {f"layers.{i}": torch.randn(size, device=device).bfloat16() for i, size in enumerate(sizes)}
    state = {
        f"{kind}/{name}": torch.randn_like(w, dtype=torch.float32) for kind in MOMENTS for name, w in weights.items()
    }
    return {checkpoints.MODEL: weights, checkpoints.OPTIMIZER: state}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def drop(files: list[Path]) -> None:
    """Drops the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plain(files: dict[Path, int]) -> None:
    content = memoryview(bytearray(os.urandom(2**20) * (BLOCK // 2**20)))
    with file_threads() as threads:
        for file, size in files.items():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)

            def write(start: int, descriptor: int = descriptor, size: int = size) -> None:
                os.pwrite(descriptor, content[: min(BLOCK, size - start)], start)
                os.fdatasync(descriptor)

            list(threads.map(write, range(0, size, BLOCK)))
            os.close(descriptor)


def read_plain(files: list[Path]) -> None:
    with file_threads() as threads:
        for file in files:
            with file.open("rb") as opened:
                starts = range(0, file.stat().st_size, 2**22)
                list(threads.map(lambda start: len(os.pread(opened.fileno(), 2**22, start)), starts))


def repeat(
    folder: Path, step: int, tensors: dict[str, dict[str, torch.Tensor]], device: torch.device
) -> dict[str, float]:
    writer = LocalWriter(folder, device, lambda path: None, print)
    writer.reserve([tensor.nbytes for part in tensors.values() for tensor in part.values()])
    if writer._reserving is not None:
        writer._reserving.join()
    state = checkpoints.State(step=step, rows_seen=0, recipe={}, data={}, world_size=1)
    blocked = seconds(lambda: writer.begin(state, tensors, copies=True))
    in_background = blocked + seconds(writer.settle)
    shutil.rmtree(checkpoints.folder_of(folder, step))
    waited = seconds(lambda: writer.begin(state, tensors, copies=False))
    writer.close()
    path = checkpoints.folder_of(folder, step)
    stored = [path / name for name in tensors]
    plain = {folder / f"plain-{file.name}": file.stat().st_size for file in stored}
    disk_write = seconds(lambda: write_plain(plain))
    drop([*stored, *plain])
    disk_read = seconds(lambda: read_plain(list(plain)))
    targets = {name: torch.empty_like(one) for part in tensors.values() for name, one in part.items()}

    def resume() -> None:
        assert checkpoints.damage_of(path) is None
        found = checkpoints.read(path)
        for part, values in ((checkpoints.MODEL, found.weights), (checkpoints.OPTIMIZER, found.optimizer)):
            fill_all({name: targets[name] for name in tensors[part]}, values)

    resumed = seconds(resume)
    assert all(torch.equal(targets[name], one) for part in tensors.values() for name, one in part.items())
    weights = tensors[checkpoints.MODEL]
    shapes, dtypes = {n: w.shape for n, w in weights.items()}, {n: w.dtype for n, w in weights.items()}
    exported = seconds(lambda: link_model(folder, [path / checkpoints.MODEL], shapes, dtypes))
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return {
        "blocked_s": blocked,
        "background_s": in_background,
        "waited_s": waited,
        "disk_write_s": disk_write,
        "resume_s": resumed,
        "disk_read_s": disk_read,
        "export_weights_s": exported,
        "background_to_disk": in_background / disk_write,
        "waited_to_disk": waited / disk_write,
        "resume_to_disk": resumed / disk_read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure [default: a temporary folder]")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    kind = DEVICES[words.device]()
    tensors = made(int(words.parameters), kind.torch_device(0))
    size = sum(map(checkpoints.bytes_of, tensors.values()))
    if words.folder:
        words.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=words.folder) as temporary:
        found = [repeat(Path(temporary), step, tensors, kind.torch_device(0)) for step in range(words.repeats + 1)][1:]
    results = {name: statistics.median(one[name] for one in found) for name in found[0]}
    print(f"{size / 1e9:.2f} GB on {kind.chip()}, median of {words.repeats}")
    for name, value in results.items():
        print(f"{name:22}{value:10.3f}")
    if words.out:
        facts = {"python": platform.python_version(), "torch": torch.__version__, "device": kind.chip()}
        facts |= {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "bytes": size,
            "repeats": found,
            "median": results,
        }
        words.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
