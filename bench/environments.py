"""Trajectories of several turns with tools of heavy-tailed duration, beside the same tokens in one turn.

    python bench/environments.py --shape qwen2.5-0.5b --out result.json        # 256 trajectories of 6 turns, on CUDA
    python bench/environments.py --device cpu --shape tiny --dtype fp32 --trajectories 32 --slots 8 --prompt 24 \
        --turn-tokens 16 --observation 8 --tool-scale 0.02                     # about a minute on two cores
    python bench/environments.py --shape qwen2.5-0.5b --rounds --no-reuse      # also with barriers, without reuse

Every trajectory asks for its next turn when its tool has returned. A turn has a fixed number of tokens, so all ways
sample the same number of tokens on the same number of slots. `one turn` is a single request per trajectory with the
tokens of all its turns, and no tools. `rounds` waits after each turn for the slowest tool of all trajectories. The
share of prompt tokens is that of computed to new ones: 1 if nothing is computed twice.

The slowest trajectory bounds the time of all: its tools and its tokens one after the other. It is printed, because
without enough work for the other slots no engine can hide it.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from engine import TINY, random_policy
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Request, Sampling
from report import machine, write_record
from shapes import SHAPES

# The exponent of the bounded Pareto distribution of tool times. The mean of 0.05 to 5 s is then 0.2 s.
TAIL = 1.1


@dataclass(frozen=True)
class Trajectory:
    prompt: list[int]
    turns: list[int]
    """Tokens that each turn samples."""
    observations: list[list[int]]
    tools: list[float]
    """Seconds of the tool after each turn but the last."""

    @property
    def longest(self) -> int:
        return len(self.prompt) + sum(self.turns) + sum(map(len, self.observations))


@dataclass
class Open:
    """A trajectory that has begun."""

    ids: list[int]
    done: int = 0


@dataclass
class Source:
    """Implements `Conversations`. Of the turns that can start, those of the trajectory with the fewest finished turns
    start first, because the slowest trajectory decides when all are done."""

    engine: NativeEngine
    work: Sequence[Trajectory]
    reuse: bool = True
    barrier: bool = False
    asked: list[int] = field(default_factory=list)
    waited: float = 0.0
    """Seconds in which nothing could be generated, because every trajectory waited for its tool."""

    def __post_init__(self) -> None:
        self.sessions = len(self.work)
        self.longest_sequence = max(one.longest for one in self.work)
        self.longest_prompt = self.longest_sequence
        self.open = [Open(list(one.prompt)) for one in self.work]
        self.ready = [(0, number) for number in range(len(self.work))]
        self.tools: list[tuple[float, int]] = []

    @property
    def more(self) -> bool:
        return any(one.done < len(work.turns) for one, work in zip(self.open, self.work, strict=True))

    def take(self, room: int, wait: bool = False) -> list[Request]:
        if not self.barrier:
            self._returned()
        if not self.ready and wait and self.tools:
            start = time.perf_counter()
            until = max(self.tools)[0] if self.barrier else self.tools[0][0]
            time.sleep(max(0.0, until - start))
            self.waited += time.perf_counter() - start
            self._returned()
        return [self._request(heapq.heappop(self.ready)[1]) for _ in range(min(room, len(self.ready)))]

    def _returned(self) -> None:
        now = time.perf_counter()
        while self.tools and self.tools[0][0] <= now:
            _, number = heapq.heappop(self.tools)
            one = self.open[number]
            one.ids += self.work[number].observations[one.done - 1]
            heapq.heappush(self.ready, (one.done, number))

    def _request(self, number: int) -> Request:
        self.asked.append(number)
        one = self.open[number]
        session = number if self.reuse else None
        return Request(list(one.ids), 100 * number + one.done, 1, 0, self.work[number].turns[one.done], session=session)

    def run(self, sampling: Sampling) -> int:
        """Returns the number of sampled tokens."""
        tokens = 0
        self.engine.further = self
        try:
            for made in self.engine.generate([], sampling):
                number = self.asked[made.request]
                one, work = self.open[number], self.work[number]
                one.ids += made.ids
                tokens += len(made.ids)
                one.done += 1
                if one.done < len(work.turns):
                    heapq.heappush(self.tools, (time.perf_counter() + work.tools[one.done - 1], number))
                elif self.reuse:
                    self.engine.end_session(number)
        finally:
            self.engine.further = None
        return tokens


def drawn(args: argparse.Namespace, vocabulary: int) -> list[Trajectory]:
    draw = random.Random(args.seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    def around(mean: int) -> int:
        return draw.randint(max(1, mean // 2), max(1, mean + mean // 2))

    made = []
    for _ in range(args.trajectories):
        turns = [around(args.turn_tokens) for _ in range(args.turns)]
        observations = [ids(around(args.observation)) for _ in range(args.turns - 1)]
        tools = [args.tool_scale * tool_seconds(draw, *args.tool_seconds) for _ in range(args.turns - 1)]
        made.append(Trajectory(ids(around(args.prompt)), turns, observations, tools))
    return made


def tool_seconds(draw: random.Random, low: float, high: float) -> float:
    """Draws from a Pareto distribution that is cut at `high`."""
    share = draw.random() * (1 - (low / high) ** TAIL)
    return float(low * (1 - share) ** (-1 / TAIL))


def in_one_turn(engine: NativeEngine, work: Sequence[Trajectory], sampling: Sampling) -> int:
    requests = [Request(one.prompt, number, 1, 0, sum(one.turns)) for number, one in enumerate(work)]
    return sum(len(made.ids) for made in engine.generate(requests, sampling))


def measured(name: str, device: Device, run: Any, expected: int) -> dict[str, float]:
    device.synchronise()
    start = time.perf_counter()
    tokens = run()
    device.synchronise()
    seconds = time.perf_counter() - start
    if tokens != expected:
        raise SystemExit(f"{name}: {tokens} tokens instead of {expected}")
    print(f"{name:>12}: {tokens / seconds:9,.0f} tokens/s, {seconds:.2f} s", flush=True)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def main() -> None:
    args = _arguments()
    device = select(args.device)
    shape = TINY if args.shape == "tiny" else SHAPES[args.shape]
    policy = random_policy(shape, device, args.dtype)
    work = drawn(args, shape.vocabulary)
    settings = RolloutSettings(max_sequences=args.slots, cache_gb=args.cache_gb, free_cache=False)
    engine = NativeEngine(policy, device, settings, lambda ids: "")
    sampling = Sampling(max(sum(one.turns) for one in work), seed=args.seed)
    record: dict[str, Any] = {"settings": vars(args).copy(), "machine": machine(device), "ways": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    ways: dict[str, tuple[bool, bool]] = {"own pace": (True, False)}
    ways |= {"no reuse": (False, False)} if args.no_reuse else {}
    ways |= {"rounds": (True, True)} if args.rounds else {}
    found = record["ways"]

    def keep() -> None:
        """Writes the record so far, so that a stopped run loses only the way that it measured."""
        if args.out:
            write_record(record, args.out)

    # Compiles kernels and records graphs, with the same sizes of everything. The tools return at once.
    at_once = [Trajectory(one.prompt, [8] * args.turns, one.observations, [0.0] * args.turns) for one in work]
    warm = Source(engine, at_once)
    warm.longest_sequence = max(one.longest for one in work)
    warm.run(sampling)
    tokens = sum(sum(one.turns) for one in work)
    for repeat in range(args.repeats):
        for name, (reuse, barrier) in ways.items():
            source = Source(engine, work, reuse, barrier)
            result = measured(name, device, lambda source=source: source.run(sampling), tokens)
            counts, new = engine.prompt_counts(), sum(one.longest - sum(one.turns) for one in work)
            result |= {"computed_per_new_prompt_token": counts.computed / new, "evicted": counts.evicted}
            result |= {"waited_seconds": source.waited, "preempted": engine.preempted}
            found.setdefault(name, []).append(result)
            keep()
        found.setdefault("one turn", []).append(
            measured("one turn", device, lambda: in_one_turn(engine, work, sampling), tokens)
        )
        report(found, work, repeat)
        keep()


def report(found: dict[str, list[dict[str, float]]], work: Sequence[Trajectory], repeat: int) -> None:
    single = found["one turn"][repeat]["tokens_per_second"]
    slowest = max(sum(one.tools) for one in work)
    for name, results in found.items():
        if name != "one turn":
            one = results[repeat]
            one["share_of_one_turn"] = one["tokens_per_second"] / single
            print(
                f"{name:>12}: {one['share_of_one_turn']:.0%} of one turn; computed / new prompt tokens "
                f"{one['computed_per_new_prompt_token']:.3f}; {one['evicted']:.0f} evicted, {one['preempted']:.0f} "
                f"preempted; all slots empty for {one['waited_seconds']:.2f} s; slowest tools {slowest:.2f} s",
                flush=True,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=["tiny", *SHAPES])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="mean tokens of a prompt")
    parser.add_argument("--turn-tokens", type=int, default=512, help="mean tokens that a turn samples")
    parser.add_argument("--observation", type=int, default=64, help="mean tokens that a tool returns")
    parser.add_argument("--tool-seconds", type=float, nargs=2, default=(0.05, 5.0))
    parser.add_argument("--tool-scale", type=float, default=1.0)
    parser.add_argument("--cache-gb", type=float, default=None)
    parser.add_argument("--rounds", action="store_true", help="also with a barrier after each turn")
    parser.add_argument("--no-reuse", action="store_true", help="also without sessions")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
