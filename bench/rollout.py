"""Tokens per second of our rollout engine beside transformers' `generate` and TRL's, in one run.

    python bench/rollout.py                              # the embedded tiny model, both cases
    python bench/rollout.py --shape half-billion --dtype bf16 --case mixed --out result.json

Every side samples `--n` responses to each prompt from the same weights at temperature 1. The weights themselves end a
response at random (see `speaker.py`), so nothing is hooked into any side, and all draw from one distribution of
texts and lengths: an untimed pass checks that, then the sides take turns: A B A B ... Response tokens are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import torch
from transformers import GenerationConfig

from lockstep.data.batching import micro_batch, plan_micro_batches, to_device
from lockstep.device.select import select
from lockstep.model.load import load_policy
from lockstep.recipe.schema import Model, Rollout
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.engine import NativeEngine
from lockstep.types import Example, Origin, Request, Sampling
from online_work import Work, add_arguments, has_trl, make_trainer, make_work, settle, temporary_folder
from report import differ, machine, spread, summary
from sides import Seconds, Stopwatch

Response = list[int]
# Share of responses that our two engines must give alike from the same noise in fp32: rounding decides near-ties.
ALIKE = 0.9


class Ours:
    """lockstep: the native engine, or with `engine="hf"` transformers' `generate` with our sampler inside."""

    def __init__(self, work: Work, engine: str = "native"):
        self.name = "lockstep" if engine == "native" else "lockstep hf engine"
        self.work, self.calls = work, 0
        self.prompts = work.encoded()
        self.settings = Model(path=work.model, dtype=work.dtype)
        self.place = work.device.torch_device()
        self.policy = load_policy(self.settings, self.place, work.device.attention, seed=0)
        rollout = Rollout(n=work.n, max_tokens=work.max_tokens)
        if engine == "native":
            self.engine: Any = NativeEngine(self.policy, work.device, rollout, str)
            self.about = f"at most {rollout.max_sequences} at once, blocks of {rollout.block_tokens} tokens"
        else:
            self.engine = HfEngine(self.policy.generating, str)
            self.about = "the engine `hf`: left-padded `generate`, 64 at once"
        self.end = _end(self.policy.causal_lm)

    def generate(self) -> list[Response]:
        self.calls += 1
        return self.sample(first_key=self.calls * len(self.prompts))

    def sample(self, first_key: int) -> list[Response]:
        work = self.work
        requests = [Request(prompt.ids, first_key + i, work.n) for i, prompt in enumerate(self.prompts)]
        sampling = Sampling(work.max_tokens, stop_ids=(self.end,), seed=work.seed)
        made = sorted(self.engine.generate(requests, sampling), key=lambda c: (c.request, c.sample))
        return [completion.ids for completion in made]

    @torch.no_grad()
    def mean_logprobs(self, responses: Sequence[Response]) -> list[float]:
        """How likely each response is to the trainer's model, per token."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.work.n)]
        rows = [
            Example([*p.ids, *ids], [0] * len(p.ids) + [1] * len(ids), Origin("bench", i))
            for i, (p, ids) in enumerate(zip(prompts, responses, strict=True))
        ]
        (plan,) = plan_micro_batches([len(row) for row in rows], devices=1, tokens=self.work.tokens, rows=None)
        found = [0.0] * len(rows)
        for members in plan:
            batch = micro_batch([rows[i] for i in members], packed=True, pad_id=0)
            parts = self.policy(to_device(batch, self.place)).logprobs_K.split([len(responses[i]) for i in members])
            for i, part in zip(members, parts, strict=True):
                found[i] = part.mean().item()
        return found


class Plain:
    """transformers' `generate` on all sequences at once, left-padded."""

    name = "transformers generate"

    def __init__(self, work: Work):
        self.work = work
        self.place = work.device.torch_device()
        self.model = work.their_model().to(self.place).eval()
        self.about = f"left-padded, all {work.sequences} at once, sdpa"
        self.end, self.pad = _end(self.model), self.model.config.pad_token_id
        rows = [list(prompt.ids) for prompt in work.encoded() for _ in range(work.n)]
        width = max(len(row) for row in rows)
        self.ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in rows], device=self.place)
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.place)

    @torch.no_grad()
    def generate(self) -> list[Response]:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=self.work.max_tokens,
            eos_token_id=self.end,
            pad_token_id=self.pad,
        )
        out = self.model.generate(input_ids=self.ids, attention_mask=self.mask, generation_config=config)
        return [_cut(row, self.end) for row in out[:, self.ids.shape[1] :].tolist()]


class Trl:
    """What GRPOTrainer generates with, without vLLM: padded `generate`, or transformers' continuous batching."""

    def __init__(self, work: Work, continuous: bool):
        self.name = "TRL continuous" if continuous else "TRL"
        self.work = work
        self.folder = temporary_folder()
        self.trainer = make_trainer(work, self.folder.name, continuous=continuous, callbacks=[])
        self.about = (
            "use_transformers_continuous_batching=True" if continuous else f"left-padded, all {work.sequences} at once"
        )
        self.prompts = [list(prompt.ids) for prompt in work.encoded() for _ in range(work.n)]
        self.trainer.model.train()

    def generate(self) -> list[Response]:
        made, _ = self.trainer._generate_single_turn(self.prompts, None, {}, self.work.n)
        return made


Side = Ours | Plain | Trl

SIDES = {
    "lockstep": Ours,
    "lockstep-hf": lambda work: Ours(work, "hf"),
    "generate": Plain,
    "trl": lambda work: Trl(work, continuous=False),
    "trl-continuous": lambda work: Trl(work, continuous=True),
}


def main() -> None:
    args = _arguments()
    settle(args.threads)
    device = select(args.device)
    record: dict[str, Any] = {"settings": vars(args), "machine": machine(device), "cases": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    for case in ("equal", "mixed") if args.case == "all" else (args.case,):
        with temporary_folder() as folder:
            work = make_work(Path(folder), case, args, device, masters=False, beta=0.0)
            record["cases"][case] = run_case(case, work, args)
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")


def run_case(case: str, work: Work, args: argparse.Namespace) -> dict[str, Any]:
    names = args.sides or [name for name in SIDES if has_trl() or not name.startswith("trl")]
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
            rates = zip(found["lockstep"][f"tokens_per_{kind}_second"], found[name][f"tokens_per_{kind}_second"])
            found[name][f"{kind}_ratio"] = summary([ours / theirs for ours, theirs in rates])
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
            "logprob": ours.mean_logprobs(responses),
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


def _cut(ids: Response, end: int) -> Response:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _end(model: Any) -> int:
    return model.config.eos_token_id


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
