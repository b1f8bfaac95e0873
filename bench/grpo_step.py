"""Seconds of our whole GRPO step beside TRL's GRPOTrainer, in one run.

    python bench/grpo_step.py                            # the embedded tiny model, both cases
    python bench/grpo_step.py --shape half-billion --dtype bf16 --case mixed --out result.json
    python bench/grpo_step.py --shape half-billion --dtype bf16 --case equal --prompts 32 --n 8 --prompt-tokens 256 \
        --max-tokens 256 --tokens 32768 --sides lockstep --out result.json
    ... --prompts 128 --prompt-tokens 512 --max-tokens 1024 --sequences 1024 --steps 1 --repeats 2

A step is: `--prompts` x `--n` responses, their rewards, the reference's log-probabilities (`--beta` over 0) and one
update. Both sides have the same weights, prompts, reward function, loss, optimizer and budget of a micro-batch, and
no vLLM. First TRL takes a step on the very responses of ours: prompts, reward, loss and gradient norm must agree. Then
the sides generate for themselves and take turns: A B A B ... The weights end responses at random (see
`random_lengths.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import transformers

from grpo_sides import SIDES, Ours, Pass, Side, Step, Trl
from lockstep.device.select import select
from lockstep.model.load_folder import DTYPES
from online_work import Work, add_arguments, make_work, settle, temporary_folder
from report import differ, machine, spread, summary
from roofline import training_flops
from shapes import Shape
from sides import has_trl

# How far loss, gradient norm and mean reward (the last two relative) may lie from ours for the work to count as
# equal. In bf16 this is coarse: TRL runs autocast over fp32 weights, we run in bf16 beside fp32 masters.
TOLERANCE = {"fp32": (1e-4, 1e-3, 1e-5), "bf16": (2e-2, 1e-1, 1e-3)}


def main() -> None:
    args = _arguments()
    settle(args.threads)
    if not has_trl() and args.sides != ["lockstep"]:
        raise SystemExit("TRL is not installed (pip install -e '.[bench]', or --sides lockstep for ours alone)")
    device = select(args.device)
    record: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "machine": machine(device),
        "cases": {},
    }
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    for case in ("equal", "mixed") if args.case == "all" else (args.case,):
        with temporary_folder() as folder:
            masters = args.dtype == "bf16"
            work = make_work(
                Path(folder), case, args, device, masters=masters, beta=args.beta, batches=max(args.steps, 2)
            )
            record["cases"][case] = run_case(case, work, Path(folder), args)
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")


def run_case(case: str, work: Work, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    print(f"\n{case}: {work.prompts} prompts x {work.n} responses of at most {work.max_tokens} tokens a step, ", end="")
    print(f"{work.tokens} tokens a micro-batch, beta {work.beta:g}, {work.dtype}", flush=True)
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name in args.sides:
            sides[name] = SIDES[name](work, folder / name, args.steps)
            stack.callback(sides[name].close)
        checks = check_equal_work(sides, work)
        print(f"  first step {checks['lockstep']}", flush=True)
        ours = sides["lockstep"]
        assert isinstance(ours, Ours)
        for _ in range(args.warm):
            for side in sides.values():
                seconds = side.train_pass().seconds
                print(f"  {side.name}: untimed pass of {args.steps} steps in {seconds.wall:.2f} s", flush=True)
        ours.forget()
        work.device.reset_peak()
        passes: dict[str, list[Pass]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                passes[name].append(side.train_pass())
                print(f"  {side.name}: {passes[name][-1].seconds.wall / args.steps:.3f} s a step", flush=True)
        check_equal_lengths(passes, sides)
        found = {name: _numbers(passes[name], passes["lockstep"], args.steps) for name in sides}
        phases = ours.taken(args.steps * args.repeats)
        _report(sides, found, phases)
        efficiency = _efficiency(work, passes["lockstep"], phases, args.steps, args.tflops)
    return {
        "efficiency": efficiency,
        "sides": {name: {"about": side.about} | found[name] for name, side in sides.items()},
        "our_phases": phases,
        "first_step": checks,
    }


def _efficiency(
    work: Work, passes: list[Pass], phases: dict[str, float], steps: int, tflops: float | None
) -> dict[str, Any]:
    """Of our side: response tokens a second of generation, model FLOP/s of the update over the peak (a prompt counts
    once for all of its responses), memory."""
    prompt = statistics.fmean(len(prompt.ids) for prompt in work.encoded())
    lengths = [length for one in passes for length in one.lengths]
    taken = steps * len(passes)
    shape = Shape.of(transformers.AutoConfig.from_pretrained(work.model))
    flops = training_flops(shape.cost, [round(prompt + length) for length in lengths]) / taken
    flops -= (work.sequences - work.prompts) * training_flops(shape.cost, [round(prompt)])
    record: dict[str, Any] = {"peak_gb": work.device.memory().peak / 1e9 if work.device.name != "cpu" else None}
    record["generated_per_second"] = sum(lengths) / taken / phases["gen"]
    peak = tflops * 1e12 if tflops else work.device.peak_flops(DTYPES[work.dtype])
    if peak:
        record["update_share_of_peak"] = flops / phases["update_actor"] / peak
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in record.items() if value is not None))
    return record


def check_equal_work(sides: dict[str, Side], work: Work) -> dict[str, Any]:
    """Our first step from the fresh weights, and TRL's on the same responses."""
    ours = sides["lockstep"]
    assert isinstance(ours, Ours)
    mine = ours.first_step()
    checks: dict[str, Any] = {"lockstep": _shown(mine)}
    allowed = TOLERANCE[work.dtype]
    for name, side in sides.items():
        if not isinstance(side, Trl):
            continue
        theirs = side.step_on(mine)
        checks[name] = _shown(theirs)
        if theirs.prompts != mine.prompts:
            raise SystemExit(f"{side.name} reads the prompts as other tokens than we do")
        apart = (
            abs(theirs.loss - mine.loss),
            abs(theirs.norm / mine.norm - 1),
            abs(theirs.reward / mine.reward - 1),
        )
        if any(far > most for far, most in zip(apart, allowed, strict=True)):
            raise SystemExit(f"{side.name} computes something else than we do on the same responses: {checks}")
    return checks


def check_equal_lengths(passes: dict[str, list[Pass]], sides: dict[str, Side]) -> None:
    """The timed steps of all sides had as many responses, as long as ours within chance."""
    lengths = {name: [float(n) for one in every for n in one.lengths] for name, every in passes.items()}
    for name, values in lengths.items():
        if len(values) != len(lengths["lockstep"]) or differ(lengths["lockstep"], values):
            means = {key: (len(each), statistics.fmean(each)) for key, each in lengths.items()}
            raise SystemExit(f"{sides[name].name} made other responses than we did (count, mean length): {means}")


def _shown(step: Step) -> dict[str, float]:
    shown = {"loss": step.loss, "norm": step.norm, "reward": step.reward, "tokens": sum(map(len, step.responses))}
    return shown if step.apart is None else shown | {"probabilities_apart": step.apart}


def _numbers(theirs: list[Pass], ours: list[Pass], steps: int) -> dict[str, Any]:
    """Seconds a step, and how much faster ours was in the same repeat: by the step, and by the response token."""
    pairs = list(zip(theirs, ours, strict=True))
    lengths = [length for one in theirs for length in one.lengths]
    return {
        "seconds": [one.seconds.wall for one in theirs],
        "cpu_seconds": [one.seconds.cpu for one in theirs],
        "tokens": [sum(one.lengths) for one in theirs],
        "response_length": {"mean": statistics.fmean(lengths), "max": max(lengths), "min": min(lengths)},
        "seconds_per_step": summary([one.seconds.wall / steps for one in theirs]),
        "ratio": summary([a.seconds.wall / b.seconds.wall for a, b in pairs]),
        "cpu_ratio": summary([a.seconds.cpu / b.seconds.cpu for a, b in pairs]),
        # Chance gives the sides other lengths in each repeat; over all of them this evens out.
        "ratio_per_token": _per_token(theirs, "wall") / _per_token(ours, "wall"),
        "cpu_ratio_per_token": _per_token(theirs, "cpu") / _per_token(ours, "cpu"),
    }


def _per_token(passes: list[Pass], clock: str) -> float:
    return sum(getattr(one.seconds, clock) for one in passes) / sum(sum(one.lengths) for one in passes)


def _report(sides: dict[str, Side], found: dict[str, dict[str, Any]], phases: dict[str, float]) -> None:
    width = max(len(side.name) for side in sides.values())
    for name, side in sides.items():
        numbers = found[name]
        length = numbers["response_length"]
        print(f"  {side.name:{width}}  {spread(numbers['seconds_per_step'], '.2f')} s a step", end="")
        if name != "lockstep":
            print(f"   ratio {spread(numbers['ratio'], '.2f')}", end="")
            if side.work.device.name == "cpu":
                print(f", in CPU time {spread(numbers['cpu_ratio'], '.2f')}", end="")
            print(f"; per response token {numbers['ratio_per_token']:.2f}", end="")
            if side.work.device.name == "cpu":
                print(f", in CPU time {numbers['cpu_ratio_per_token']:.2f}", end="")
        print(f"\n  {'':{width}}  {side.about}")
        print(
            f"  {'':{width}}  responses of {length['min']} to {length['max']} tokens, {length['mean']:.1f} on average"
        )
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
    print(f"  our step in seconds: {parts}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--beta", type=float, default=0.001, help="weight of the divergence; 0 needs no reference")
    parser.add_argument("--tflops", type=float, help="matrix TFLOP/s that count as the peak; default: the maker's")
    parser.add_argument("--steps", type=int, default=2, help="steps of one pass")
    parser.add_argument("--deterministic", action="store_true", help="our side with run.deterministic=true")
    parser.add_argument("--warm", type=int, default=1, help="untimed passes of each side after the first step")
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=[name for name in SIDES if name != "trl-continuous"]
    )
    args = parser.parse_args()
    if args.sides[0] != "lockstep":
        parser.error("--sides begins with lockstep, which the others are compared with")
    return args


if __name__ == "__main__":
    main()
