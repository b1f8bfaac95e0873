"""The rows of `bench/evidence.py`: the algorithms of OpenRLHF's Ascend document, their recipes and their data."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.data.prepare.generated import write_gsm8k, write_rows
from lockstep.data.sources.read import read_rows
from lockstep.errors import Refusal
from lockstep.types import Row

REWARD = Path(__file__).resolve().parent / "evidence_reward.py"
RING = 2  # processes of the row with ring attention
SAMPLES = 4  # responses of the model to a question, of which the best and the worst are a pair
DataKind = Literal["questions", "pairs", "steps"]


@dataclass(frozen=True)
class EvidenceRow:
    """A row of the document. `published` is the mean error in percent that the document states for an NPU and a GPU.
    `judged` says what the judged metric is, with its unit."""

    title: str
    method: str
    data: DataKind
    published: float
    keys: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "native"
    ring: bool = False
    judged: str = "mean reward (0 to 1)"

    @property
    def online(self) -> bool:
        return "rollout" in self.keys


_ONLINE: dict[str, Any] = {"rollout": {}, "reward": {"function": f"{REWARD}:score"}}
# A serving engine has the correction by default. The side without one must train the same objective.
_SERVED: dict[str, Any] = {**_ONLINE, "algorithm": {"rollout_correction": {"weight": "token"}}}
_STEADY = {"optim": {"lr": 2e-6}}  # a learning rate at which the reward moves within 30 steps

ROWS: dict[str, EvidenceRow] = {
    "sft": EvidenceRow(
        "SFT",
        "sft",
        "questions",
        0.19,
        {
            "data": {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"},
            # The rate of the document's SFT script. At 2e-5 without warm-up, bf16 leaves fp32 by 2.3 % (135M, H200).
            "optim": {"lr": 5e-6},
        },
        judged="loss (nats per token)",
    ),
    "dpo": EvidenceRow("DPO", "dpo", "pairs", 1.81, {"optim": {"lr": 2e-6}}, judged="loss (nats per pair)"),
    "kto": EvidenceRow("KTO", "kto", "pairs", 0.37, {"optim": {"lr": 2e-6}}, judged="loss (0 to 1)"),
    "rm": EvidenceRow("RM", "rm", "pairs", 0.85, {"optim": {"lr": 1e-5}}, judged="loss (nats per pair)"),
    "prm": EvidenceRow(
        "PRM",
        "prm",
        "steps",
        1.61,
        {"optim": {"lr": 1e-5}, "prm": {"placeholder": "~", "tokens": ["+", "-"]}},
        judged="loss (nats per judged step)",
    ),
    "ppo": EvidenceRow("PPO", "ppo", "questions", 1.85, {**_ONLINE, **_STEADY, "critic": {"lr": 1e-5}}),
    "reinforce_pp": EvidenceRow("REINFORCE++", "reinforce_pp", "questions", 1.94, {**_ONLINE, **_STEADY}),
    "reinforce_pp-vllm": EvidenceRow(
        "REINFORCE++, vLLM", "reinforce_pp", "questions", 1.99, {**_SERVED, **_STEADY}, engine="vllm"
    ),
    "reinforce_pp-ring": EvidenceRow(
        "REINFORCE++, ring attention", "reinforce_pp", "questions", 4.95, {**_ONLINE, **_STEADY}, ring=True
    ),
    "grpo": EvidenceRow("GRPO", "grpo", "questions", 0.61, {**_ONLINE, **_STEADY}),
    "grpo-vllm": EvidenceRow("GRPO, vLLM", "grpo", "questions", 1.10, {**_SERVED, **_STEADY}, engine="vllm"),
}


@dataclass(frozen=True)
class Side:
    """How one side of a pair runs: its device, the dtype, how many runs, and further recipe keys."""

    device: str
    dtype: str
    runs: int
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvidencePair:
    """Two sides and the size of their runs. `characters` limits question and worked answer of the used questions."""

    a: str
    b: str
    sides: Mapping[str, Side]
    steps: int
    rows: int
    responses: int
    group: int
    max_tokens: int
    characters: int
    pairs: int
    micro_batch: int

    def __post_init__(self) -> None:
        assert set(self.sides) == {self.a, self.b}

    def tokens_of(self, run: int) -> int:
        """The size of the micro-batches of a side's first, second ... run. Equal runs of a deterministic side are
        copies; with other micro-batches their sums round differently, so that they measure the noise of rounding."""
        return int(self.micro_batch * REPEATED[max(run - 1, 0)])  # run 0 is the one that is replayed


REPEATED = (1, 0.5, 0.75)  # sizes of the micro-batches of repeats

# One run on the CPU, which is slow, and three on the card: the noise of a run is measured there.
CPU_CUDA = EvidencePair(
    a="cpu",
    b="cuda",
    sides={"cpu": Side("cpu", "fp32", 1), "cuda": Side("cuda", "bf16", 3)},
    steps=30,
    rows=8,
    responses=16,
    group=4,
    max_tokens=48,
    characters=280,
    pairs=120,
    micro_batch=2048,
)
PAIRS: dict[str, EvidencePair] = {
    "cpu-cuda": CPU_CUDA,
    "kernels": EvidencePair(
        a="plain",
        b="kernels",
        sides={
            "plain": Side("cuda", "bf16", 3, {"model": {"attention": "sdpa"}}),
            "kernels": Side("cuda", "bf16", 3, {"model": {"attention": "auto"}}),
        },
        steps=30,
        rows=32,
        responses=128,
        group=8,
        max_tokens=160,
        characters=500,
        pairs=480,
        micro_batch=16384,
    ),
    # On the emulator, whose kernels are the CPU's, bf16 would compare two roundings of one machine.
    "npu": replace(CPU_CUDA, b="npu", sides={"cpu": Side("cpu", "fp32", 1), "npu": Side("npu", "bf16", 1)}),
}


def recipe_of(row: EvidenceRow, pair: EvidencePair, model: Path, data: Path, steps: int) -> dict[str, Any]:
    """The recipe that both sides share."""
    # A row of pairs has two responses.
    rows = max(2, pair.rows // 2) if row.data == "pairs" else pair.rows
    recipe: dict[str, Any] = {
        "method": row.method,
        "run": {"steps": steps, "export": False, "resume": "never", "seed": 0},
        "model": {"path": str(model)},
        "data": {"train": str(data)},
        "batch": {"rows_per_update": rows, "tokens": pair.micro_batch},
        "optim": {"schedule": "constant", "warmup": 0},
        "log": {"every": 1},
    }
    if row.online:
        # PPO and REINFORCE++ have one response to a question, GRPO a group.
        group = pair.group if row.method == "grpo" else 1
        recipe["batch"] = {"prompts": pair.responses // group, "tokens": pair.micro_batch}
        recipe["rollout"] = {"n": group, "max_tokens": pair.max_tokens}
    return _merged(recipe, row.keys)


def side_recipe(recipe: Mapping[str, Any], row: EvidenceRow, side: Side, dtype: str, processes: int) -> dict[str, Any]:
    """The recipe of one side."""
    own = _merged(_merged({"device": side.device, "model": {"dtype": dtype}}, side.keys), {})
    # vLLM serves no model on a plain CPU installation: there the row's other side is the built-in engine.
    if row.engine != "native" and side.device != "cpu":
        # The model is small, and the trainer has the same device. A fixed cache needs no profiling of memory, which
        # fails if another process frees memory at that time.
        words = ["--gpu-memory-utilization", "0.2"]
        if side.device == "cuda":
            words += ["--kv-cache-memory-bytes", str(8 * 10**9)]
        own = _merged(own, {"rollout": {"engine": row.engine, "server": {"args": words}}})
    if row.ring and processes > 1:
        own = _merged(own, {"parallel": {"context_parallel": processes, "context_layout": "zigzag"}})
    return _merged(recipe, own)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


# Data ----------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, row: EvidenceRow, pair: EvidencePair, model: Path, gsm8k: Path, *, full: bool = True) -> Path:
    """Returns the file of the row's training rows, and writes it if it is not there."""
    questions = folder / f"questions-{pair.characters}.parquet"
    if not questions.exists():
        write_gsm8k(folder / "gsm8k", source=gsm8k, check_counts=full)
        rows = read_rows(str(folder / "gsm8k" / "train.parquet"))
        short = [rows[at] for at in range(len(rows)) if _characters(rows[at]) <= pair.characters]
        if not short:
            raise Refusal.at(gsm8k, f"no question has at most {pair.characters} characters", code="empty-data")
        write_rows(questions, short)
    if row.data == "questions":
        return questions
    if row.data == "steps":
        steps = folder / f"steps-{pair.characters}.parquet"
        if not steps.exists():
            rows = read_rows(str(questions))
            write_rows(steps, [judged_steps(rows[at], at) for at in range(len(rows))])
        return steps
    return _sampled_pairs(folder, questions, pair, model)


def _characters(row: Row) -> int:
    return len(row["extra_info"]["question"]) + len(row["extra_info"]["answer"])


def judged_steps(row: Row, number: int) -> Row:
    """A worked answer with a verdict on each of its steps. In every second row, the result of one step is wrong, and
    the row ends there."""
    steps = [line for line in row["extra_info"]["answer"].splitlines() if line.strip() and not line.startswith("####")]
    labels = [True] * len(steps)
    draw = random.Random(number)
    calculated = [at for at, line in enumerate(steps) if _RESULT.search(line)]
    if calculated and number % 2:
        at = draw.choice(calculated)
        steps, labels = steps[: at + 1], labels[: at + 1]
        steps[at], labels[at] = _with_wrong_result(steps[at], draw.randint(1, 9)), False
    return {"prompt": row["extra_info"]["question"], "completions": steps, "labels": labels}


_RESULT = re.compile(r"=(?P<value>\d+)>>(?P=value)(?![\d.])")


def _with_wrong_result(line: str, by: int) -> str:
    def wrong(found: re.Match[str]) -> str:
        value = int(found["value"]) + by
        return f"={value}>>{value}"

    return _RESULT.sub(wrong, line, count=1)


def _sampled_pairs(folder: Path, questions: Path, pair: EvidencePair, model: Path) -> Path:
    """The best and the worst of the model's own responses to each question. The file is written once and goes to the
    other machine with the evidence: two devices sample different texts."""
    name = f"{model.name}-{pair.characters}-{pair.max_tokens}"
    pairs, samples = folder / f"pairs-{name}.parquet", folder / f"samples-{name}.parquet"
    if not pairs.exists():
        # Not every question gives responses with different rewards.
        _lockstep(
            *("sample", model, questions, samples, "--n", SAMPLES, "--rows", 2 * pair.pairs),
            *("--max-new-tokens", pair.max_tokens, "--reward-function", f"{REWARD}:score", "--chunk", 32),
        )
        _lockstep("pairs", samples, pairs, "--kind", "pairs", "--keep-cut", "--min-margin", 0.01)
    return pairs


def _lockstep(*words: object) -> None:
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"evidence: {' '.join(command[1:])} ended with exit code {code}")


def digest_of(file: Path) -> str:
    """A digest of the rows, which does not depend on the version of the parquet writer."""
    rows = read_rows(str(file))
    digest = hashlib.sha256()
    for at in range(len(rows)):
        digest.update(json.dumps(rows[at], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
