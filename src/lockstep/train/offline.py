"""The offline loop: rows in, updates out. Every offline method is this loop with another row of `methods.py`."""

from __future__ import annotations

from lockstep.device.select import explain
from lockstep.methods import METHODS
from lockstep.parallel.world import World, joined
from lockstep.recipe import Recipe
from lockstep.reward.rule_judge import RuleJudge
from lockstep.run.progress import Console
from lockstep.train.evaluate import micro_batches
from lockstep.train.optim import learning_rate
from lockstep.train.plan import make_loader
from lockstep.train.session import Session, opened
from lockstep.train.setup import Prepared, prepare


def train_offline(recipe: Recipe, console: Console) -> None:
    device, sentence = explain(recipe.device)
    # Before the first tensor and the first collective: libraries read these switches once.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    with joined(device) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        prepared = prepare(recipe, device, world.size, console)
        with opened(prepared, device, world, console, switches, RuleJudge()) as session:
            _loop(recipe, prepared, session, world)


def _loop(recipe: Recipe, prepared: Prepared, session: Session, world: World) -> None:
    loader = make_loader(recipe, prepared.train)
    loss = METHODS[recipe.method].loss
    steps = prepared.batches.steps
    tokens, rows, pad = recipe.batch.tokens, recipe.batch.rows, prepared.pad_id

    session.validate_at_start()
    for step in range(session.step, steps):
        with session.phases("step"):
            examples = loader.take(step)
            batches = micro_batches(examples, world, tokens=tokens, rows=rows, pad_id=pad)
            outcome = session.learner.forward_backward(batches, loss)
            metrics = {
                "train/loss": outcome.loss,
                "train/tokens": outcome.tokens,
                "train/trained_tokens": outcome.targets,
            }
            metrics |= session.learner.optim_step(learning_rate(step, steps, recipe.optim))
        session.finish_step(step + 1, metrics)
    session.finish()
