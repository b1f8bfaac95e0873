"""The online loop: the policy answers prompts, rewards judge the answers, updates follow. Every online method is this
loop with other keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lockstep.algorithms.kl import adapted
from lockstep.data.dataset import Loader
from lockstep.device.select import explain
from lockstep.parallel.world import World, joined
from lockstep.recipe import Recipe
from lockstep.reward.scorer import Scorer
from lockstep.run.folder import RunFolder
from lockstep.run.progress import Console
from lockstep.train.annotate import Annotated, annotate, plan_updates
from lockstep.train.experience import Experience
from lockstep.train.roles import Roles
from lockstep.train.script import Script
from lockstep.train.session import Session, opened
from lockstep.train.setup import PreparedOnline, prepare_online
from lockstep.train.signs import Signs
from lockstep.train.take import Taken, take_experience
from lockstep.train.update import update
from lockstep.types import Failure, Prompt


def train_online(recipe: Recipe, console: Console, script: Script | None = None) -> None:
    script = script or Script()
    device, sentence = explain(recipe.device)
    # Before the first tensor and the first collective: libraries read these switches once.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    with joined(device) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        prepared = prepare_online(recipe, device, world.size, console)
        sources = {*prepared.train.data_sources, *(question.data_source for question in prepared.questions)}
        place = device.torch_device(world.local_rank)
        folder = RunFolder(Path(recipe.run.folder) / recipe.run.name)
        with Scorer.open(recipe.reward, sorted(sources), place, output=folder.reward_output(world.rank)) as scorer:
            with console.task("Trying the rewards on real rows", None):
                tried = scorer.dry_run([*prepared.train.questions, *prepared.questions])
            for line in tried.lines:
                console.say(line)
            for warning in tried.warnings:
                console.warn(warning)
            with opened(prepared, device, world, console, switches, scorer, keeps=script.keeps) as session:
                _loop(recipe, prepared, session, scorer, world, script)


def _loop(
    recipe: Recipe, prepared: PreparedOnline, session: Session, scorer: Scorer, world: World, script: Script
) -> None:
    steps = prepared.batches.steps
    loader: Loader[Prompt] = Loader(
        prepared.train.sources,
        prepared.train.weights,
        rows_per_update=recipe.batch.prompts,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        total_rows=None,
    )
    roles = Roles(session.learner, session.reference, session.critic, world, session.torch_device)
    session.carried = {"position": 0.0, "kl_coefficient": recipe.algorithm.kl.coefficient, **session.carried}
    signs = Signs(recipe)

    session.validate_at_start()
    for step in script.steps(session.step, steps):
        script.restore(session, step)
        session.tape.begin(step + 1, session.carried)
        with session.step_phase():
            taken = script.taken(step, session, scorer, partial(take_experience, loader, session, scorer, recipe))
            experience, beta = taken.experience, session.carried["kl_coefficient"]
            session.tape.examples(experience.examples)
            parts = plan_updates(experience, recipe, world, prepared.pad_id)
            known = annotate(experience, parts, roles, recipe, beta, session.phases)
            session.tape.vectors(known.vectors)
            metrics = taken.metrics | known.metrics
            metrics |= update(parts, experience, known, roles, recipe, beta, step, steps, session.phases)
        session.carried["position"] = float(taken.position)
        metrics["training/epoch"] = taken.position / prepared.batches.rows
        session.carried["kl_coefficient"] = _next_coefficient(recipe, beta, metrics, experience)
        _store(session, step + 1, taken, known, recipe.log.samples)
        for warning in (*_failures(taken), *signs.read(metrics)):
            session.console.warn(warning)
        session.finish_step(step + 1, metrics)
        script.after(session, step)
    session.finish()


def _next_coefficient(recipe: Recipe, beta: float, metrics: dict[str, float], experience: Experience) -> float:
    kl = recipe.algorithm.kl
    if kl.where == "none":
        return beta
    metrics["actor/kl_coef"] = beta
    measured = metrics.get("actor/kl" if kl.where == "loss" else "actor/reward_kl_penalty")
    if kl.target is None or measured is None:  # a critic's warm-up does not look at the policy
        return beta
    return adapted(beta, measured, kl.target, kl.horizon, experience.sequences)


def _failures(taken: Taken) -> list[str]:
    """The first response of the step that could not be scored, with the reason."""
    if not taken.failed:
        return []
    first = taken.failed[0]
    assert isinstance(first.score, Failure)
    return [
        f"{len(taken.failed)} responses could not be scored and are left out; the first, to "
        f"{first.prompt.question.origin}: {first.score.part}: {first.score.told}; it said {first.text[:80]!r}"
    ]


def _store(session: Session, step: int, taken: Taken, known: Annotated, count: int) -> None:
    """Some responses of the step, and all that could not be scored (the first of them)."""
    experience = taken.experience
    first_tokens = [0, *(int(last) + 1 for last in experience.last_K[:-1])]
    chosen = experience.rollouts[:count]
    advantages = [float(known.advantages_K[first_tokens[i]]) for i in range(len(chosen))]
    session.store(step, "train", chosen, advantages)
    session.store(step, "failed", taken.failed[: max(count, 1)])
