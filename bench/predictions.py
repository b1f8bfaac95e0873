"""What `lockstep plan --cluster` predicts beside what was measured: the files of bench/results, and published times.

    python bench/predictions.py

Rows marked "fit" are those that the table of devices was fitted to (`lockstep/device/chips.py`); the others test it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from lockstep.recipe.checks import with_derived_defaults
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.schema import Recipe
from lockstep.train.cluster import Cluster, cluster_named
from lockstep.train.outlook import Outlook
from lockstep.train.step_time import PhaseTime
from lockstep.train.step_work import OnlineSteps, StepWork
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

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def line(self) -> str:
        numbers = f"{self.predicted:10,.3f} {self.measured:10,.3f} {self.unit:3} {self.error:+8.1%}"
        return f"{self.what:48} {numbers}{'  fit' if self.fitted else ''}"


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
    return sum(time.open for time in times)


def gigabytes(outlook: Outlook, cluster: Cluster) -> float:
    return max(phase.total for phase in outlook.phases(cluster)) / 1e9


def sft_rows(cluster: Cluster) -> Iterator[Prediction]:
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


def grpo_rows(cluster: Cluster) -> Iterator[Prediction]:
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
        for time, key in zip(times or [], ("gen", "ref", "update_actor"), strict=True):
            yield Prediction(f"{what}: {time.name}", time.open, phases[key])
        yield Prediction(f"{what}: step", seconds(times), case["sides"]["lockstep"]["seconds_per_step"]["median"])
        yield Prediction(what, gigabytes(outlook, cluster), case["efficiency"]["peak_gb"], "GB")


def engine_rows(cluster: Cluster) -> Iterator[Prediction]:
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


def published_rows() -> Iterator[Prediction]:
    """NeMo RL 0.5.0, GRPO of Llama 3.1 8B on 16 H100, 64 prompts x 32 responses, 1,019 tokens on average of at most
    4,096, 4 updates a step: 92.8 s. https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html. It says
    nothing of the prompts' length; 100 tokens are taken, as rows of OpenMathInstruct-2 have.
    """
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    recipe = recipe_of(
        {
            "method": "grpo",
            "model": {"gradient_checkpointing": True},
            "batch": {"prompts": 64, "prompts_per_update": 16, "tokens": 8192},
            "rollout": {"n": 32, "max_tokens": 3996, "max_sequences": 128},
        }
    )
    cluster = cluster_named("2x8:h100")
    equal = Outlook.of(recipe, config, OnlineSteps(100, 919, 100))
    yield Prediction("NeMo RL, 8B on 16 H100, all of mean length", seconds(equal.times(cluster)), 92.8)
    # The longest response ends the generation: 4,096 tokens, with ever fewer beside it.
    longest = Outlook.of(recipe, config, OnlineSteps(100, 3996, 100)).times(cluster)
    rest = [time for time in equal.times(cluster) or [] if time.name != "generate"]
    yield Prediction("  the same, a response of 4,096 in every batch", seconds([(longest or [])[0], *rest]), 92.8)


def predictions() -> list[Prediction]:
    cluster = cluster_named("1x1:h200")
    return [*engine_rows(cluster), *sft_rows(cluster), *grpo_rows(cluster), *published_rows()]


def main() -> None:
    print(f"{'':48} {'predicted':>10} {'measured':>10}")
    for prediction in predictions():
        print(prediction.line())


if __name__ == "__main__":
    main()
