"""The difference of log-probs between engine and trainer by precision, for one model on one device.

python bench/precision.py                                  # the embedded tiny model on a CPU
python bench/precision.py --device cuda --model FOLDER --prompts 64 --tokens 512 --out result.json

Each case generates responses with the native engine and computes the log-probs of the same tokens with the trainer's
forward pass, with the same weights. `fp32`, `bf16` and `fp16` are dtypes of both sides. `bf16 + fp8` is a trainer in
bf16 with `rollout.precision: fp8`, and likewise int8. The cases draw the same random numbers, but not always the same
tokens. Random weights show rounding only; use the folder of a trained model for its mismatch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.algorithms.correction import correct
from lockstep.data.batching import micro_batch, to_device
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Policy, Scoring
from lockstep.model.tiny import write_tiny
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Completion, Example, Origin, Request, Sampling
from report import DIFFERENCE, Table, logprob_difference, machine, write_record

DTYPE_CASES = ("fp32", "bf16", "fp16")
QUANTISED = ("fp8", "int8")
# The first generation compiles kernels and captures graphs.
RUNS = 3


def cases(device: Device, trainer: str) -> list[tuple[str, str | None]]:
    """Pairs of a dtype and a precision of generation."""
    own = [(name, None) for name in DTYPE_CASES if device.supports(DTYPES[name])]
    return [*own, *((trainer, name) for name in QUANTISED if device.no_low_precision(name) is None)]


@torch.no_grad()
def trainer_logprobs(
    policy: Policy, prompts: list[list[int]], made: list[Completion], device: Any, *, replay: bool = False
) -> torch.Tensor:
    """The log-probs of the generated tokens, a few responses at a time. With `replay`, routers use the experts of the
    engine."""
    policy.scoring = Scoring()
    policy.eval()
    parts = []
    for start in range(0, len(made), 4):
        rows = [
            Example(
                prompts[one.request] + one.ids,
                [0] * len(prompts[one.request]) + [1] * len(one.ids),
                Origin("bench", one.request),
                routes=one.routes if replay else None,
            )
            for one in made[start : start + 4]
        ]
        parts.append(policy(to_device(micro_batch(rows, packed=True, pad_id=0), device)).logprobs_K.float().cpu())
    return torch.cat(parts)


def measured(folder: str, dtype: str, precision: str | None, given: argparse.Namespace) -> dict[str, Any]:
    device = select(given.device)
    where = device.torch_device(0)
    policy = load_policy(Model(path=folder, dtype=dtype), where, device.attention, 0)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(f"{17 * n % 97} + {31 * n % 89} = ")["input_ids"] for n in range(given.prompts)]
    engine = NativeEngine(policy, device, RolloutSettings(precision=precision), tokenizer.decode)  # type: ignore[arg-type]
    requests = [Request(ids, key, n=given.n) for key, ids in enumerate(prompts)]
    sampling = Sampling(max_tokens=given.tokens, seed=given.seed)
    seconds = []
    for _ in range(given.runs):
        begun = time.perf_counter()
        made = sorted(engine.generate(requests, sampling), key=lambda one: (one.request, one.sample))
        device.synchronise()
        seconds.append(time.perf_counter() - begun)
    engine_K = torch.tensor([logprob for one in made for logprob in one.logprobs])
    trainer_K = trainer_logprobs(policy, prompts, made, where)
    sequence_K = torch.repeat_interleave(torch.arange(len(made)), torch.tensor([len(one.ids) for one in made]))
    found = correct(
        trainer_K, engine_K, sequence_K, len(made), weight="token", cap=2.0, mask="none", low=0.5, high=2.0
    ).metrics
    return {
        "dtype": dtype,
        "precision": precision,
        "tokens": len(engine_K),
        **logprob_difference(trainer_K, engine_K),
        "kl": found["rollout_corr/kl"],
        "capped_share": found["rollout_corr/capped_share"],
        "effective_share": found["rollout_corr/effective_share"],
        "tokens_per_second": len(engine_K) / statistics.median(seconds[1:] or seconds),
        "quantised_parameters": 0 if engine.view is None else engine.view.parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="a folder; default: the embedded tiny model")
    parser.add_argument(
        "--trainer", default="bf16", choices=DTYPE_CASES, help="dtype of the trainer beside fp8 and int8"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--out")
    given = parser.parse_args()
    device = select(given.device)
    record: dict[str, Any] = {"machine": machine(device), "arguments": vars(given), "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            write_tiny(Path(folder) / "model")
        model = given.model or str(Path(folder) / "model")
        table = Table({"engine": "<12", **DIFFERENCE, "capped": ">7.4f", "ESS": ">7.4f", "tokens/s": ">9.0f"})
        print(table.header())
        for dtype, precision in cases(device, given.trainer):
            one = measured(model, dtype, precision, given)
            record["cases"].append(one)
            name = dtype if precision is None else f"{dtype} + {precision}"
            shown = ("mean_diff", "max_diff", "k3", "capped_share", "effective_share", "tokens_per_second")
            print(table.line(name, *(one[key] for key in shown)))
    if given.out:
        write_record(record, given.out)


if __name__ == "__main__":
    main()
