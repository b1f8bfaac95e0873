"""How long a verb takes to answer: processor seconds until its first line, and in all, beside `import torch`.

python bench/startup.py [--starts 5] [--out bench/results/startup.json]
python bench/startup.py --parameters 1.2e9 --device cuda [--out result.json]
python bench/startup.py --gguf model.gguf [--out result.json]

Processor seconds of the command and its threads, so that a busy machine tells the same as an idle one. The first start
of each is not counted: it may compile modules. `train` is stopped after its first line.

With `--parameters`: `lockstep train` with a random Qwen2 model of about this size, three steps of SFT, in seconds of
the clock. The model is dropped from the page cache before the start. `load_to_disk` is the time of loading it, relative
to the time in which the disk reads its bytes. The first run compiles kernels and runs the trials; the second finds both
in their caches.

With `--gguf`: `lockstep import-gguf` of a file, beside the time in which the disk reads this file and writes as many
bytes as the imported model has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import transformers": ["-c", "import transformers"],
    "AutoModelForCausalLM": ["-c", "from transformers import AutoModelForCausalLM"],
    "import lockstep": ["-c", "import lockstep"],
    "lockstep --help": ["-m", "lockstep", "--help"],
    "lockstep --version": ["-m", "lockstep", "--version"],
    "lockstep import-gguf": ["-m", "lockstep", "import-gguf", "none.gguf", "out"],
    "lockstep plan": ["-m", "lockstep", "plan", "sft-arithmetic", "device=cpu"],
    "lockstep train": ["-m", "lockstep", "train", "sft-arithmetic", "device=cpu"],
}


def processor_seconds(process: int) -> float:
    """User and system time of a running process and its threads, from the kernel's table."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(words: list[str], folder: Path) -> tuple[float | None, float | None]:
    """Seconds up to the first line of output, None without any, and in all, None where it was stopped after that."""
    stops = words[2:3] == ["train"]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    first = processor_seconds(process.pid) if line else None
    if stops:
        process.kill()
    process.stdout.read()
    used = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return first, None if stops else used.ru_utime + used.ru_stime


HIDDEN, FEED, TOKENS = 2048, 5632, 151_936
LINES = {
    "first_line": "",
    "loading": "Loading model ...",
    "loaded": "Loading model: done",
    "first_step": "step 1/",
    "saved": "saved ",
}


def write_model(folder: Path, tokenizer: Path, parameters: float) -> list[Path]:
    """A random model with the tokenizer of the tiny model; returns its weight files."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    wide = parameters > 5e8
    hidden, feed, tokens = (HIDDEN, FEED, TOKENS) if wide else (HIDDEN // 4, FEED // 4, TOKENS // 8)
    layers = max(1, round((parameters - hidden * tokens) / (hidden * (2.5 * hidden + 3 * feed))))
    config = Qwen2Config(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=feed,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return sorted(folder.glob("*.safetensors"))


def disk_seconds(files: list[Path]) -> float:
    """The time in which the disk reads the files, which are then dropped from the page cache again."""
    drop(files)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(2**24):
                pass
    found = time.perf_counter() - began
    drop(files)
    return found


def drop(files: list[Path]) -> None:
    """Drops the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_run(folder: Path, files: list[Path], device: str, name: str) -> dict[str, Any]:
    disk = disk_seconds(files)
    keys = [f"device={device}", f"run.name={name}", "run.steps=3", "optim.warmup=0", "model.path=model"]
    keys += ["model.dtype=bf16", "val.questions=null", "data.val=[]", "val.every=null", "val.at_start=false"]
    keys += ["checkpoint.keep_best=0", "checkpoint.every=3", "batch.tokens=512", "batch.rows_per_update=4"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", "sft-arithmetic", *keys],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines = [(time.perf_counter() - began, line) for line in process.stdout]
    assert process.wait() == 0, "".join(line for _, line in lines)
    moments = {f"{name}_s": next(at for at, line in lines if line.startswith(start)) for name, start in LINES.items()}
    until = [0.0, *(at for at, _ in lines if at <= moments["first_step_s"])]
    silence = max(later - earlier for earlier, later in pairwise(until))
    loading = moments.pop("loaded_s") - moments.pop("loading_s")
    end = time.perf_counter() - began
    shutil.rmtree(folder / "runs" / name)  # the checkpoint of a 1.2B model has 17 GB
    size = sum(file.stat().st_size for file in files)
    return {
        **moments,
        "lines": [[round(at, 2), line.rstrip()] for at, line in lines],
        "end_s": end,
        "longest_silence_s": silence,
        "load_s": loading,
        "disk_read_s": disk,
        "load_to_disk": loading / disk,
        "model_bytes": size,
    }


def gguf_import(file: Path, folder: Path) -> dict[str, float]:
    """Seconds of the import of a GGUF file to `folder`, and of the disk for the same bytes."""
    disk_read = disk_seconds([file])
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "lockstep", "import-gguf", str(file), str(folder)], check=True)
    ended, after = time.perf_counter(), os.times()
    weights = sorted(folder.glob("*.safetensors"))
    size, block = sum(one.stat().st_size for one in weights), os.urandom(2**24)
    opened = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as plain:
        for _ in range(size // len(block)):
            plain.write(block)
        os.fsync(plain.fileno())
    disk_write = time.perf_counter() - opened
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "import_s": ended - began,
        "processor_s": used,
        "disk_read_s": disk_read,
        "disk_write_s": disk_write,
        "import_to_disk": (ended - began) / (disk_read + disk_write),
        "gguf_bytes": file.stat().st_size,
        "model_bytes": size,
    }


def told(seconds: list[float | None]) -> dict[str, float] | None:
    known = [one for one in seconds if one is not None]
    return {"best_s": min(known), "median_s": statistics.median(known)} if known else None


def verbs(folder: Path, starts: int) -> dict[str, Any]:
    results = {}
    print(f"{'processor seconds, best (median)':34}{'first line':>16}{'in all':>16}")
    for name, command in COMMANDS.items():
        start(command, folder)
        found = [start(command, folder) for _ in range(starts)]
        columns = [told([one[at] for one in found]) for at in (0, 1)]
        results[name] = dict(zip(("first_line", "in_all"), columns, strict=True))
        cells = ["-" if one is None else f"{one['best_s']:.2f} ({one['median_s']:.2f})" for one in columns]
        print(f"{name:34}{cells[0]:>16}{cells[1]:>16}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--parameters", type=float, help="time a run of a model of about this size instead")
    parser.add_argument("--device", default="cpu", help="device of that run")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="time the import of this file instead")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --gguf: where the imported model stays")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lockstep = [sys.executable, "-m", "lockstep"]
        for prepared in (["data", "arithmetic", "quickstart/data"], ["tiny", "quickstart/model"]):
            subprocess.run([*lockstep, *prepared], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        results: dict[str, Any] = {}
        if words.gguf is not None:
            results = gguf_import(words.gguf.absolute(), words.keep or folder / "imported")
            print(*(f"{key} {value:,.2f}" for key, value in results.items()), sep="\n")
        elif words.parameters is None:
            results = verbs(folder, words.starts)
        if words.parameters is not None:
            files = write_model(folder / "model", folder / "quickstart" / "model", words.parameters)
            for name in ("first", "second"):
                results[name] = timed_run(folder, files, words.device, name)
                for at, line in results[name]["lines"]:
                    print(f"{at:7.2f} {line}")
                numbers = {key: value for key, value in results[name].items() if key != "lines"}
                print(name, *(f"{key} {value:,.2f}" for key, value in numbers.items()), sep="\n  ", flush=True)
    if words.out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "results": results}
        words.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
