"""The offline loop: rows in, updates out. Every offline method is this loop with another row of `methods/`."""

from __future__ import annotations

from functools import partial

from lockstep.device.select import explain
from lockstep.methods import METHODS
from lockstep.parallel.world import World, joined
from lockstep.recipe import Recipe
from lockstep.reward.rule_judge import RuleJudge
from lockstep.run.progress import Console
from lockstep.train.consult import consulted
from lockstep.train.held_out import measure
from lockstep.train.identity import assert_identity
from lockstep.train.optim import learning_rate
from lockstep.train.plan import make_loader
from lockstep.train.script import Script
from lockstep.train.session import Session, opened
from lockstep.train.setup import Prepared, prepare


def train_offline(recipe: Recipe, console: Console, script: Script | None = None) -> None:
    script = script or Script()
    device, sentence = explain(recipe.device)
    # Before the first tensor and the first collective: libraries read these switches once.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    with joined(device) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        prepared = prepare(recipe, device, world.size, console)
        with opened(prepared, device, world, console, switches, RuleJudge(), keeps=script.keeps) as session:
            _loop(recipe, prepared, session, world, script)


def _loop(recipe: Recipe, prepared: Prepared, session: Session, world: World, script: Script) -> None:
    loader = make_loader(recipe, prepared.train)
    objective = METHODS[recipe.method].objective(recipe)
    models = consulted(session, prepared)
    learner, steps = session.learner, prepared.batches.steps
    if prepared.val is not None:
        rows, place = prepared.val.items, session.torch_device
        session.held_out = lambda: measure(learner.module, rows, objective, models, world, place)
    if session.step == 0:
        assert_identity(loader.take(0), objective, models, session)

    session.validate_at_start()
    for step in script.steps(session.step, steps):
        script.restore(session, step)
        session.tape.begin(step + 1, session.carried)
        with session.step_phase():
            items = script.items(step, partial(loader.take, step))
            session.tape.rows(items)
            models.references.clear()
            task = objective.task(models.arrange(items), models)
            session.tape.vectors({f"reference{number or ''}": said for number, said in enumerate(models.references)})
            outcome = learner.forward_backward(task.batches, task.loss, task.divisor)
            reported = objective.report(outcome.sums, task.divisor)
            metrics = {
                "train/loss": outcome.loss,
                **{f"train/{name}": value for name, value in reported.items()},
                "train/tokens": outcome.tokens,
                "train/trained_tokens": outcome.targets,
            }
            metrics |= learner.optim_step(learning_rate(step, steps, recipe.optim))
        session.finish_step(step + 1, metrics)
        script.after(session, step)
    session.finish()
