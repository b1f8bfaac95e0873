"""Strikes a run again and again, and shows that it ends as if nothing had happened.

    python tools/soak.py --blows 20 --seed 0 --out bench/results/soak.json
    python tools/soak.py --blows 20 --seed 0 --expert-parallel 2 --out bench/results/soak_experts.json

A GRPO run of two ranks with a reward function in separate processes, under `parallel.max_restarts`. Blow after blow,
a process of the run (a rank, one that scores, one that watches over that) is killed (SIGKILL) or stopped (SIGSTOP) at a
random moment: after some progress, or while the ranks are still starting. The launcher, which nobody watches over, is
killed only: all others must end with it, and the command is given again. Then the run must have ended well, with the
metrics, the samples and the weights of one that nothing happened to, bit for bit and each once; no process and no
shared memory may be left. With `--expert-parallel`, the ranks divide the experts of a mixture-of-experts model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

MARK = "LOCKSTEP_SOAK"
SHARED_MEMORY = Path("/dev/shm")
KINDS = ("rank", "supervisor", "worker", "launcher")
# For what hangs: the longest that a run may be without an end after its last blow, and that what ends may take to go.
HANG, GOING = 1800, 120

# A file next to the runs that stops the interruptions.
OVER = "over"
# Slow until the last blow has fallen, so that a blow may meet a call, and comes before the steps are done.
REWARD = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.01 if os.path.exists({over!r}) else 0.5)
    return float(sum(letter in "aeiou" for letter in solution_str))
"""


@dataclass(frozen=True)
class Blow:
    """What was done to which process, when: seconds since the start, and the steps that the run had behind it."""

    kind: str
    pid: int
    signal: str
    second: float
    steps: int


@dataclass
class Outcome:
    status: int
    restarts: int
    seconds: float
    blows: list[Blow] = field(default_factory=list)
    starts: int = 1
    """How often the command was given."""
    left: list[int] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    said: str = ""


def write_experts(folder: Path) -> None:
    """Replaces the tiny model of a folder by a mixture of 8 experts with the same tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=vocabulary, initializer_range=0.1, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_scene(folder: Path, steps: int, ranks: int, time_limit: float = 10, experts: int = 1) -> Path:
    """The tiny model, rows, a reward function and a recipe. The ranks divide the experts over groups of `experts`."""
    from lockstep.data.prepare.generated import write_arithmetic
    from lockstep.model.tiny import write_tiny

    write_tiny(folder / "model", hidden=64, layers=2)
    if experts > 1:
        write_experts(folder / "model")
    write_arithmetic(folder / "data", train_rows=64, val_rows=8)
    (folder / "reward.py").write_text(REWARD.format(over=str(folder / OVER)), encoding="utf-8")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
method: grpo
device: cpu
run: {{name: run, steps: {steps}, export: false}}
model: {{path: {folder / "model"}}}
data: {{train: {folder / "data" / "train.parquet"}}}
batch: {{prompts: 4, tokens: 512}}
rollout: {{n: 2, max_tokens: 16}}
reward:
  function: "{folder / "reward.py"}:score"
  weights: {{rule: 0}}
  workers: 2
  max_failures: 0
  time_limit: {time_limit:g}
optim: {{lr: 1e-3}}
checkpoint: {{every: 3}}
log: {{samples: 8}}
parallel: {{devices: {ranks}, max_restarts: 1, expert_parallel: {experts}}}
""",
        encoding="utf-8",
    )
    return recipe


def processes_of(token: str) -> dict[int, str]:
    """Living processes that bear the mark of a run, by what they are; its launcher is `launcher`."""
    marked: dict[int, tuple[int, dict[str, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, UnicodeDecodeError):  # it ended while it was looked at
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            variables = dict(one.split("=", 1) for one in (folder / "environ").read_text().split("\0") if "=" in one)
            if variables.get(MARK) == token and fields[0] not in "ZX":
                marked[int(folder.name)] = int(fields[1]), variables
    found = {}
    for pid, (parent, variables) in marked.items():
        if "LOCKSTEP_FUNCTION_PROCESS" not in variables:
            found[pid] = "rank" if "RANK" in variables else "launcher"
        else:
            # A supervisor is a rank's child; the worker is the supervisor's.
            above = marked.get(parent)
            found[pid] = "worker" if above and "LOCKSTEP_FUNCTION_PROCESS" in above[1] else "supervisor"
    return found


@dataclass(frozen=True)
class Plan:
    """How often a run is struck, and what is drawn from: kinds of processes, and whether some are stopped."""

    blows: int
    seed: int
    kinds: tuple[str, ...] = KINDS
    stops: bool = True


class Striker:
    """The hand that strikes, and what it remembers."""

    def __init__(self, token: str, metrics: Path, plan: Plan):
        self.token, self.metrics, self.plan = token, metrics, plan
        self.draw = random.Random(plan.seed)
        self.shared: set[str] = set()
        """Pieces of shared memory that a process of the run was seen to have open."""
        self.began, self.blows = time.monotonic(), list[Blow]()

    def steps(self) -> int:
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def look(self) -> dict[int, str]:
        """The processes of the run; takes note of what they share."""
        found = processes_of(self.token)
        for pid in found:
            with suppress(OSError):
                opened = (Path(f"/proc/{pid}/maps")).read_text()
                opened += " ".join(f"{os.readlink(one)} " for one in Path(f"/proc/{pid}/fd").iterdir())
                self.shared |= set(re.findall(rf"{SHARED_MEMORY}/(\S+)", opened))
        return found

    def wait_for_end(self, process: subprocess.Popen[bytes]) -> int:
        given_up = time.monotonic() + HANG
        while process.poll() is None:
            if time.monotonic() > given_up:
                for pid in processes_of(self.token):
                    os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"the run has not ended in {HANG} s")
            self.look()
            time.sleep(1)
        return process.returncode

    def wait_for_moment(self, process: subprocess.Popen[bytes]) -> None:
        """One time in four soon after the blow before, whatever the run is at; else some time after a step more."""
        if self.blows and self.draw.random() < 0.25:
            self._sleep(self.draw.uniform(0, 15), process)
            return
        # A restart writes the steps since the last checkpoint anew.
        farthest = max((blow.steps for blow in self.blows), default=0)
        while process.poll() is None and self.steps() <= farthest:
            time.sleep(0.05)
        self._sleep(self.draw.uniform(0, 1), process)

    def _sleep(self, seconds: float, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def strike(self, process: subprocess.Popen[bytes]) -> bool:
        """One process, of a kind that is drawn first; False where the run has ended."""
        kind = self.draw.choice(self.plan.kinds)
        stops = self.plan.stops and self.draw.random() < 0.3
        number = signal.SIGSTOP if stops and kind != "launcher" else signal.SIGKILL
        while process.poll() is None:
            # The launcher by its number: a rank looks like one until its environment is set.
            found = self.look()
            pids = [process.pid] if kind == "launcher" else sorted(pid for pid, what in found.items() if what == kind)
            if pids:
                # One number, however many there are: what is drawn after it stays the same.
                pid = pids[int(self.draw.random() * len(pids))]
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    second = round(time.monotonic() - self.began, 1)
                    self.blows.append(Blow(kind, pid, number.name, second, self.steps()))
                    return True
            time.sleep(0.05)
        return False


def run(
    recipe: Path, runs: Path, words: list[str], plan: Plan | None = None, python: tuple[str, ...] = (sys.executable,)
) -> Outcome:
    """`lockstep train`, struck so often, or left alone; given again where the launcher was struck."""
    token, log = secrets.token_hex(8), runs.with_suffix(".log")
    command = [*python, "-m", "lockstep", "train", str(recipe), f"run.folder={runs}", *words]
    began, starts, left = time.monotonic(), 1, list[int]()
    with log.open("wb") as out:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, MARK: token})

        process = start()
        striker = Striker(token, runs / "run" / "metrics.jsonl", plan or Plan(0, 0))
        for _ in range(striker.plan.blows):
            striker.wait_for_moment(process)
            if not striker.strike(process):
                break
            if striker.blows[-1].kind == "launcher":
                process.wait()
                if left := not_going(token):
                    break
                process, starts = start(), starts + 1
        (runs.parent / OVER).touch()
        status = striker.wait_for_end(process)
    left = left or not_going(token)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said, seconds = log.read_text(errors="replace"), time.monotonic() - began
    shared = leaked(striker.shared)
    return Outcome(status, said.count("; restart "), seconds, striker.blows, starts, left, shared, said)


def not_going(token: str) -> list[int]:
    """Processes of a run that has ended which are still there when there was time to go."""
    given_up = time.monotonic() + GOING
    while (left := sorted(processes_of(token))) and time.monotonic() < given_up:
        time.sleep(0.05)
    return left


def leaked(shared: set[str]) -> list[str]:
    """Pieces of shared memory that the processes of a run have left."""
    return sorted(shared & {path.name for path in SHARED_MEMORY.iterdir()})


def differences(run: Path, whole: Path) -> list[str]:
    """What of a run is not as in the other: metrics but for the clocks; samples, each once and in order; weights and
    optimizer of the last step."""
    import torch

    from lockstep.run import checkpoint as checkpoints
    from lockstep.run.metrics import read_metrics

    def facts(folder: Path) -> dict[int, dict[str, float]]:
        return {
            step: {name: value for name, value in found.items() if not name.startswith(("timing_s/", "perf/"))}
            for step, found in read_metrics(folder / "metrics.jsonl")
        }

    ours, theirs = facts(run), facts(whole)
    found = [f"steps {sorted(ours)} and {sorted(theirs)}"] if ours.keys() != theirs.keys() else []
    found += [f"metrics of step {step}" for step in theirs if step in ours and ours[step] != theirs[step]]
    # A restart forgets the lines of the steps after its checkpoint, which it writes again.
    if (run / "samples.jsonl").read_bytes() != (whole / "samples.jsonl").read_bytes():
        found.append("samples")
    last = max(theirs)
    kept = [checkpoints.read(checkpoints.folder_of(folder / "checkpoints", last)) for folder in (run, whole)]
    for part in ("weights", "optimizer"):
        a, b = (getattr(one, part) for one in kept)
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in b):
            found.append(f"{part} of step {last}")
    return found


def soak(
    folder: Path,
    plan: Plan,
    *,
    steps: int,
    ranks: int = 2,
    stall: float = 40,
    time_limit: float = 10,
    experts: int = 1,
    python: tuple[str, ...] = (sys.executable,),
) -> tuple[Outcome, Outcome, list[str]]:
    """The run that was left alone, the one that was struck, and what of the two differs. A single rank is left alone in
    a process that `python` starts, without a launcher. So is a launcher that is never struck."""
    recipe = write_scene(folder, steps, ranks, time_limit, experts)
    alone = ["parallel.devices=1", "parallel.max_restarts=0"] if ranks == 1 else []
    whole = run(recipe, folder / "whole", alone, python=python)
    words = [f"parallel.max_restarts={2 * plan.blows}", *([f"parallel.stall_seconds={stall:g}"] if plan.stops else [])]
    (folder / OVER).unlink()
    cold = "launcher" in plan.kinds
    struck = run(recipe, folder / "struck", words, plan, (sys.executable,) if cold else python)
    both = whole.status == struck.status == 0
    return whole, struck, differences(folder / "struck" / "run", folder / "whole" / "run") if both else ["the end"]


def commit() -> str | None:
    """Of the code that ran; None outside of a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blows", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 6 for each blow")
    parser.add_argument("--stall", type=float, default=40, help="parallel.stall_seconds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--expert-parallel", type=int, default=1, help="2 or more: a model with experts")
    parser.add_argument("--out", type=Path, help="write what happened to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        steps = args.steps or 6 * args.blows
        plan, layout = Plan(args.blows, args.seed), {"ranks": args.ranks, "experts": args.expert_parallel}
        whole, struck, apart = soak(Path(folder), plan, steps=steps, stall=args.stall, **layout)
    for blow in struck.blows:
        print(f"{blow.second:7.1f} s  {blow.signal} {blow.kind} {blow.pid}, after {blow.steps} steps")
    print(f"status {struck.status}, {struck.restarts} restarts, the command given {struck.starts} times")
    print(f"{struck.seconds:.0f} s (alone {whole.seconds:.0f} s)")
    well = struck.status == 0 and len(struck.blows) == args.blows and not (apart or struck.left or struck.shared_memory)
    print(f"left: {struck.left or 'no process'}, {struck.shared_memory or 'no shared memory'}")
    print("as if nothing had happened" if well else f"NOT as if nothing had happened: {apart}\n{struck.said[-3000:]}")
    if args.out:
        import torch
        import transformers

        packages = {"torch": torch.__version__, "transformers": transformers.__version__}
        versions = {"python": platform.python_version(), **packages}
        record = {
            "settings": {"blows": args.blows, "seed": args.seed, "steps": steps, "stall_seconds": args.stall, **layout},
            "versions": versions | {"machine": platform.machine(), "cores": os.cpu_count(), "commit": commit()},
            "undisturbed_seconds": round(whole.seconds, 1),
            "seconds": round(struck.seconds, 1),
            "status": struck.status,
            "restarts": struck.restarts,
            "starts": struck.starts,
            "differences": apart,
            "processes_left": struck.left,
            "shared_memory_left": struck.shared_memory,
            "blows": [asdict(blow) for blow in struck.blows],
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(not well)


if __name__ == "__main__":
    main()
