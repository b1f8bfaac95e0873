"""Packing, micro-batches, ranks, layouts, engines, resume and offload change no result, for random recipes.

Each recipe of `recipes.py` is trained once as reference: one process, one row per micro-batch, no packing, no offload,
uninterrupted. Each variation of `variations.py` must then give the same metrics of every step, the same responses and
the same final weights. A failure prints the recipe and the command that repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from recipes import AGGREGATIONS, FAMILIES, METHODS, PAIR_LOSSES, Drawn, draw
from variations import (
    VARIATIONS,
    applicable,
    compared,
    difference,
    run_variation,
    start_from_first_checkpoint,
    train,
)

import job_ranks
from commands import torchrun
from conftest import run as command
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ESTIMATORS, LOSSES, loss_row
from runs import facts, samples

DAILY = (0, 1, 8, 11, 12, 17, 20, 27, 38, 58)
RANKED = (0, 1, 8, 12)
"""The daily recipes that several processes train too."""
# Processes, variations per recipe, and recipes per variation.
ALONE_DAILY, RANKS_DAILY = (1, 2, 2), (2, 3, 1)
SEEDS = range(200)
# What a method family shares: rows, losses and the parts of a step.
METHOD_FAMILIES = {
    "supervised": ("sft", "distill"),
    "pairs": ("dpo", "ipo", "simpo", "orpo", "cpo"),
    "labels": ("kto", "prm"),
    "ranking": ("rm",),
    "critic": ("ppo",),
    "groups": ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "dapo"),
    "sequence ratio": ("gspo", "cispo"),
    "single responses": ("reinforce", "reinforce_pp", "remax", "on_policy_distill"),
}


def rotated(names: Sequence[str], seed: int, count: int) -> list[str]:
    """`count` of them, others for the next seed."""
    first = (seed * count + seed // len(METHODS)) % max(1, len(names))
    return [*names[first:], *names[:first]][:count]


@cache
def daily_plan(seeds: Sequence[int], processes: int, most: int, times: int) -> dict[int, list[str]]:
    """At most `most` variations of each daily recipe, each at most `times`: rare ones and those used least first."""
    options = {}
    with TemporaryDirectory() as folder:
        for seed in seeds:
            file = Path(folder) / f"{seed}.yaml"
            file.write_text(draw(seed).yaml(Path(folder)), encoding="utf-8")
            options[seed] = list(applicable(draw(seed), file, [processes]))
    frequency = Counter(name for names in options.values() for name in names)
    used: Counter[str] = Counter()
    plan: dict[int, list[str]] = {}
    for seed, names in options.items():
        left = [name for name in names if used[name] < times]
        plan[seed] = sorted(left, key=lambda name: (used[name], frequency[name]))[:most]
        used.update(plan[seed])
    return plan


def explained(drawn: Drawn, failures: dict[str, str], file: Path) -> str:
    """The failures of a recipe, the recipe, and how to repeat them."""
    lines = [f"recipe {drawn.seed} ({drawn.method}, {drawn.family}) depends on what must not matter:"]
    for name, why in failures.items():
        words = " ".join(VARIATIONS[name].words(load_recipe(str(file), []), drawn) or [])
        start = (
            "lockstep train"
            if VARIATIONS[name].processes == 1
            else f"torchrun --nproc-per-node {VARIATIONS[name].processes} -m lockstep train"
        )
        lines += [f"  {name}: {why}", f"    {start} FOLDER/recipe.yaml {words}"]
    lines += [
        "The reference, with its models and rows:",
        f"    PYTHONPATH=tests:tests/support python tests/invariance/recipes.py {drawn.seed} FOLDER",
        "    lockstep train FOLDER/recipe.yaml",
        "",
        drawn.yaml(Path("FOLDER")),
    ]
    return "\n".join(lines)


def trained(drawn: Drawn, folder: Path) -> Path:
    """The recipe file beside the reference run, which has trained something."""
    file = drawn.write(folder)
    assert moves(drawn, folder, file), "nothing moved, so nothing is compared"
    return file


def drawn_and_trained(seed: int, folder: Path) -> tuple[Drawn, Path]:
    """The first of a few recipes of a seed whose rewards differ, so that its reference run trains something."""
    for attempt in range(4):
        drawn = draw(seed + 1000 * attempt * len(METHODS))
        file = drawn.write(folder / str(attempt))
        if moves(drawn, file.parent, file):
            return drawn, file
    raise AssertionError("nothing moved in four recipes")


def moves(drawn: Drawn, folder: Path, file: Path) -> bool:
    """Train the reference run; returns whether a gradient of a step with a learning rate is not 0."""
    train(file)
    steps = [metrics for step, metrics in facts(folder / "runs" / "reference") if step]
    assert len(steps) == drawn.steps
    moved = [
        value
        for metrics in steps
        for name, value in metrics.items()
        if name.endswith("/grad_norm") and metrics[name.replace("grad_norm", "lr")] > 0
    ]
    return max(moved) > 1e-3


def check_alone(drawn: Drawn, file: Path, names: Sequence[str]) -> dict[str, str]:
    """Run variations of one process; returns the failures."""
    known = applicable(drawn, file, [1])
    for name in names:
        run_variation(file, *known[name])
    return compared(drawn, file, names)


def check_ranks(
    files: dict[int, Path], plan: dict[int, list[str]], processes: int, folder: Path
) -> dict[int, dict[str, str]]:
    """Run variations of several processes, all of them in one start of the ranks; returns the failures."""
    jobs = []
    for seed, names in plan.items():
        known = applicable(draw(seed), files[seed], [processes])
        for name in names:
            variation, words = known[name]
            if variation.resumes:
                start_from_first_checkpoint(files[seed].parent / "runs", name)
            jobs.append([str(files[seed]), *words])
    done = torchrun(job_ranks.write_jobs(folder, jobs), program=job_ranks.PROGRAM, processes=processes)
    assert done.returncode == 0, done.stderr
    return {seed: compared(draw(seed), files[seed], names) for seed, names in plan.items()}


@pytest.mark.daily("0", "11", "20", "58")
@pytest.mark.parametrize("seed", DAILY)
def test_a_recipe_keeps_its_trajectory(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    names = daily_plan(DAILY, *ALONE_DAILY)[seed]
    file = trained(drawn, tmp_path / "recipe")
    failures = check_alone(drawn, file, names)
    assert not failures, explained(drawn, failures, file)


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_keep_the_trajectory_of_one(tmp_path: Path) -> None:
    plan = daily_plan(RANKED, *RANKS_DAILY)
    files = {seed: trained(draw(seed), tmp_path / str(seed)) for seed in RANKED}
    failures = check_ranks(files, plan, 2, tmp_path)
    assert not any(failures.values()), "\n".join(
        explained(draw(seed), found, files[seed]) for seed, found in failures.items() if found
    )


def test_the_daily_recipes_cover_every_family_and_every_variation() -> None:
    methods = [draw(seed).method for seed in DAILY]
    for family, members in METHOD_FAMILIES.items():
        assert set(members) & set(methods), family
    assert {draw(seed).family for seed in DAILY} == set(FAMILIES)
    assert {bool(draw(seed).get("model.lora")) for seed in DAILY} == {True, False}
    alone, ranks = daily_plan(DAILY, *ALONE_DAILY), daily_plan(RANKED, *RANKS_DAILY)
    used = Counter(name for plan in (alone, ranks) for names in plan.values() for name in names)
    assert set(used) == {name for name, one in VARIATIONS.items() if one.processes <= 2}
    # Responses of an engine are compared with several methods, and packing with every kind of row.
    assert min(used["hf"], used["packed-small"] + used["packed-all"], used["rows-3"] + used["rows-all"]) >= 2


def test_every_method_has_a_family() -> None:
    assert sorted(name for members in METHOD_FAMILIES.values() for name in members) == sorted(METHODS)


OPTIONS = (
    "model.lora",
    "model.lora.dropout",
    "model.aux_loss_coef",
    "optim.clip",
    "preference.reference",
    "preference.ld_alpha",
    "distill.top_k",
    "algorithm.dynamic_sampling.max_gen_batches",
    "algorithm.overlong.mask_truncated",
    "algorithm.overlong.truncated_reward",
    "algorithm.pf_ppo.method",
    "algorithm.rollout_correction",
    "algorithm.epochs",
    "rollout.truncated_sampling",
    "reward.model",
    "val.questions",
)


def test_the_seeds_cover_methods_losses_and_options() -> None:
    every = [draw(seed) for seed in SEEDS]

    def seen(key: str) -> set[object]:
        return {
            value if not isinstance(value, (list, dict)) else str(value)
            for one in every
            if (value := one.get(key)) is not None
        }

    assert seen("method") == set(METHODS)
    assert {one.family for one in every} == set(FAMILIES)
    assert seen("algorithm.advantage") >= {name for name, row in ESTIMATORS.items() if row.groups}
    assert seen("algorithm.loss") == set(LOSSES)
    assert seen("preference.loss") == set(PAIR_LOSSES)
    assert seen("algorithm.aggregation") == set(AGGREGATIONS)
    assert seen("algorithm.kl.where") == {"none", "loss", "reward"}
    assert seen("algorithm.kl.estimator") == {"k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"}
    assert seen("optim.schedule") == {"cosine", "linear", "constant", "wsd"}
    assert seen("rm.ranking") == {"pairs", "plackett_luce"}
    assert seen("distill.divergence") == {"forward", "reverse", "jsd"}
    assert {one.ranked for one in every} == {True, False}
    for key in OPTIONS:
        assert seen(key), key
    several = [
        one
        for one in every
        if one.get("batch.prompts_per_update", one.get("batch.prompts")) != one.get("batch.prompts")
    ]
    assert several
    assert all(
        loss_row(one.get("algorithm.loss") or ONLINE[one.method]["algorithm"].get("loss", "clip")).ratio
        for one in several
    )


def test_a_printed_recipe_repeats_the_reference(tmp_path: Path) -> None:
    """With `lockstep train`, from the YAML alone."""
    drawn = draw(20)
    file = trained(drawn, tmp_path / "first")
    drawn.write(tmp_path / "second")
    shown = explained(drawn, {"rows-3": "why"}, file)
    again = tmp_path / "second" / "again.yaml"
    again.write_text(shown[shown.index("method:") :].replace("FOLDER", str(again.parent)), encoding="utf-8")
    assert yaml.safe_load(again.read_text())["method"] == drawn.method
    assert command("train", again) == 0
    first, second = (tmp_path / name / "runs" / "reference" for name in ("first", "second"))
    assert difference(second, first, "bits", drawn.steps) == ""
    assert samples(second)
    assert "lockstep train FOLDER/recipe.yaml run.name=rows-3 batch.micro_batch_size=3" in shown


# In the slow set each recipe has every variation of one process, three of two and one of three or four.
SLOW_RANKS: dict[int, tuple[Sequence[int], int]] = {2: ([2], 3), 4: ([3, 4], 1)}


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("seed", SEEDS)
def test_any_recipe_keeps_its_trajectory(seed: int, tmp_path: Path) -> None:
    drawn, file = drawn_and_trained(seed, tmp_path / "recipe")
    failures = check_alone(drawn, file, list(applicable(drawn, file, [1])))
    for sizes, count in SLOW_RANKS.values():
        for name in rotated(list(applicable(drawn, file, sizes)), seed, count):
            failures |= check_ranks({seed: file}, {seed: [name]}, VARIATIONS[name].processes, tmp_path)[seed]
    assert not failures, explained(drawn, failures, file)


@pytest.mark.slow
def test_the_slow_set_covers_every_variation_of_every_family(tmp_path: Path) -> None:
    used: dict[str, set[str]] = {name: set() for name in VARIATIONS}
    families = {method: family for family, members in METHOD_FAMILIES.items() for method in members}
    for seed in SEEDS:
        drawn, file = draw(seed), tmp_path / "recipe.yaml"
        file.write_text(drawn.yaml(tmp_path), encoding="utf-8")
        chosen = list(applicable(drawn, file, [1]))
        for sizes, count in SLOW_RANKS.values():
            chosen += rotated(list(applicable(drawn, file, sizes)), seed, count)
        for name in chosen:
            used[name].add(families[drawn.method])
    everything = set(METHOD_FAMILIES)
    online = {families[method] for method in ONLINE}
    expected = {
        **dict.fromkeys(VARIATIONS, everything),
        **dict.fromkeys(("hf", "engine-blocks", "reward-workers"), online),
        "precomputed": {"pairs"},
        "frozen-host": everything - {"ranking"},
    }
    few = {name for name, one in VARIATIONS.items() if one.processes <= 2}
    assert {name: sorted(expected[name] - used[name]) for name in few if expected[name] - used[name]} == {}
    assert all(len(found) >= 5 for name, found in used.items() if name not in few), used
