"""What `lockstep plan --cluster` predicts beside what was measured: the files of bench/results, and published times.

    python bench/predictions.py
    python bench/predictions.py --measure bench/results/predictions_cpu.json      # the rows of the CPU, anew
    python bench/predictions.py --out bench/results/predictions.json              # all rows, with errors by device

Rows of the CPU are in seconds of CPU time on one thread, which a busy machine changes little. Rows marked "fit" are
those that the table of devices was fitted to (`lockstep/device/chips.py`); the others test it. No constant is fitted to
a published row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
import yaml

import low_memory
import memory
from lockstep.device.select import DEVICES
from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster import OnlineSteps, StepWork, TargetCluster, cluster_named
from lockstep.preflight.cluster_plan import Outlook
from lockstep.preflight.step_time import PhaseTime
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Recipe
from shapes import SHAPES

RESULTS = Path(__file__).parent / "results"
# As files of bench/grpo_step.py call it.
NAMES = {"half-billion": "qwen2.5-0.5b"}


@dataclass(frozen=True)
class Prediction:
    what: str
    predicted: float
    measured: float
    unit: str = "s"
    fitted: bool = False
    chip: str | None = None
    """The device of a published row."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def line(self) -> str:
        numbers = f"{self.predicted:10,.3f} {self.measured:10,.3f} {self.unit:3} {self.error:+8.1%}"
        return f"{self.what:64} {numbers}{'  fit' if self.fitted else ''}"


@dataclass(frozen=True)
class EqualRows:
    """Updates of rows that are all as long, and trained whole."""

    count: int
    length: int

    def work(self, recipe: Recipe) -> StepWork:
        tokens = self.count * self.length
        return StepWork(self.count, tokens, tokens * self.length, tokens, self.count * (self.length - 1))

    def longest(self, recipe: Recipe) -> int:
        return self.length

    def rows(self, recipe: Recipe) -> int:
        return self.count


def recipe_of(values: dict[str, Any]) -> Recipe:
    model = {"path": "model", "dtype": "bf16", **values.pop("model", {})}
    return with_derived_defaults(
        Recipe.model_validate(with_method_defaults({"model": model, "data": {"train": "rows"}, **values}))
    )


def seconds(times: list[PhaseTime] | None) -> float:
    assert times is not None
    return sum(phase.open for phase in times)


def gigabytes(outlook: Outlook, cluster: TargetCluster) -> float:
    return max(phase.total for phase in outlook.phases(cluster)) / 1e9


def sft_rows(cluster: TargetCluster) -> Iterator[Prediction]:
    for name in ("0.5b", "1.5b"):
        record = json.loads((RESULTS / f"sft_h200_bf16_{name}_1024.json").read_text())
        settings, case = record["settings"], record["cases"]["equal"]
        batch = {"tokens": settings["tokens"], "rows_per_update": settings["rows"]}
        recipe = recipe_of({"method": "sft", "batch": batch})
        steps = EqualRows(settings["rows"], settings["length"])
        outlook = Outlook.of(recipe, SHAPES[settings["shape"]].config(), steps)
        measured = steps.count * steps.length / case["sides"]["lockstep"]["tokens_per_second"]["median"]
        what = f"SFT {settings['shape']}, {steps.count} x {steps.length}"
        yield Prediction(what, seconds(outlook.times(cluster)), measured, fitted=True)
        yield Prediction(what, gigabytes(outlook, cluster), case["peak_gb"], "GB")


def fine_tuning_rows(cluster: TargetCluster) -> Iterator[Prediction]:
    """All weights of a 7B shape, AdamW's state on the host, and activations on the host: bench/memory.py."""
    record = json.loads((RESULTS / "memory_7b_h200.json").read_text())
    config, device = SHAPES["qwen2.5-7b"].config(), DEVICES[cluster.chip.kind]
    for result in record["results"]:
        case = {key: value for key, value in result.items() if key in memory.SEVEN_BILLION[-1]}
        count = case.get("micro_batches", 1)
        what = f"SFT 7B, optimizer on the host, {count} x {case['tokens']}"
        recipe = memory.recipe_of(case, Path("model"))
        outlook = Outlook.of(recipe, config, EqualRows(recipe.batch.rows_per_update, memory.LENGTH))
        yield Prediction(what, seconds(outlook.times(cluster)), result["update_s"])
        predicted = memory.planned(recipe, config, device).peak.total
        yield Prediction(what, predicted / 1e9, result["measured_gib"] * 2**30 / 1e9, "GB")
    # What offload of activations costs: 128 rows of 512 tokens of the 0.5B shape.
    for result in json.loads((RESULTS / "memory_activations_h200.json").read_text())["results"]:
        case = {key: value for key, value in result.items() if key in memory.ACTIVATIONS[-1]}
        recipe = memory.recipe_of(case, Path("model"))
        steps = EqualRows(recipe.batch.rows_per_update, memory.LENGTH)
        outlook = Outlook.of(recipe, SHAPES["qwen2.5-0.5b"].config(), steps)
        what = "SFT 0.5B, 128 x 512" + "".join(f", {key}" for key, value in case.items() if value is True)
        yield Prediction(what, seconds(outlook.times(cluster)), result["update_s"])


def grpo_rows(cluster: TargetCluster) -> Iterator[Prediction]:
    for name in ("32x8", "128x8"):
        record = json.loads((RESULTS / f"grpo_step_h200_bf16_0.5b_{name}.json").read_text())
        settings, case = record["settings"], record["cases"]["equal"]
        prompt, response = settings["prompt_tokens"], settings["max_tokens"]
        rollout = {"n": settings["n"], "max_tokens": response, "free_cache": False}
        if settings["sequences"]:
            rollout["max_sequences"] = settings["sequences"]
        batch = {"prompts": settings["prompts"], "tokens": settings["tokens"]}
        recipe = recipe_of({"method": "grpo", "batch": batch, "rollout": rollout})
        config = SHAPES[NAMES[settings["shape"]]].config()
        outlook = Outlook.of(recipe, config, OnlineSteps(prompt, response, prompt))
        times = outlook.times(cluster)
        phases, what = case["our_phases"], f"GRPO 0.5B {name}, {prompt} + {response}"
        for phase, key in zip(times or [], ("gen", "ref", "update_actor"), strict=True):
            yield Prediction(f"{what}: {phase.name}", phase.open, phases[key])
        yield Prediction(f"{what}: step", seconds(times), case["sides"]["lockstep"]["seconds_per_step"]["median"])
        yield Prediction(what, gigabytes(outlook, cluster), case["efficiency"]["peak_gb"], "GB")


def engine_rows(cluster: TargetCluster) -> Iterator[Prediction]:
    for file in ("256", "128x8"):
        record = json.loads((RESULTS / f"engine_h200_bf16_{file}.json").read_text())
        for shape, cases in record["shapes"].items():
            for work, case in cases.items():
                prompts, n, prompt, response = (
                    int(word.strip("()")) for word in work.replace("x", " ").replace("+", " ").split()
                )
                rollout = {"n": n, "max_tokens": response, "max_sequences": prompts * n}
                recipe = recipe_of({"method": "grpo", "batch": {"prompts": prompts}, "rollout": rollout})
                outlook = Outlook.of(recipe, SHAPES[shape].config(), OnlineSteps(prompt, response, prompt))
                (generate, *_) = outlook.times(cluster) or []
                measured = case["prefill_seconds"] + response * case["decode_milliseconds"] / 1e3
                yield Prediction(f"engine {shape}, {work}", generate.open, measured, fitted=True)


def long_rows(cluster: TargetCluster) -> Iterator[Prediction]:
    """Updates of models of 7B and 8B with rows of 1,024 to 131,072 tokens: bench/low_memory.py and bench/sft.py."""
    record = json.loads((RESULTS / "low_memory_h200.json").read_text())
    cases = [(name, case) for part in ("fp8", "long") for name, case in record[part]["cases"].items()]
    # The part qlora was printed, without the settings of its cases.
    printed = {name: low_memory.CASES[name] for name in ("lora-7b", "qlora-7b", "int8-7b")}
    cases += [
        (name, {**asdict(case), "tokens_per_second": record["printed"]["qlora"][name]["tokens_per_second"]})
        for name, case in printed.items()
    ]
    for name, case in cases:
        if name == "fp8-7b":  # the table has no speed of matmuls in fp8
            continue
        length = sum(case["row"]) + 2  # a separator and an end token
        sections: dict[str, dict[str, Any]] = {"model": {}, "batch": {"rows_per_update": case["rows"]}}
        for word in case["words"]:
            keys, value = word.split("=")
            *path, key = keys.split(".")
            held = sections.setdefault(path[0], {})
            for inner in path[1:]:
                held = held.setdefault(inner, {})
            held[key] = yaml.safe_load(value)
        steps = EqualRows(case["rows"], length)
        outlook = Outlook.of(recipe_of({"method": "sft", **sections}), SHAPES[case["model"]].config(), steps)
        what = f"SFT {name}, {case['rows']} x {length}"
        measured = case["rows"] * length / case["tokens_per_second"]
        yield Prediction(what, seconds(outlook.times(cluster)), measured, fitted=name in ("tiled-32k", "long-128k"))


@dataclass(frozen=True)
class PublishedStep:
    """A GRPO step that another framework published. Lengths are tokens per sequence, with the prompt."""

    framework: str
    shape: str
    cluster: str
    prompts: int
    n: int
    mean: float
    longest: int
    seconds: float
    tensor: int
    """The tensor parallelism of the framework's generation, at most the devices of a node."""
    update: int
    """The prompts of an update."""
    generating: float | None = None
    """The seconds of generation, if they are published."""

    def recipe(self) -> Recipe:
        return recipe_of(
            {
                "method": "grpo",
                "model": {"gradient_checkpointing": True},
                "batch": {
                    "prompts": self.prompts,
                    "prompts_per_update": self.update,
                    "tokens": 2 * self.longest,
                },
                "rollout": {"n": self.n, "max_tokens": self.longest - PROMPT, "max_sequences": 256},
                "parallel": {"tensor_parallel": self.tensor},
            }
        )

    def times(self) -> list[PhaseTime]:
        lengths = OnlineSteps(PROMPT, self.mean - PROMPT, PROMPT)
        return Outlook.of(self.recipe(), PUBLISHED_SHAPES[self.shape], lengths).times(cluster_named(self.cluster)) or []


# No framework publishes the mean length of its prompts.
PROMPT = 100


def _nemo(
    shape: str, nodes: int, mean: int, longest: int, responses: int, seconds: float, tensor: int = 1
) -> PublishedStep:
    """https://github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md: DGX H100, bf16, synchronous, 32 responses
    per prompt, updates of 512 responses. The dense models are in version 0.5 only, the others are of version 0.6."""
    return PublishedStep(
        "NeMo RL", shape, f"{nodes}x8:h100", responses // 32, 32, mean, longest, seconds, tensor, update=16
    )


def _mindspeed(shape: str, cluster: str, prompts: int, n: int, limit: int, speed: float, tensor: int) -> PublishedStep:
    """https://github.com/Ascend/MindSpeed-RL, docs/zh/algorithms/grpo.md and dapo.md: tokens of prompts and responses
    per second and device (`speed`, of one die, which is half of the published speed of a card of Atlas A3). The number
    of devices, 16, and the parallelism are those of its configs. It publishes the limit of responses, not their mean
    length: half of the limit is assumed."""
    mean = PROMPT + limit / 2
    seconds = prompts * n * mean / 16 / speed
    return PublishedStep(
        "MindSpeed RL", shape, cluster, prompts, n, mean, PROMPT + limit, seconds, tensor, update=prompts
    )


PUBLISHED_STEPS = (
    _nemo("llama3.1-8b", 2, 1019, 4096, 2048, 92.8),
    _nemo("qwen3-32b", 4, 3251, 4096, 2048, 376.0, tensor=4),
    _nemo("qwen3-30b-a3b", 4, 3203, 4096, 2048, 192.0, tensor=2),
    # It generates with a tensor parallelism of 16.
    _nemo("qwen3-235b-a22b", 16, 5698, 8192, 512, 395.0, tensor=8),
    _mindspeed("qwen2.5-7b", "1x16:atlas-a3", 32, 8, 2048, 220 / 2, tensor=1),
    _mindspeed("qwen2.5-32b", "1x16:atlas-a3", 64, 16, 2048, 220 / 2, tensor=2),
    _mindspeed("qwen2.5-32b", "2x8:atlas-800t-a2", 64, 16, 1024, 100, tensor=2),
    # Its experts are divided over 8 dies for generation, and its tensors over 4 for training. It is DAPO: groups whose
    # responses all have one reward are generated again, which the prediction does not count.
    _mindspeed("qwen3-30b-a3b", "1x16:atlas-a3", 32, 8, 2048, 44 / 2, tensor=4),
    # https://github.com/verl-project/verl, docs/perf/dpsk.md (August 2025), with the batch and the limit of 9,632
    # tokens of examples/grpo_trainer/run_deepseek671b_math_megatron_96gb.sh of the same day. It generates with a tensor
    # parallelism of 32.
    PublishedStep(
        "verl", "deepseek-v3", "12x8:h20", 96, 8, PROMPT + 1960, PROMPT + 9632, 1700.0, 8, update=32, generating=1050.0
    ),
)


def published_rows() -> Iterator[Prediction]:
    for step in PUBLISHED_STEPS:
        times = step.times()
        devices, chip = step.cluster.split(":")
        what = f"{step.framework}, {step.shape} on {devices} {chip}"
        if step.generating is not None:
            yield Prediction(f"{what}: generate", times[0].open, step.generating, chip=chip)
        yield Prediction(f"{what}: step, at least", sum(phase.hidden for phase in times), step.seconds, chip=chip)
        yield Prediction(f"{what}: step, at most", seconds(times), step.seconds, chip=chip)


@dataclass(frozen=True)
class TrainerStep:
    """An update that prime-rl published: two micro-batches of one sequence on each device, with recomputation."""

    shape: str
    devices: int
    chip: str
    length: int
    seconds: float
    lora: int | None = None


# https://github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines (January 2026): mean of `step_time`, SFT for all
# weights and RL for adapters.
TRAINER_STEPS = (
    TrainerStep("qwen3-0.6b", 1, "h100", 8192, 0.62),
    TrainerStep("qwen3-0.6b", 1, "h100", 16384, 1.28),
    TrainerStep("qwen3-4b", 8, "h100", 16384, 5.01),
    TrainerStep("qwen3-4b", 8, "h200", 16384, 4.71),
    TrainerStep("qwen3-30b-a3b", 8, "h200", 16384, 7.17),
    TrainerStep("qwen3-4b", 1, "h100", 16384, 5.26, lora=16),
    TrainerStep("qwen3-4b", 8, "h200", 65536, 31.42, lora=16),
    TrainerStep("qwen3-30b-a3b", 8, "h200", 16384, 7.13, lora=16),
)


def trainer_rows() -> Iterator[Prediction]:
    for step in TRAINER_STEPS:
        model: dict[str, Any] = {"gradient_checkpointing": True}
        if step.lora is not None:
            model["lora"] = {"rank": step.lora}
        count = 2 * step.devices
        recipe = recipe_of(
            {"method": "sft", "model": model, "batch": {"tokens": step.length, "rows_per_update": count}}
        )
        outlook = Outlook.of(recipe, PUBLISHED_SHAPES[step.shape], EqualRows(count, step.length))
        times = outlook.times(cluster_named(f"1x{step.devices}:{step.chip}"))
        kind = "all weights" if step.lora is None else "LoRA"
        what = f"prime-rl, {step.shape} {kind}, {step.devices} {step.chip.upper()}, {step.length}"
        yield Prediction(what, seconds(times), step.seconds, chip=step.chip)


def errors_by_chip(rows: list[Prediction]) -> dict[str, tuple[int, int]]:
    """The least and the greatest error of the published rows of each device, in percent. Of a range, the upper end."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row.chip is not None and not row.what.endswith(("at least", "generate")):
            found.setdefault(row.chip, []).append(round(100 * row.error))
    return {chip: (min(errors), max(errors)) for chip, errors in found.items()}


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, keys: int, tied: bool = False, experts: int = 0
) -> transformers.PretrainedConfig:
    common = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
    }
    if experts:
        return transformers.Qwen3MoeConfig(
            moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=8, **common
        )
    return transformers.Qwen3Config(intermediate_size=inner, **common)


PUBLISHED_SHAPES = {
    "qwen2.5-7b": SHAPES["qwen2.5-7b"].config(),
    "qwen2.5-32b": transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    # The sizes of DeepSeek-V3 are the defaults.
    "deepseek-v3": transformers.DeepseekV3Config(max_position_embeddings=16384),
    "llama3.1-8b": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3(2048, 768, 48, 32, 4, experts=128),
    "qwen3-235b-a22b": _qwen3(4096, 1536, 94, 64, 4, experts=128),
}


# Sizes of a decoder, then rows, their length and the tokens of a micro-batch. Two numbers are fitted to the four.
CPU_UPDATES = (
    ({"hidden": 64, "layers": 2, "inner": 172, "heads": 4, "keys": 1, "vocabulary": 300}, (32, 256, 4096)),
    ({"hidden": 512, "layers": 8, "inner": 1408, "heads": 8, "keys": 2, "vocabulary": 4000}, (4, 256, 1024)),
    ({"hidden": 256, "layers": 4, "inner": 1024, "heads": 4, "keys": 1, "vocabulary": 2000}, (8, 256, 1024)),
    ({"hidden": 256, "layers": 4, "inner": 1024, "heads": 4, "keys": 1, "vocabulary": 2000}, (32, 64, 1024)),
)
# The same sizes: prompts, responses to each, tokens of prompts and of responses; the first one is fitted.
CPU_GENERATION = ((0, (8, 4, 64, 64)), (2, (4, 4, 64, 64)))


def cpu_config(sizes: dict[str, int]) -> Any:
    return transformers.Qwen2Config(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["keys"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def cpu_rows() -> Iterator[Prediction]:
    cluster, record = cluster_named("1x1:cpu"), json.loads((RESULTS / "predictions_cpu.json").read_text())
    for number, (sizes, (count, length, tokens)) in enumerate(CPU_UPDATES):
        batch = {"tokens": tokens, "rows_per_update": count}
        recipe = recipe_of({"method": "sft", "model": {"dtype": "fp32"}, "batch": batch})
        outlook = Outlook.of(recipe, cpu_config(sizes), EqualRows(count, length))
        what = f"CPU update, {sizes['hidden']} x {sizes['layers']}, {count} x {length}"
        yield Prediction(what, seconds(outlook.times(cluster)), record["updates"][number], fitted=True)
    for number, (place, (prompts, n, prompt, response)) in enumerate(CPU_GENERATION):
        sizes = CPU_UPDATES[place][0]
        rollout = {"n": n, "max_tokens": response}
        values = {"method": "grpo", "model": {"dtype": "fp32"}, "batch": {"prompts": prompts}, "rollout": rollout}
        outlook = Outlook.of(recipe_of(values), cpu_config(sizes), OnlineSteps(prompt, response, prompt))
        what = f"CPU generation, {sizes['hidden']} x {sizes['layers']}, {prompts} x {n}"
        (generate, *_) = outlook.times(cluster) or []
        yield Prediction(what, generate.open, record["generation"][number], fitted=number == 0)


def scale_rows() -> Iterator[Prediction]:
    """An SFT update of one process and of two, sharded over gloo, wall-clock seconds: bench/scale.py."""
    record = json.loads((RESULTS / "scale_cpu.json").read_text())
    settings = record["settings"]
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "model")
        config = transformers.AutoConfig.from_pretrained(Path(folder) / "model")
    for kind, ranks in (("one process", "1"), ("strong", "2"), ("weak", "2")):
        found = record["weak" if kind == "weak" else "strong"][ranks]
        batch = {"tokens": settings["tokens"], "rows_per_update": found["rows"]}
        recipe = recipe_of({"method": "sft", "model": {"dtype": settings["dtype"]}, "batch": batch})
        outlook = Outlook.of(recipe, config, EqualRows(found["rows"], settings["length"]))
        times = outlook.times(cluster_named(f"1x{ranks}:cpu")) or []
        what = f"scaling, {kind}, {found['rows']} x {settings['length']}"
        if ranks == "1":
            yield Prediction(what, seconds(times), found["seconds"])
        else:
            hidden = sum(phase.hidden for phase in times)
            yield Prediction(f"{what}: collectives hide", hidden, found["seconds"])
            yield Prediction(f"{what}: nothing hides", seconds(times), found["seconds"])


def measure_cpu() -> dict[str, Any]:
    """The rows above, each the better of two."""
    import torch

    from lockstep.device.select import select
    from report import machine

    torch.set_num_threads(1)
    record = {"machine": machine(select("cpu"))}
    record["updates"] = [measured_update(sizes, *work) for sizes, work in CPU_UPDATES]
    record["generation"] = [measured_generation(CPU_UPDATES[place][0], *work) for place, work in CPU_GENERATION]
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    return record


def measured_update(sizes: dict[str, int], count: int, length: int, tokens: int) -> float:
    import torch

    from lockstep.data.batching import micro_batch
    from lockstep.device.select import select
    from lockstep.methods.sft import token_loss
    from lockstep.model.load import load_policy
    from lockstep.parallel.world import World
    from lockstep.train.optim import Optimizer
    from lockstep.train.step import Learner
    from lockstep.types import Example, Origin

    device = select("cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(cpu_config(sizes)).save_pretrained(folder)
        recipe = recipe_of({"method": "sft", "model": {"path": folder, "dtype": "fp32"}, "batch": {"tokens": tokens}})
        policy = load_policy(recipe.model, device.torch_device(), device.attention, seed=0)
    optimizer = Optimizer(policy.trainable(), recipe.optim, masters=False, fused=True, kernel=device.adamw)
    learner = Learner(policy, optimizer, device.torch_device(), World())
    ids = torch.randint(sizes["vocabulary"], (count, length)).tolist()
    rows = [Example(row, [1] * length, Origin("random", number)) for number, row in enumerate(ids)]
    each = tokens // length
    batches = [micro_batch(rows[at : at + each], packed=True, pad_id=0) for at in range(0, count, each)]
    found = []
    for _ in range(2):
        began = time.process_time()
        learner.forward_backward(batches, token_loss)
        learner.optim_step(1e-5)
        found.append(time.process_time() - began)
    return min(found)


def measured_generation(sizes: dict[str, int], prompts: int, n: int, prompt: int, response: int) -> float:
    import torch

    from lockstep.device.select import select
    from lockstep.model.load import load_policy
    from lockstep.rollout.native.native_engine import NativeEngine
    from lockstep.types import Request, Sampling

    device = select("cpu")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(cpu_config(sizes)).save_pretrained(folder)
        recipe = recipe_of({"method": "grpo", "model": {"path": folder, "dtype": "fp32"}})
        policy = load_policy(recipe.model, device.torch_device(), device.attention, seed=0)
    engine = NativeEngine(policy, device, recipe.rollout, lambda ids: "")
    ids = torch.randint(sizes["vocabulary"], (prompts, prompt)).tolist()
    requests = [Request(row, number, n) for number, row in enumerate(ids)]
    found = []
    for _ in range(2):
        began = time.process_time()
        list(engine.generate(requests, Sampling(response, seed=0)))
        found.append(time.process_time() - began)
    return min(found)


def predictions() -> list[Prediction]:
    cluster = cluster_named("1x1:h200")
    fine_tuning = [*sft_rows(cluster), *fine_tuning_rows(cluster), *long_rows(cluster)]
    ours = [*engine_rows(cluster), *fine_tuning, *grpo_rows(cluster), *cpu_rows(), *scale_rows()]
    return [*ours, *published_rows(), *trainer_rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="OUT", help="measure the rows of the CPU on this machine")
    parser.add_argument("--out", type=Path, metavar="OUT", help="write all rows")
    args = parser.parse_args()
    if args.measure:
        args.measure.write_text(json.dumps(measure_cpu(), indent=1) + "\n", encoding="utf-8")
    rows = predictions()
    print(f"{'':64} {'predicted':>10} {'measured':>10}")
    for prediction in rows:
        print(prediction.line())
    errors = errors_by_chip(rows)
    for chip, (least, most) in errors.items():
        print(f"published times of {chip}: error {least:+} to {most:+} %")
    if args.out:
        record = {"rows": [asdict(row) | {"error": round(row.error, 4)} for row in rows], "errors_by_device": errors}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
