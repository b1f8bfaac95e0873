"""The built-in engine alone on models of real shapes with random weights: tokens/s beside what the device could do.

    python bench/engine.py                                        # the shapes and work of docs/speed.md, on CUDA
    python bench/engine.py --device cpu --shape tiny --prompts 4 --prompt 16 --response 8
    python bench/engine.py --shape qwen2.5-0.5b --long-tail --check --profile --out result.json
    python bench/engine.py --shape qwen2.5-7b --precision fp8 int8 --out result.json   # rollout.precision beside bf16

`cold` is a first call, which records passes; `warm` the median of calls that find them. Prefill and decoding are timed
by waiting for the device around each pass, in a call of their own. The share of the roofline is that of decoding alone
at the mean context (`roofline.py`). `--long-tail` gives every response a limit of its own, from a heavy-tailed
distribution, to fewer rows than responses, and measures until no prompt waits any more, beside equal limits. `--check`
draws with the plain sampler too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.kernels.fused import fuse
from lockstep.kernels.mixer_states import slot_bytes
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.runner import Round, Runner
from lockstep.rollout.native.scheduler import Scheduler, Work
from lockstep.types import Completion, Request, Sampling
from report import machine, write_record
from roofline import BANDWIDTH, FLOPS, generation_seconds
from shapes import SHAPES, ConfigShape, Shape

AnyShape = Shape | ConfigShape
TINY: AnyShape = Shape(2, 32, 4, 2, 8, 64, 300)
# (prompts, samples of each, prompt tokens, response tokens)
WORK = {
    "qwen2.5-0.5b": [(256, 1, 256, 256), (128, 8, 512, 1024)],
    "qwen2.5-1.5b": [(256, 1, 256, 256), (128, 8, 512, 1024)],
    "qwen3-0.6b": [(256, 1, 256, 256)],
    "qwen2.5-7b": [(256, 1, 256, 256)],
    "gemma3-1b": [(256, 1, 256, 256)],
    "qwen3-30b-a3b": [(256, 1, 256, 256)],
    "deepseek-16b": [(256, 1, 256, 256)],
    "qwen3.5-2b": [(256, 1, 256, 256)],
    "tiny": [(4, 2, 16, 8)],
}


class Read(NamedTuple):
    """A decoding round."""

    over: float
    """When it was."""
    waiting: int
    """Responses that were not begun when it began."""
    passes: int
    tokens: int


@dataclass
class Times:
    """Seconds of one call, and of its passes over prompts, each waited for; what is left is decoding."""

    prefill: list[float] = field(default_factory=list)
    rounds: list[Read] = field(default_factory=list)
    waiting: int = 0
    """Responses that are not begun."""
    seconds: float = 0.0
    """Of the whole call."""

    @property
    def decode(self) -> float:
        return self.seconds - sum(self.prefill)


@contextmanager
def timed(device: Device) -> Iterator[Times]:
    times, prefill, read, schedule, behind = (
        Times(),
        Runner.prefill,
        Round.read,
        Scheduler.next,
        Scheduler.schedule_ahead,
    )

    def timed_prefill(self: Runner, work: Any) -> None:
        device.synchronise()
        start = time.perf_counter()
        prefill(self, work)
        device.synchronise()
        times.prefill.append(time.perf_counter() - start)

    def timed_read(self: Round) -> Any:
        found = read(self)
        passes = len(found[0][0])
        # Those that reach their limit in the round draw no more; nothing else ends them here.
        tokens = sum(min(passes, sample.limit - len(sample.tokens)) for sample in self.sequences)
        times.rounds.append(Read(time.perf_counter(), times.waiting, passes, tokens))
        return found

    def counted_next(self: Scheduler, tokens: int) -> Work:
        found = schedule(self, tokens)
        times.waiting = len(self.waiting)
        return found

    def counted_schedule_ahead(self: Scheduler, tokens: int) -> Work:
        found = behind(self, tokens)
        times.waiting = len(self.waiting)
        return found

    Runner.prefill, Round.read = timed_prefill, timed_read  # type: ignore[method-assign]
    Scheduler.next, Scheduler.schedule_ahead = counted_next, counted_schedule_ahead  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        yield times
    finally:
        times.seconds = time.perf_counter() - start
        Runner.prefill, Round.read = prefill, read  # type: ignore[method-assign]
        Scheduler.next, Scheduler.schedule_ahead = schedule, behind  # type: ignore[method-assign]


def main() -> None:
    args = _arguments()
    transformers.logging.set_verbosity_error()
    device = select(args.device)
    record: dict[str, Any] = {"settings": vars(args).copy(), "machine": machine(device), "shapes": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    for name in args.shape:
        record["shapes"][name] = run_shape(name, args, device)
        if args.out:
            write_record(record, args.out)


def run_shape(name: str, args: argparse.Namespace, device: Device) -> dict[str, Any]:
    shape = TINY if name == "tiny" else SHAPES[name]
    given = args.prompts is not None
    found: dict[str, Any] = {}
    every = [(args.prompts, args.n, args.prompt, args.response)] if given else WORK[name]
    works = {"{} x {} ({} + {})".format(*work): work for work in every}
    peer = {key: in_own_process(run_vllm, shape, work, args) for key, work in works.items()} if args.beside else {}
    policy = random_policy(shape, device, args.dtype)
    for key, work in works.items():
        found[key] = run_work(name, shape, policy, device, work, args)
        for precision in args.precision:
            low = run_work(name, shape, policy, device, work, args, precision)
            low["ratio"] = low["tokens_per_second"] / found[key]["tokens_per_second"]
            found[key][precision] = low
            print(f"{'':14} {key}: {precision} {low['ratio']:.2f} x {args.dtype}", flush=True)
    if args.long_tail:
        found["long tail"] = run_long_tail(shape, policy, device, args)
    for key, result in peer.items():
        found[key][args.beside] = result
        ratio = found[key]["tokens_per_second"] / result["tokens_per_second"]
        print(f"{'':14} {key}: {ratio:.2f} x vLLM's {result['tokens_per_second']:,.0f} tok/s", flush=True)
    return found


def in_own_process(function: Any, *given: Any) -> Any:
    """The memory of the device that a peer takes is free again when its process has ended."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def run_vllm(shape: AnyShape, work: tuple[int, int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """The same work by vLLM on weights of its own drawing: the median of warm calls."""
    from vllm_side import Vllm, write_config

    prompts, n, prompt, response = work
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape.config(), folder)
        vllm = Vllm(folder, args.dtype, prompts * n, prompt + response + 8, share=0.85, dummy=True)
    seconds = []
    for turn in range(args.repeats + 1):
        # Other prompts each time: it remembers those it has seen.
        asked = [request.ids for request in _requests(shape, prompts, n, prompt, args.seed + 1 + turn)]
        start = time.perf_counter()
        made = vllm.generate(asked, n, response, None)
        seconds.append(time.perf_counter() - start)
        if sum(map(len, made)) != prompts * n * response:
            raise SystemExit(f"vLLM gave {sum(map(len, made))} tokens")
    return {
        "about": vllm.about,
        "seconds_first": seconds[0],
        "seconds_warm": seconds[1:],
        "tokens_per_second": prompts * n * response / statistics.median(seconds[1:]),
    }


def random_policy(shape: AnyShape, device: Device, dtype: str) -> Policy:
    register_attention()
    torch.manual_seed(0)
    torch_device = device.torch_device()
    with torch.device(torch_device):
        model = transformers.AutoModelForCausalLM.from_config(
            shape.config(),
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
            attn_implementation=ATTENTION,
        )
    fuse(model, device.attention)
    return Policy(model.requires_grad_(False), device.attention).eval()


def run_work(
    name: str,
    shape: AnyShape,
    policy: Policy,
    device: Device,
    work: tuple[int, int, int, int],
    args: argparse.Namespace,
    precision: str | None = None,
) -> dict[str, Any]:
    """`precision` is the `rollout.precision` of the engine. The roofline is that of `args.dtype`."""
    prompts, n, prompt, response = work
    batch = prompts * n
    engine = _engine(policy, device, batch, args, precision)
    requests = _requests(shape, prompts, n, prompt, args.seed)
    sampling = Sampling(response, seed=args.seed)
    # Compiles kernels and sets libraries up; other lengths than those that are measured.
    list(engine.generate(_requests(shape, min(prompts, 8), 1, 24, 1), Sampling(20, seed=1)))
    engine.release_memory()
    cold = _seconds(engine, requests, sampling, device)
    warm = [_seconds(engine, requests, sampling, device) for _ in range(args.repeats)]
    with timed(device) as times:
        list(engine.generate(requests, sampling))
    median = statistics.median(warm)
    floor = generation_seconds(shape.cost, batch, prompt, response, FLOPS, BANDWIDTH)
    # A step reads and writes the states of recurrent layers.
    states = slot_bytes(policy.decoder.state_shapes())
    floor += 2 * batch * response * states / BANDWIDTH
    step = times.decode / sum(one.passes for one in times.rounds)
    found = {
        "tokens": batch * response,
        "fused_layers": engine.ready_layers() is not None,
        "state_bytes_of_a_sequence": states,
        "seconds_cold": cold,
        "seconds_warm": warm,
        "tokens_per_second": batch * response / median,
        "tokens_per_second_cold": batch * response / cold,
        "prefill_seconds": sum(times.prefill),
        "prefill_passes": len(times.prefill),
        "decode_milliseconds": step * 1e3,
        "roofline_share_of_decoding": floor / times.decode,
        "roofline_share_of_all": floor / median,
        "peak_memory_gb": device.memory().peak / 1e9,
    }
    print(
        f"{name:14} {prompts:4} x {n} ({prompt} + {response}): {found['tokens_per_second']:8,.0f} tok/s, cold "
        f"{found['tokens_per_second_cold']:,.0f}; prefill {found['prefill_seconds']:.3f} s in "
        f"{found['prefill_passes']}, decode {step * 1e3:.2f} ms a step, {found['roofline_share_of_decoding']:.0%} of "
        f"the roofline ({found['roofline_share_of_all']:.0%} with prefill); {found['peak_memory_gb']:.1f} GB",
        flush=True,
    )
    if args.check:
        found["check"] = check_samplers(engine, requests, sampling, device)
    if args.profile:
        profile(engine, requests, sampling, device)
    engine.release_memory()
    return found


def run_long_tail(shape: AnyShape, policy: Policy, device: Device, args: argparse.Namespace) -> dict[str, float]:
    """Four times as many responses as rows; lengths log-normal, in the mean near a quarter of the limit."""
    rows, prompt, limit = args.rows, args.prompt or 256, args.response or 1024
    draw = random.Random(args.seed)
    lengths = [min(limit, max(8, round(draw.lognormvariate(0, 1) * limit / 6))) for _ in range(4 * rows)]
    mean = round(statistics.fmean(lengths))
    engine = _engine(policy, device, rows, args)
    rates: dict[str, float] = {}
    for name, each in (("equal", [mean] * len(lengths)), ("long tail", lengths)):
        plain = _requests(shape, len(each), 1, prompt, args.seed)
        requests = [Request(one.ids, one.key, 1, 0, most) for one, most in zip(plain, each, strict=True)]
        list(engine.generate(requests, Sampling(limit, seed=args.seed)))
        with timed(device) as times:
            start = time.perf_counter()
            list(engine.generate(requests, Sampling(limit, seed=args.seed)))
            whole = time.perf_counter() - start
        last = max(i for i, one in enumerate(times.rounds) if one.waiting)
        made = sum(one.tokens for one in times.rounds[: last + 1])
        rates[f"{name}: tokens_per_second_while_some_wait"] = made / (times.rounds[last].over - start)
        rates[f"{name}: tokens_per_second"] = sum(each) / whole
        rates[f"{name}: prefill_passes"] = len(times.prefill)
        rates[f"{name}: prefill_seconds"] = sum(times.prefill)
    equal, tail = (rates[f"{name}: tokens_per_second_while_some_wait"] for name in ("equal", "long tail"))
    rates["ratio"] = tail / equal
    print(f"{'':14} long tail over equal lengths, until nobody waits: {tail / equal:.2f}")
    print("\n".join(f"{'':16}{key}: {value:,.2f}" for key, value in rates.items()), flush=True)
    return rates


def check_samplers(
    engine: NativeEngine, requests: Sequence[Request], sampling: Sampling, device: Device
) -> dict[str, float]:
    """The same responses with the device's sampler and with the plain one; rounding may decide a near-tie."""
    few, kind = requests[:16], type(device)
    fast = _sorted(engine, few, sampling)
    engine.release_memory()
    own, kind.sampler = kind.sampler, "plain"
    try:
        plain = _sorted(engine, few, sampling)
    finally:
        kind.sampler = own
        engine.release_memory()
    pairs = list(zip(fast, plain, strict=True))
    same = [(a, b) for a, b in pairs if a.ids == b.ids]
    found = {
        "equal_responses": len(same) / len(pairs),
        "largest_logprob_difference": max(
            (abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)), default=float("nan")
        ),
    }
    print(f"{'':14} sampler {own} beside plain: {found}", flush=True)
    return found


def profile(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling, device: Device) -> None:
    """The kernels of a prefill and of one round of decoding, by time on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.name == "cuda" else [])
    order = "self_cuda_time_total" if device.name == "cuda" else "self_cpu_time_total"
    prefill, decode = Runner.prefill, Runner._round
    list(engine.generate(requests, Sampling(9, seed=sampling.seed)))
    seen: list[str] = []

    def look(name: str, function: Any) -> Any:
        def looked(self: Runner, work: Any, *more: Any) -> Any:
            # The first prefill, and the third round.
            if seen.count(name) != (0 if name == "prefill" else 2):
                seen.append(name)
                return function(self, work, *more)
            seen.append(name)
            device.synchronise()
            with profiler(activities=activities) as found:
                start = time.perf_counter()
                result = function(self, work, *more)
                device.synchronise()
                seconds = time.perf_counter() - start
            print(f"\n{name} of {len(work)}: {seconds * 1e3:.1f} ms")
            print(found.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=70))
            return result

        return looked

    Runner.prefill, Runner._round = look("prefill", prefill), look("decode", decode)  # type: ignore[method-assign]
    try:
        list(engine.generate(requests, sampling))
    finally:
        Runner.prefill, Runner._round = prefill, decode  # type: ignore[method-assign]


def _engine(
    policy: Policy, device: Device, rows: int, args: argparse.Namespace, precision: str | None = None
) -> NativeEngine:
    settings = RolloutSettings(
        max_sequences=rows,
        free_cache=False,
        prefill_tokens=args.prefill_tokens,
        precision=precision,  # type: ignore[arg-type]
        kv_cache=args.kv_cache if precision is not None else None,
    )
    return NativeEngine(policy, device, settings, lambda ids: "")


def _requests(shape: AnyShape, prompts: int, n: int, tokens: int, seed: int) -> list[Request]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.vocabulary, (prompts, tokens), generator=draw).tolist()
    return [Request(one, key, n) for key, one in enumerate(ids)]


def _seconds(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling, device: Device) -> float:
    device.synchronise()
    start = time.perf_counter()
    made = list(engine.generate(requests, sampling))
    seconds = time.perf_counter() - start
    wrong = [one for one in made if len(one.ids) != sampling.max_tokens]
    if wrong or len(made) != sum(request.n for request in requests):
        raise SystemExit(f"{len(made)} responses, of which {len(wrong)} have another length than {sampling.max_tokens}")
    return seconds


def _sorted(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    return sorted(engine.generate(requests, sampling), key=lambda one: (one.request, one.sample))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument(
        "--shape", nargs="+", choices=[*SHAPES, "tiny"], default=[name for name in WORK if name in SHAPES]
    )
    parser.add_argument("--precision", nargs="*", choices=["fp8", "int8"], default=[], help="beside --dtype")
    parser.add_argument("--kv-cache", choices=["fp8"], help="the KV cache of --precision")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--prompts", type=int, help="default: the work of docs/speed.md")
    parser.add_argument("--n", type=int, default=1, help="responses to a prompt")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--response", type=int, help="tokens of a response")
    parser.add_argument("--beside", choices=["vllm"], help="run a peer on the same work first, in its own process")
    parser.add_argument("--rows", type=int, default=256, help="sequences at once in the case --long-tail")
    parser.add_argument("--prefill-tokens", type=int, help="default: the device's")
    parser.add_argument("--repeats", type=int, default=2, help="timed warm calls")
    parser.add_argument("--long-tail", action="store_true")
    parser.add_argument("--check", action="store_true", help="hold the device's sampler against the plain one")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a prefill and a decoding round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write versions, settings and numbers to this JSON file")
    args = parser.parse_args()
    if (args.prompts is None) != (args.prompt is None or args.response is None) and not args.long_tail:
        parser.error("--prompts, --prompt and --response go together")
    args.out = str(args.out) if args.out else None
    return args


if __name__ == "__main__":
    main()
