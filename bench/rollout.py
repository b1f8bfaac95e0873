"""Tokens per second of our rollout engine beside transformers' `generate`, TRL's and vLLM's, in one run.

    python bench/rollout.py                              # the embedded tiny model, both cases
    python bench/rollout.py --shape half-billion --dtype bf16 --case mixed --out result.json
    python bench/rollout.py --shape half-billion --dtype bf16 --case equal --prompts 256 --n 1 --prompt-tokens 256 \
        --max-tokens 256 --sequences 256 --sides lockstep vllm     # where vLLM is importable

Every side samples `--n` responses to each prompt from the same weights at temperature 1. The weights themselves end a
response at random (see `random_lengths.py`), so nothing is hooked into any side, and all draw from one distribution of
texts and lengths: an untimed pass checks that, then the sides take turns: A B A B ... Response tokens are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from lockstep.device.select import select
from online_work import Work, add_arguments, make_work, settle, temporary_folder
from report import differ, machine, spread, summary
from rollout_sides import SIDES, Ours, Side
from sides import Seconds, Stopwatch, has_trl
from vllm_side import has_vllm

# Share of responses that our two engines must give alike from the same noise in fp32: rounding decides near-ties.
ALIKE = 0.9


def main() -> None:
    args = _arguments()
    settle(args.threads)
    device = select(args.device)
    record: dict[str, Any] = {
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "machine": machine(device),
        "cases": {},
    }
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    for case in ("equal", "mixed") if args.case == "all" else (args.case,):
        with temporary_folder() as folder:
            work = make_work(Path(folder), case, args, device, masters=False, beta=0.0)
            record["cases"][case] = run_case(case, work, args)
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")


def installed(side: str) -> bool:
    return (has_trl() or not side.startswith("trl")) and (has_vllm() or side != "vllm")


def run_case(case: str, work: Work, args: argparse.Namespace) -> dict[str, Any]:
    usual = [name for name in SIDES if name != "trl-continuous"]
    names = args.sides or [name for name in usual if installed(name)]
    print(f"\n{case}: {work.prompts} prompts x {work.n} responses of at most {work.max_tokens} tokens, {work.dtype}")
    sides: dict[str, Side] = {name: SIDES[name](work) for name in names}
    checks = check_equal_work(sides, work)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name, side in sides.items():
            watch = Stopwatch(work.device)
            responses = side.generate()
            seconds[name].append(watch.read())
            tokens[name].append(sum(len(ids) for ids in responses))
    found = {name: _numbers(tokens[name], seconds[name]) for name in names}
    for name in names:
        for kind in ("wall", "cpu"):
            rate = f"tokens_per_{kind}_second"
            pairs = zip(found["lockstep"][rate], found[name][rate], strict=True)
            found[name][f"{kind}_ratio"] = summary([ours / theirs for ours, theirs in pairs])
    _report(sides, found)
    return {
        "sides": {name: {"about": side.about} | found[name] for name, side in sides.items()},
        "same_distribution": checks,
    }


def check_equal_work(sides: dict[str, Side], work: Work) -> dict[str, Any]:
    """One untimed pass of each side: as long and as likely as ours, within chance; and our engines alike."""
    ours = sides["lockstep"]
    assert isinstance(ours, Ours)
    checks: dict[str, Any] = {}
    mine: dict[str, list[float]] = {}
    for name, side in sides.items():
        responses = side.generate()
        if len(responses) != work.sequences:
            raise SystemExit(f"{side.name} gave {len(responses)} of {work.sequences} responses")
        theirs = {
            "length": [float(len(ids)) for ids in responses],
            "logprob": ours.logprobs(responses),
        }
        mine = mine or theirs
        checks[name] = {key: statistics.fmean(values) for key, values in theirs.items()}
        checks[name]["longest"] = max(theirs["length"])
        for key, values in theirs.items():
            if differ(mine[key], values):
                raise SystemExit(f"{side.name} draws from another distribution than we do: {key}, {checks}")
    other = sides.get("lockstep-hf")
    if isinstance(other, Ours) and work.dtype == "fp32":
        pairs = zip(ours.sample(first_key=0), other.sample(first_key=0), strict=True)
        checks["engines_alike"] = statistics.fmean(float(a == b) for a, b in pairs)
        if checks["engines_alike"] < ALIKE:
            raise SystemExit(f"our engines give the same response in only {checks['engines_alike']:.0%} of the cases")
    return checks


def _numbers(tokens: list[int], seconds: list[Seconds]) -> dict[str, Any]:
    rates = [n / value.wall for n, value in zip(tokens, seconds, strict=True)]
    return {
        "tokens": tokens,
        "seconds": [value.wall for value in seconds],
        "tokens_per_wall_second": rates,
        "tokens_per_cpu_second": [n / value.cpu for n, value in zip(tokens, seconds, strict=True)],
        "tokens_per_second": summary(rates),
    }


def _report(sides: dict[str, Side], found: dict[str, dict[str, Any]]) -> None:
    width = max(len(side.name) for side in sides.values())
    for name, side in sides.items():
        line = f"  {side.name:{width}}  {spread(found[name]['tokens_per_second'], '.0f')} tokens/s"
        if name != "lockstep":
            line += f"   ratio {spread(found[name]['wall_ratio'], '.2f')}"
            if side.work.device.name == "cpu":
                line += f", in CPU time {spread(found[name]['cpu_ratio'], '.2f')}"
        print(f"{line}\n  {'':{width}}  {side.about}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="default: ours and what is installed")
    args = parser.parse_args()
    if args.sides and args.sides[0] != "lockstep":
        parser.error("--sides begins with lockstep, which the others are compared with")
    return args


if __name__ == "__main__":
    main()
