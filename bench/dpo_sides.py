"""The sides of `bench/dpo.py`: the same pairs through lockstep and TRL's DPOTrainer.

Each side holds its own copy of the policy (and of the frozen reference, or of what it said) and trains on;
`train_pass` takes every pair once and says how long it took. TRL's `first_updates` trains some updates from the fresh
weights and says what each of them was; `replay` trains the same pairs by ours, for the caller to hold against them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PrinterCallback

from lockstep.methods import METHODS
from lockstep.parallel.world import World
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Recipe
from lockstep.train.logprob_cache import Columns, LogprobCache, Shape, fingerprint, open_cache
from lockstep.train.models import Models, Packing, build_learner, load_reference
from lockstep.types import Example, Item, Origin, Ranking
from sides import Seconds, Stopwatch, Terms, make_clock, train_watched, trainer_settings

# `per_device_train_batch_size` where nobody sets it.
TRL_BATCH = 8


class Pair(NamedTuple):
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def tokens(self) -> int:
        """Of both sequences, each with its prompt."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class Work(Terms):
    """`rows` pairs of the pool make an update."""

    pool: list[Pair]
    beta: float

    @property
    def longest(self) -> int:
        return max(pair.longest for pair in self.pool)


@dataclass(frozen=True)
class Update:
    """One update as a side computed it: mean loss over its pairs, gradient norm, and the pairs."""

    loss: float
    norm: float
    pairs: list[Pair]


class Ours:
    """lockstep: the parts of the offline loop, metrics included; pairs packed, what they share written once."""

    def __init__(self, work: Work, *, precomputed: bool):
        self.work, self.precomputed = work, precomputed
        self.name = "lockstep" + " precomputed" * precomputed
        self.recipe = _recipe(work, precompute=precomputed)
        world, torch_device = World(), work.device.torch_device()
        self.learner = build_learner(self.recipe, work.device, world, torch_device)
        reference = load_reference(self.recipe, work.device, world, torch_device)
        self.items = [_ranking(pair, number) for number, pair in enumerate(work.pool)]
        self.folder = tempfile.TemporaryDirectory()
        packing, longest = Packing(world, work.tokens, None, pad_id=0), work.longest
        self.models = Models(
            self.learner.module, packing, torch_device, self.learner, reference=reference, longest=longest
        )
        if precomputed:
            self.models.cache = self._cache()
            self.models.reference = None
        self.objective = METHODS["dpo"].objective(self.recipe)
        said = "from a log-prob cache on disk" if precomputed else "run beside the policy"
        self.about = f"packed to {work.tokens} tokens a micro-batch, prompts once a pair, reference {said}"

    def train_pass(self) -> Seconds:
        watch = Stopwatch(self.work.device)
        for start in range(0, len(self.items), self.work.rows):
            self._step(self.items[start : start + self.work.rows])
        return watch.read()

    def replay(self, updates: Sequence[Update]) -> list[Update]:
        """Train on the pairs of another side's updates."""
        known = {_key(pair): item for pair, item in zip(self.work.pool, self.items, strict=True)}
        steps = [self._step([known[_key(pair)] for pair in update.pairs]) for update in updates]
        return [Update(loss, norm, update.pairs) for (loss, norm), update in zip(steps, updates, strict=True)]

    def _step(self, items: Sequence[Ranking]) -> tuple[float, float]:
        """Loss and gradient norm of a step of `train_offline`, in the same order."""
        task = self.objective.task(self.models.arrange(items), self.models)
        outcome = self.learner.forward_backward(task.batches, task.loss, task.divisor)
        self.objective.report(outcome.sums, task.divisor)
        metrics = self.learner.optim_step(self.work.optim.lr)
        return outcome.loss, metrics["train/grad_norm"]

    def _cache(self) -> LogprobCache:
        examples = [example for item in self.items for example in item.examples]

        def compute(some: Sequence[Item]) -> Columns:
            return {"logprobs": self.models.reference_logprobs(self.models.arrange(some))}

        identity = fingerprint(self.work.model, examples, {"dtype": self.work.dtype})
        shapes = {"logprobs": Shape("float32")}
        parent = Path(self.folder.name)
        world = self.models.world
        return open_cache(parent, "reference", identity, shapes, self.items, compute, world, lambda rows: None)


class Trl:
    """TRL's DPOTrainer on the same token ids, driven by its own `train()`.

    Its sampler, collator, callbacks and metrics are in the time; its set-up and, when `precomputed`, the reference's
    pass over the pairs are not. `variant` is one of its own settings: `padded` (pairs in order, as many as fit the
    budget), `grouped` (the same with `train_sampling_strategy="group_by_length"`), `eight` (8 pairs, which is the
    trainer's default, whatever they take) or `single` (a pair a micro-batch). `padding_free` is switched off in the
    trainer itself, and `batch_rebalance` weighs pairs by the size of their micro-batch: another update than ours.
    """

    def __init__(self, work: Work, variant: str, *, precomputed: bool):
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        class Tokenized(DPOTrainer):
            """Takes token ids as they are, so that no tokenizer comes between the sides."""

            def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
                return dataset

        self.work, self.variant, self.precomputed = work, variant, precomputed
        self.name = f"TRL {variant}" + " precomputed" * precomputed
        self.folder = tempfile.TemporaryDirectory()
        fixed = {"single": 1, "eight": min(TRL_BATCH, work.rows)}
        at_once = fixed.get(variant) or work.rows_within(2 * work.longest)
        if work.rows % at_once:
            raise SystemExit(f"--rows {work.rows} is not a multiple of {at_once}, which {self.name} takes at once")
        columns = {f"{part}_ids": [getattr(pair, part) for pair in work.pool] for part in Pair._fields}
        pairs = Dataset.from_dict({**columns, "length": [pair.longest for pair in work.pool]})
        config = DPOConfig(
            output_dir=self.folder.name,
            train_sampling_strategy="group_by_length" if variant == "grouped" else "sequential",
            beta=work.beta,
            loss_type="sigmoid",
            max_length=None,
            remove_unused_columns=variant != "grouped",  # the sampler reads the lengths from a column
            precompute_ref_log_probs=precomputed,
            **trainer_settings(work, at_once),
        )
        self.clock = make_clock(work.device)
        self.trainer = Tokenized(
            model=work.their_model("sdpa"),
            args=config,
            train_dataset=pairs,
            processing_class=AutoTokenizer.from_pretrained(work.model),
            callbacks=[self.clock],
        )
        self.trainer.remove_callback(PrinterCallback)
        order = "pairs of like length together" if variant == "grouped" else "pairs in order"
        said = "precomputed" if precomputed else "run beside the policy"
        self.about = f"right-padded, {at_once} pairs a micro-batch, {order}, reference {said}, sdpa"

    def train_pass(self) -> Seconds:
        self.trainer.train()
        return self.clock.seconds

    def first_updates(self, count: int) -> list[Update]:
        return [
            Update(seen.loss, seen.norm, [_pair(example) for example in seen.examples])
            for seen in train_watched(self.trainer, count)
        ]


Side = Ours | Trl

VARIANTS = ("padded", "grouped", "eight", "single")
SIDES: dict[str, Callable[[Work], Side]] = {
    "lockstep": partial(Ours, precomputed=False),
    **{f"trl-{name}": partial(Trl, variant=name, precomputed=False) for name in VARIANTS},
    "lockstep-precomputed": partial(Ours, precomputed=True),
    **{f"trl-{name}-precomputed": partial(Trl, variant=name, precomputed=True) for name in VARIANTS},
}


def sides_for(case: str) -> list[str]:
    """The sides of a case. Without padding `grouped` is `padded`; the slow settings run beside the reference alone."""
    chosen = ("padded",) if case == "equal" else VARIANTS
    peers = [f"trl-{name}" for name in chosen]
    precomputed = [f"trl-{name}-precomputed" for name in chosen if name in ("padded", "grouped")]
    return ["lockstep", *peers, "lockstep-precomputed", *precomputed]


def ours_for(name: str) -> str:
    """The side of ours that a side is compared with: both run the reference, or both have precomputed it."""
    return "lockstep-precomputed" if name.endswith("-precomputed") else "lockstep"


def _recipe(work: Work, *, precompute: bool) -> Recipe:
    values = {
        "method": "dpo",
        "device": work.device.name,
        "model": {"path": work.model, "dtype": work.dtype, "master_weights": work.masters},
        "data": {"train": "pairs.jsonl"},  # named because a recipe must; the pairs are given as tokens
        "batch": {"rows_per_update": work.rows, "tokens": work.tokens},
        "optim": work.optim.model_dump(),
        "preference": {"loss": "sigmoid", "beta": work.beta, "precompute": precompute},
    }
    return with_derived_defaults(Recipe.model_validate(with_method_defaults(values)))


def _ranking(pair: Pair, number: int) -> Ranking:
    def example(response: list[int]) -> Example:
        return Example(pair.prompt + response, [0] * len(pair.prompt) + [1] * len(response), Origin("pairs", number))

    return Ranking((example(pair.chosen), example(pair.rejected)))


def _pair(example: dict[str, Any]) -> Pair:
    return Pair(*(list(example[f"{part}_ids"]) for part in Pair._fields))


def _key(pair: Pair) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(part) for part in pair)
