"""Trajectories with a slow tool: lockstep's environment loop beside the tool loop of TRL's GRPOTrainer.

    python bench/environment_sides.py --out result.json                   # the embedded tiny model; needs [bench]
    python bench/environment_sides.py --trajectories 256 --repeats 1      # as many as in environments.py

Both sides play the same class (`waiting_tool.py`): TRL as `environment_factory`, lockstep as `rollout.environment`.
Model, chat template, rows, tool times, turns and the number of trajectories at once are the same. The model is the tiny
one with weights that always write the same turn, which ends with a tool call; both sides take the most
likely token (`top_k=1`), and the parser of each side reads the call. Ids and calls are compared: if a trajectory has
other ids on one side, or another number of calls, the program stops.

The time is that of all trajectories of a step with their rewards, without the update; that of the CPU is of this
process, without the processes that run lockstep's environments. The tool is `async`. Each pass
runs once with the drawn times and once with a tool that returns at once, which shows the engines alone. `tools in turn`
is the sum of all tool times, and `slowest of rounds` the sum of the slowest tool of each round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import statistics
import string
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from environments import tool_seconds
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.model.tiny import write_tiny
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Recipe
from lockstep.run.console import Console
from lockstep.train.online import open_online
from online_work import settle, temporary_folder
from report import machine, write_record
from sides import Seconds, Stopwatch
from waiting_tool import Waiting

# A turn is the first of these characters, a call of the tool, which is one token, and the end token.
TEXT = string.ascii_letters + string.digits
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
# TRL needs at least two samples of a row, which share its tool times.
SAMPLES = 2
ENDLESS = 10**6
"""More steps than are ever taken: the last step of a run would validate and save."""

Ids = list[list[int]]


@dataclass(frozen=True)
class Work:
    device: Device
    folder: Path
    rows: list[dict[str, Any]]
    """The rows of a pass; each has `SAMPLES` trajectories."""
    turns: int
    slots: int
    max_tokens: int

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def trajectories(self) -> int:
        return SAMPLES * len(self.rows)

    def scaled(self, scale: float) -> list[dict[str, Any]]:
        return [{**row, "seconds": [scale * one for one in row["seconds"]]} for row in self.rows]


@dataclass(frozen=True)
class Played:
    seconds: Seconds
    ids: Ids
    """The tokens of each trajectory after its prompt, observations included."""
    trained: int
    """The tokens that the model sampled."""
    calls: float
    """The tool calls of a trajectory, on average."""


class Ours:
    """lockstep: the native engine and the environment loop, as a training step calls them."""

    name = "lockstep"

    def __init__(self, work: Work, scale: float):
        data = work.folder / f"rows-{scale:g}.jsonl"
        rows = [{**row, "reward_model": {"ground_truth": ""}, "data_source": "wait"} for row in work.scaled(scale)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        values = {
            "method": "grpo",
            "device": work.device.name,
            "run": {"name": f"ours-{scale:g}", "folder": str(work.folder / "runs"), "steps": ENDLESS},
            "model": {"path": work.model, "dtype": "fp32"},
            "data": {"train": str(data), "shuffle": False, "max_prompt_tokens": 2048 - work.max_tokens},
            "batch": {"prompts": len(work.rows), "tokens": 8192},
            "rollout": {
                "n": SAMPLES,
                "max_tokens": work.max_tokens,
                "max_turns": work.turns,
                "max_sequences": work.slots,
                "top_k": 1,
                "free_cache": False,
                "environment": f"trl:{Path(__file__).with_name('waiting_tool.py')}:Waiting",
            },
            "algorithm": {"kl": {"where": "none"}},
        }
        recipe = with_derived_defaults(Recipe.model_validate(with_method_defaults(values)))
        self.device = work.device
        self.open = ExitStack()
        self.online = self.open.enter_context(open_online(recipe, Console.silent()))

    def play(self) -> Played:
        watch = Stopwatch(self.device)
        rollouts = self.online.take_rollouts()
        seconds = watch.read()
        found = rollouts.experience.rollouts
        sampled = sum(turn.stop - turn.start for one in found for turn in one.trajectory.turns)
        calls = sum(one.score.total for one in found) / len(found)
        return Played(seconds, [list(one.ids) for one in found], sampled, calls)

    def close(self) -> None:
        self.open.close()


class Trl:
    """GRPOTrainer with `environment_factory`: `generate` on all trajectories, then their tools, and so on."""

    def __init__(self, work: Work, scale: float):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.name, self.work, self.rows = "TRL", work, work.scaled(scale)
        settings = GRPOConfig(
            output_dir=str(work.folder / f"trl-{scale:g}"),
            per_device_train_batch_size=min(work.slots, work.trajectories),
            gradient_accumulation_steps=max(1, work.trajectories // work.slots),
            num_generations=SAMPLES,
            max_completion_length=work.max_tokens,
            max_tool_calling_iterations=work.turns - 1,
            top_k=1,
            beta=0.0,
            bf16=False,
            use_cpu=work.device.name == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=[],
            args=settings,
            train_dataset=Dataset.from_list(self.rows),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            environment_factory=Waiting,
        )
        self.trainer.model.train()
        self.calls: list[float] = []
        self.ids: Ids = []
        self.trained = 0
        self._observe()

    def play(self) -> Played:
        """As many trajectories at once as lockstep has slots."""
        self.calls, self.ids, self.trained = [], [], 0
        inputs = [dict(row) for row in self.rows for _ in range(SAMPLES)]
        watch = Stopwatch(self.work.device)
        for first in range(0, len(inputs), self.work.slots):
            self.trainer._generate_and_score_completions(inputs[first : first + self.work.slots])
            self.calls += [environment.get_reward() for environment in self.trainer.environments]
        seconds = watch.read()
        return Played(seconds, self.ids, self.trained, sum(self.calls) / len(self.calls))

    def _observe(self) -> None:
        """Reads what the loop of tools returns; the trainer pads it afterwards."""
        generate = self.trainer._generate

        def observed(*args: Any) -> Any:
            made = generate(*args)
            self.ids += [list(ids) for ids in made[1]]
            self.trained += sum(map(sum, made[2]))
            return made

        self.trainer._generate = observed

    def close(self) -> None:
        """Nothing is held."""


SIDES: dict[str, Any] = {"lockstep": Ours, "trl": Trl}


def main() -> None:
    args = _arguments()
    settle(args.threads)
    logging.disable(logging.WARNING)
    device = select(args.device)
    record: dict[str, Any] = {"command": " ".join(sys.argv), "settings": vars(args), "machine": machine(device)}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    with temporary_folder() as folder, ExitStack() as opened:
        work = make_work(Path(folder), args, device)
        write_caller(work.folder / "model", args.turn_tokens - 2, args.seed)
        record["tools"] = tool_times(work, args.tool_scale)
        print("  ".join(f"{name} {value:.2f} s" for name, value in record["tools"].items()))
        for case, scale in {"slow tool": args.tool_scale, "tool at once": 0.0}.items():
            sides = {name: SIDES[name](work, scale) for name in args.sides}
            for side in sides.values():
                opened.callback(side.close)
            found = record[case] = {name: [] for name in sides}
            alike(work, {name: side.play() for name, side in sides.items()})  # the first pass is not timed
            for _ in range(args.repeats):
                played = {name: side.play() for name, side in sides.items()}
                alike(work, played)
                for name, one in played.items():
                    wall, cpu = one.seconds
                    speed = one.trained / wall
                    took = {"seconds": wall, "cpu_seconds": cpu, "tokens": one.trained, "tokens_per_second": speed}
                    found[name].append(took)
                    print(f"{case:>14} {name:>9}: {wall:7.2f} s ({cpu:.2f} s CPU), {speed:7,.0f} tokens/s", flush=True)
                if args.out:
                    write_record(record, args.out)
            summarize(case, found)
            record[case]["ratio"] = ratio(found)
        if args.out:
            write_record(record, args.out)


def make_work(folder: Path, args: argparse.Namespace, device: Device) -> Work:
    draw = random.Random(args.seed)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Find number {draw.randrange(10**6)}."}],
            "seconds": [tool_seconds(draw, *args.tool_seconds) for _ in range(args.turns - 1)],
        }
        for _ in range(args.trajectories // SAMPLES)
    ]
    return Work(device, folder, rows, args.turns, args.slots, args.max_tokens)


@torch.no_grad()
def write_caller(folder: Path, characters: int, seed: int) -> None:
    """Writes the tiny model with weights that write the turn: `TEXT`, `CALL`, end, each token after the one before it.

    The layers add nothing to the embedding of a token, and the head gives the highest score to the token that follows.
    They are computed all the same.
    """
    from trl.chat_template_utils import qwen3_chat_template

    write_tiny(folder, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template  # TRL has parsers for known templates
    tokenizer.add_tokens([CALL])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=False)
    model.resize_token_embeddings(len(tokenizer))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    turn = tokenizer("\n" + TEXT[:characters] + CALL, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    if len(set(turn)) != len(turn):
        raise SystemExit("a token occurs twice in a turn")
    embedding = torch.randn(model.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(seed))
    model.get_input_embeddings().weight.copy_(embedding)
    head = model.get_output_embeddings().weight.zero_()
    for token, following in itertools.pairwise(turn):
        head[following] = embedding[token]
    model.save_pretrained(folder)


def tool_times(work: Work, scale: float) -> dict[str, float]:
    used = [row["seconds"] for row in work.scaled(scale)]
    return {
        "tools in turn": SAMPLES * sum(map(sum, used)),
        "slowest of rounds": sum(map(max, zip(*used, strict=True))),
        "slowest trajectory": max(map(sum, used)),
    }


def alike(work: Work, played: dict[str, Played]) -> None:
    """Refuses sides that have not done the same: all trajectories have all turns, and the same tokens."""
    for name, one in played.items():
        if one.calls != work.turns - 1 or len(one.ids) != work.trajectories:
            raise SystemExit(f"{name}: {len(one.ids)} trajectories, {one.calls} calls each")
    first, *others = played
    for other in others:
        if played[first].ids != played[other].ids:
            raise SystemExit(f"{first} and {other} have different tokens")


def ratio(found: dict[str, Any]) -> dict[str, float]:
    """Our tokens per second over those of each peer: the median of the repeats."""
    return {
        name: statistics.median(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
            for ours, theirs in zip(found["lockstep"], found[name], strict=True)
        )
        for name in found
        if name != "lockstep" and "lockstep" in found
    }


def summarize(case: str, found: dict[str, Any]) -> None:
    for name, value in ratio(found).items():
        print(f"{case:>14}: {value:.2f} x the tokens/s of {name}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--slots", type=int, default=64, help="trajectories at once")
    parser.add_argument("--turn-tokens", type=int, default=64, help="tokens of a turn, 3 to 64")
    parser.add_argument("--max-tokens", type=int, default=1200, help="tokens of a trajectory after its prompt")
    parser.add_argument("--tool-seconds", type=float, nargs=2, default=(0.05, 5.0))
    parser.add_argument("--tool-scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
