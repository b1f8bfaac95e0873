"""What each rank of test_spread.py does: responses that are spread over the ranks, against the same step in one place.

Started by torchrun with a folder, into which every rank writes how many bytes of the step it holds. Every rank adds
the same number of prompts to the step. A rank that finds a difference ends with an error.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hand_rollouts import FAILED, plans_of, question, recipe_of
from lockstep.algorithms.advantage import ESTIMATORS
from lockstep.algorithms.reduce import AGGREGATIONS, aggregation_weights
from lockstep.device.cpu import Cpu
from lockstep.parallel.world import World, joined, with_context
from lockstep.recipe import Recipe
from lockstep.rollout.collect import Shares
from lockstep.train.advantages import Advantages, TrainBatch, estimate_advantages
from lockstep.train.experience import (
    Experience,
    ModelOutputs,
    build_experience,
    build_spread_experience,
    pack_minibatches,
    plan_updates,
    redistribute,
    rollout_metas,
)
from lockstep.train.models import Models, Packing
from lockstep.train.update_terms import select_tokens
from lockstep.trajectory import Trajectory, TrajectoryRow, TurnRecord
from lockstep.types import Prompt, Rollout, Score
from object_sizes import sizes_of

EACH, SAMPLES = 8, 4
# Sums of float64 in another order, then rounded to float32.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7}


def answered(index: int, draw: random.Random) -> list[Rollout]:
    """Responses to one prompt; one in twelve could not be scored, one in five met the limit."""
    prompt = Prompt(question(index), [draw.randrange(50) for _ in range(draw.randrange(3, 9))])
    return [
        Rollout(
            prompt,
            index,
            sample,
            ids=(ids := [draw.randrange(50) for _ in range(draw.randrange(40, 80))]),
            logprobs=[-draw.random() for _ in ids],
            stop="length" if draw.random() < 1 / 5 else "token",
            text="",
            score=FAILED
            if draw.random() < 1 / 12
            else Score(float(draw.randrange(3)), {"rule": float(draw.randrange(2)), "style": draw.random()}),
            token_rewards=((3, 0.25),),
        )
        for sample in range(SAMPLES)
    ]


def step(prompts: int, times: int = 1) -> list[Rollout]:
    """`times`: by how much the responses are longer."""
    found = [rollout for index in range(prompts) for rollout in answered(index, random.Random(index))]
    repeated = [(one, one.ids * times, one.logprobs * times) for one in found]
    return [in_rows(replace(one, ids=ids, logprobs=logprobs, loss_mask=())) for one, ids, logprobs in repeated]


def in_rows(one: Rollout) -> Rollout:
    """Every third response is a trajectory of three turns in two rows; the second row begins with masked history."""
    if (one.prompt_index + one.sample) % 3:
        return one
    half, size = len(one.ids) // 2, len(one.ids)
    turns = [
        TurnRecord(0, 12, anchor="start"),
        TurnRecord(15, half, anchor=f"state {one.sample % 2}"),
        TurnRecord(half + 5, size),
    ]
    mask = [int(any(turn.start <= i < turn.stop for turn in turns)) for i in range(size)]
    spans = slice(0, half), slice(half, size)
    rows = tuple(TrajectoryRow(one.ids[at], mask[at], one.logprobs[at]) for at in spans)
    trajectory = Trajectory([], turns, "completed")
    return replace(one, loss_mask=mask, rows=rows, trajectory=trajectory)


def spread(every: list[Rollout], world: World, models: Models, recipe: Recipe) -> tuple[Experience, list[Any]]:
    """As a run does it: a rank has what it generated, all are told of it, and what is trained elsewhere goes there."""
    prompts = {rollout.prompt_index: rollout.prompt for rollout in every}
    own = [rollout for rollout in every if rollout.prompt_index % world.size == world.rank]
    summaries = sorted(
        (one for share in world.gather(rollout_metas(own)) for one in share),
        key=lambda one: (one.prompt_index, one.sample),
    )
    assert summaries == rollout_metas(every)
    generated = build_spread_experience(summaries, prompts, own, None, world)
    updates = pack_minibatches(generated, models, recipe.batch)
    experience = redistribute(generated, updates, world)
    return experience, plan_updates(experience, updates, models)


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert abs(found[name] - value) <= 1e-9 * max(1.0, abs(value)), f"{name}: {found[name]} and not {value}"


def vectors(experience: Experience) -> dict[str, torch.Tensor]:
    """Something for each token that depends on the token alone, wherever it is."""
    base = experience.rollout_logprobs_K
    return {
        "old_K": base + 0.4 * torch.sin(50 * base),
        "reference_K": base - 0.1,
        "values_K": torch.cos(9 * base),
        "squares_K": 0.5 + 0.4 * torch.cos(7 * base),
    }


# What looks at the whole step besides the estimator: weights by their mean, what is left out, how often it counts.
KEYS: tuple[dict[str, Any], ...] = (
    {
        "rollout_correction": {"weight": "sequence", "mask": "token"},
        "kl__before_baseline": False,
        "whiten__over": "step",
    },
    {
        "rollout_correction": {
            "weight": "token",
            "normalize": True,
            "floor": 0.7,
            "reject": [{"over": "max", "by": "k3", "high": 0.1}],
            "rejected": "zero",
        },
        "overlong__mask_truncated": True,
        "pf_ppo__method": "pow",
    },
    {
        "rollout_correction": {"weight": "sequence", "normalize": True},
        "pf_ppo__method": "max_random",
        "turn_discount": 0.7,
    },
    {
        "rollout_correction": {
            "weight": "geometric_mean",
            "floor": 0.8,
            "outside": "zero",
            "normalize": True,
            "reject": [{"over": "token", "by": "k3", "high": 0.05}],
            "rejected": "counted",
            "mask_first": True,
        },
    },
)


def check_numbers(world: World, user_function: str) -> None:
    prompts = EACH * world.size
    every, whole = step(prompts), build_experience(step(prompts))
    for batch in ({"batch__tokens": 400}, {"batch__micro_batch_size": 3}):
        recipe = recipe_of(batch__prompts=prompts, batch__prompts_per_update=prompts // 2, **batch)
        models = Models(torch.nn.Identity(), Packing.of(recipe, world, 0), torch.device("cpu"))
        here, plans = spread(every, world, models, recipe)
        shares = world.gather(here.local_numbers)
        assert sorted(n for share in {tuple(share) for share in shares} for n in share) == list(range(whole.sequences))
        assert [whole.rollouts[n] for n in here.local_numbers] == here.rollouts
        wanted = plans_of(whole, models, recipe.batch)
        for ours, theirs in zip(plans, wanted, strict=True):
            assert len(ours.batches) == len(theirs.batches) > 0
            for one, other in zip(ours.batches, theirs.batches, strict=True):
                assert torch.equal(one.input_ids_NT, other.input_ids_NT)
                assert torch.equal(one.index_K, other.index_K)
                assert torch.equal(
                    here.rollout_logprobs_K[ours.tokens][one.vector_index_K],
                    whole.rollout_logprobs_K[theirs.tokens][one.index_K],
                )
    own_K = here.local_positions(slice(0, whole.sequences))
    known, every_known = ModelOutputs(**vectors(here)), ModelOutputs(**vectors(whole))
    for name in (*ESTIMATORS, user_function):
        some, full = here, whole
        if name == "remax":
            some, full = (replace(one, baseline_S=torch.arange(whole.sequences) / 9) for one in (here, whole))
        for keys in KEYS:
            recipe = estimating(name, keys)
            found, told = (
                estimate_advantages(one, said, recipe, 0.1) for one, said in ((some, known), (full, every_known))
            )
            for vector in ("rewards_K", "advantages_K", "returns_K", "keep_K", "is_weights_K"):
                torch.testing.assert_close(getattr(found, vector), getattr(told, vector)[own_K], **CLOSE)
            same(found.metrics, told.metrics)
            check_weights(here, found, whole, told, own_K)
    for loss in ("clip_cov", "kl_cov"):
        recipe = recipe_of(algorithm__loss=loss, algorithm__cov_ratio=0.1, algorithm__cov_low=0.0)
        for ours, theirs in zip(plans, wanted, strict=True):
            held = select_tokens(recipe.algorithm, TrainBatch(here, known, found), ours, (1,))
            one_place = select_tokens(recipe.algorithm, TrainBatch(whole, every_known, told), theirs, (1,))
            assert held is not None
            assert one_place is not None
            assert one_place.sum() > 3
            assert torch.equal(held, one_place[here.local_positions(ours.responses)])


def estimating(name: str, keys: dict[str, Any]) -> Recipe:
    """`gdpo` refuses a divergence in the reward."""
    gdpo: dict[str, Any] = {"gdpo_rewards": {"rule": 1.0, "style": 0.3}}
    given = {"advantage": name, **keys, **(gdpo if name == "gdpo" else {"kl__where": "reward"})}
    if name == "gdpo":
        given.pop("kl__before_baseline", None)
    if name not in ESTIMATORS and "mask_first" in given["rollout_correction"]:  # a function gets every token
        given["rollout_correction"] = {**given["rollout_correction"], "mask_first": False}
    if name in ("gdpo", "remax"):  # these two do not support a discount between turns
        given.pop("turn_discount", None)
    rollout = {"rollout__n": 4, "rollout__environment": "game.py:Game"}
    return recipe_of(**rollout, **{f"algorithm__{key}": value for key, value in given.items()})


def check_weights(
    here: Experience, found: Advantages, whole: Experience, told: Advantages, own_K: torch.Tensor
) -> None:
    for kind in AGGREGATIONS:
        sequences, repeats_S = whole.sequences, told.repeats_S
        weights, divisor = aggregation_weights(
            kind, here.sequence_K, found.keep_K, sequences, 99, found.repeats_S, here.reduce, found.counts_masked
        )
        counts = {"repeats_S": repeats_S, "counts_masked": told.counts_masked}
        every, wanted = aggregation_weights(kind, whole.sequence_K, told.keep_K, sequences, 99, **counts)  # type: ignore[arg-type]
        assert divisor == wanted
        assert torch.equal(weights, every[own_K])


def held_bytes(world: World, folder: Path) -> None:
    """What a rank holds of the step when it trains, field by field; the same where responses are thrice as long."""
    prompts = EACH * world.size
    told = {}
    for name, times in (("short", 1), ("long", 3)):
        recipe = recipe_of(batch__prompts=prompts, batch__tokens=400 * times)
        models = Models(torch.nn.Identity(), Packing.of(recipe, world, 0), torch.device("cpu"))
        here, plans = spread(step(prompts, times), world, models, recipe)
        known = ModelOutputs(**vectors(here))
        learned = TrainBatch(here, known, estimate_advantages(here, known, estimating("grpo", KEYS[1]), 0.1))
        assert here.num_response_tokens_S is not None  # made when it is asked for, and kept
        # The responses last: what they have in common with another field, that field holds.
        told[name] = sizes_of(prompts=here.prompts, summaries=here.metas, plans=plans, learned=learned)
    (folder / f"{world.size}.{world.rank}.json").write_text(json.dumps(told))


def check_shares(world: World) -> None:
    """Every prompt is begun once, whoever is fast; rank 0, which is slow, loses some of its share to the others."""
    costs = [float(1 + index % 5) for index in range(12 * world.size)]
    for turn in range(3):
        *counters, _ = world.counters(world.size + 1)
        shares, begun = Shares(costs, world.rank, world.size, counters), []
        while some := shares.begin(2) or shares.help(2, idle=True):
            begun += some
            time.sleep(0.2 if world.rank == 0 else 0.001)
        told = world.gather((begun, shares.taken))
        assert sorted(index for found, _ in told for index in found) == list(range(len(costs))), turn
        assert sum(taken for _, taken in told) > 0
        assert len(told[0][0]) < 12


def check_context(world: World) -> None:
    """Ranks that divide their micro-batches have the same responses."""
    divided = with_context(world, Cpu(), 2, "zigzag")
    prompts = EACH * divided.dp_size
    recipe = recipe_of(batch__prompts=prompts, batch__tokens=400)
    models = Models(torch.nn.Identity(), Packing.of(recipe, divided, 0), torch.device("cpu"))
    here, _ = spread(step(prompts), divided, models, recipe)
    numbers = world.gather(here.local_numbers)
    assert all(list(numbers[rank]) == list(numbers[rank - 1]) for rank in range(1, world.size, 2))
    whole = build_experience(step(prompts))
    assert sorted(n for own in numbers[::2] for n in own) == list(range(whole.sequences))
    assert here.reduce.count(len(here.sequence_K)) == len(whole.sequence_K)
    assert torch.equal(here.all_gather(here.rollout_logprobs_K), whole.rollout_logprobs_K)
    assert here.all_rollouts() == whole.rollouts


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with joined(Cpu()) as here:
        held_bytes(here, folder)
        check_numbers(here, f"{folder}/own.py:advantage")
        check_shares(here)
        if here.size % 2 == 0:
            check_context(here)
