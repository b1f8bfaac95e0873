"""The sides of `bench/grpo_step.py`: the same GRPO step by lockstep and by TRL's GRPOTrainer.

Each side holds its own copy of the model and trains on. `train_pass` takes some whole steps (responses, rewards,
log-probabilities, one update each) and says how long they took and how many response tokens there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reward
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Recipe
from lockstep.run.console import Console
from lockstep.train.online import open_online, train_step
from online_work import Work, make_trainer
from sides import Seconds, Stopwatch

# More steps than are ever taken: the last step of a run would validate and save.
ENDLESS = 10**6


@dataclass(frozen=True)
class Pass:
    seconds: Seconds
    lengths: list[int]


@dataclass(frozen=True)
class Step:
    """One step from the fresh weights: loss, gradient norm, mean reward, and the responses by prompt and sample."""

    loss: float
    norm: float
    reward: float
    prompts: list[list[int]]
    responses: list[list[int]]
    apart: float | None = None
    """Mean absolute difference of the engine's and the trainer's probabilities of the sampled tokens."""


class Ours:
    """lockstep: the parts of the online loop, metrics and their log included."""

    name = "lockstep"

    def __init__(self, work: Work, folder: Path, steps: int, recipe: Recipe | None = None):
        self.work, self.steps, self.step = work, steps, 0
        self.recipe = recipe or _recipe(work, folder)
        self.open = ExitStack()
        self.online = self.open.enter_context(open_online(self.recipe, Console.silent()))
        rollout = self.recipe.rollout
        self.about = (
            f"native engine, at most {rollout.max_sequences} at once, cache kept between steps; "
            f"packed to {work.tokens} tokens"
        )
        self.phases: dict[str, float] = {}
        self.whole = 0.0

    def train_pass(self) -> Pass:
        watch, lengths = Stopwatch(self.work.device), []
        for _ in range(self.steps):
            _, responses = self._step()
            lengths += [len(ids) for ids in responses]
        seconds = watch.read()
        self.whole += seconds.wall
        return Pass(seconds, lengths)

    def taken(self, steps: int) -> dict[str, float]:
        """Seconds a step by phase since the last `forget`. `between` is what lies outside of them: switching phases,
        packing, metrics and their log."""
        found = {name.removeprefix("timing_s/"): seconds / steps for name, seconds in self.phases.items()}
        del found["step"]
        return found | {"between": self.whole / steps - sum(found.values())}

    def forget(self) -> None:
        self.phases.clear()
        self.whole = 0.0

    def first_step(self) -> Step:
        metrics, responses = self._step()
        prompts = [list(prompt.ids) for prompt in self.online.loader.take(0) for _ in range(self.work.n)]
        return Step(
            metrics["actor/loss"],
            metrics["actor/grad_norm"],
            metrics["critic/score/mean"],
            prompts,
            responses,
            metrics["training/rollout_probs_diff_mean"],
        )

    def close(self) -> None:
        self.open.close()

    def _step(self) -> tuple[dict[str, float], list[list[int]]]:
        """A step of `train_online`."""
        training = self.online.training
        with training.step(self.step + 1):
            rollouts = self.online.take_rollouts()
            metrics = train_step(rollouts, self.online, self.step)
        self.step += 1
        timed = training.run.phases.take()
        for name, seconds in timed.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        training.run.metrics.append(self.step, metrics | timed)
        return metrics, [rollout.ids for rollout in rollouts.experience.rollouts]


class Trl:
    """TRL's GRPOTrainer, driven by its own `train()`, which is a pass; its set-up is not in the time."""

    def __init__(self, work: Work, folder: Path, steps: int, variant: str, make: Any = make_trainer):
        self.name = f"TRL {variant}"
        self.work, self.steps = work, steps
        self.clock = _clock(work)
        self.trainer = make(work, str(folder), variant, callbacks=[self.clock])
        self.lengths: list[int] = []
        self._count_lengths()
        args = self.trainer.args
        how = "use_transformers_continuous_batching=True" if variant == "continuous" else "generate"
        self.about = f"{how}, {args.generation_batch_size} at once; padded, {args.per_device_train_batch_size} rows a "
        self.about += "micro-batch, sdpa"

    def train_pass(self) -> Pass:
        self.lengths = []
        self.trainer.args.max_steps = self.steps
        self.trainer.train()
        return Pass(self.clock.seconds, self.lengths)

    def step_on(self, given: Step) -> Step:
        """One step from the weights as they are, on responses that were made elsewhere."""
        seen: list[Any] = []

        def replay(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
            here = slice(len(seen), len(seen) + len(prompts))
            seen.extend(self.trainer._tokenize_prompts(list(prompts))[0])
            return {"prompt_ids": given.prompts[here], "completion_ids": given.responses[here], "logprobs": None}

        self.trainer.rollout_func, self.trainer.args.max_steps = replay, 1
        self.trainer.train()
        self.trainer.rollout_func = None
        log = self.trainer.state.log_history[0]
        return Step(log["loss"], float(log["grad_norm"]), log["reward"], [list(ids) for ids in seen], given.responses)

    def close(self) -> None:
        """Nothing is held."""

    def _count_lengths(self) -> None:
        generate = self.trainer._generate_single_turn

        def counted(*args: Any, **kwargs: Any) -> Any:
            made = generate(*args, **kwargs)
            self.lengths += [len(ids) for ids in made[0]]
            return made

        self.trainer._generate_single_turn = counted


Side = Ours | Trl

SIDES: dict[str, Any] = {
    "lockstep": Ours,
    "trl-padded": lambda work, folder, steps: Trl(work, folder, steps, "padded"),
    "trl-parts": lambda work, folder, steps: Trl(work, folder, steps, "parts"),
    "trl-continuous": lambda work, folder, steps: Trl(work, folder, steps, "continuous"),
}


def _recipe(work: Work, folder: Path) -> Recipe:
    values = {
        "method": "grpo",
        "device": work.device.name,
        "run": {"name": "bench", "folder": str(folder), "steps": ENDLESS, "seed": work.seed}
        | {"deterministic": work.deterministic},
        "model": {"path": work.model, "dtype": work.dtype, "master_weights": work.masters},
        "data": {"train": work.questions, "shuffle": False},
        "batch": {"prompts": work.prompts, "tokens": work.tokens},
        "optim": work.optim.model_dump(),
        "rollout": {
            "n": work.n,
            "max_tokens": work.max_tokens,
            "free_cache": False,
            **({} if work.at_once is None else {"max_sequences": work.at_once}),
        },
        "reward": {"function": f"{reward.__file__}:vowels"},
        "algorithm": {
            "aggregation": "seq_mean_token_sum_norm",
            "kl": {"where": "loss" if work.beta else "none", "coefficient": work.beta},
        },
    }
    return with_derived_defaults(Recipe.model_validate(with_method_defaults(values)))


def _clock(work: Work) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """From before the first batch is fetched to the end of the last update."""

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.watch = Stopwatch(work.device)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.seconds = self.watch.read()

    return Clock()
