"""Items of the checklist that are tried in a live run. Every trial ends with the weights it began with."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import Refusal
from lockstep.parity.checklist.bench import OFFLINE, Bench, CheckItem, EngineAndTrainer, generate_and_score
from lockstep.parity.replay.checks import root_mean_square, worst_difference

# Updates at a rate of 0.
STANDSTILL = 3
# Times the tolerance by which an update must move log-probabilities before it can tell old weights from new ones.
VISIBLE = 10
# Rates that are tried for such an update: the recipe's, then ten times more each time.
RATES = 5


def engine_items(bench: Bench) -> list[CheckItem]:
    """What needs an engine: the hand-over of weights, a standstill, and prefill told from decode."""
    if not bench.rollouts:
        return [_none("weight hand-over", OFFLINE), rate_zero(bench, None), _none("prefill and decode", OFFLINE)]
    bench.restore()
    before = generate_and_score(bench)
    items: dict[str, Callable[[Bench, EngineAndTrainer], CheckItem]] = {
        "weight hand-over": hand_over,
        "learning rate 0": rate_zero,
        "prefill and decode": prefill_and_decode,
    }
    return [_tried(name, bench, before, item) for name, item in items.items()]


def _tried(
    name: str, bench: Bench, before: EngineAndTrainer, item: Callable[[Bench, EngineAndTrainer], CheckItem]
) -> CheckItem:
    """A serving engine proves every push by a probe, and a run ends where it fails; here that is the finding."""
    try:
        return item(bench, before)
    except Refusal as refusal:
        if not bench.training.generator.served:
            raise
        bench.restore()
        means = "weights do not reach the engine whole: what it was given is not what it generates with"
        return CheckItem(name, False, "; ".join(f"{each.where}: {each.why}" for each in refusal.problems), means)


def _none(name: str, why: str) -> CheckItem:
    return CheckItem(name, None, "", why)


def hand_over(bench: Bench, before: EngineAndTrainer) -> CheckItem:
    """After an update the engine must speak with the new weights, and the old ones must not explain what it says."""
    name, learner = "weight hand-over", bench.models.trained
    # An engine that was off before the update is another item's finding.
    allowed = max(bench.tolerance.logprob, 2 * before.difference)
    rate = _visible_rate(bench, VISIBLE * allowed)
    if rate is None:
        bench.restore()
        why = (
            f"no update moved log-probabilities by {VISIBLE} times the {allowed:.2g} that engine and trainer may differ"
        )
        return CheckItem(name, None, f"rates up to {_rates(bench)[-1]:.2g} tried", f"proves nothing: {why}")
    after = generate_and_score(bench)
    bench.restore()
    old_K = bench.answers(learner, bench.arranged(after.experience.examples))
    moved, stale = root_mean_square(after.trainer_K, old_K), root_mean_square(after.engine_K, old_K)
    measured = (
        f"after an update at rate {rate:.2g} the engine is {after.difference:.2g} from the trainer's new weights "
        f"(allowed {allowed:.2g}) and {stale:.2g} from the old ones"
    )
    measured += bench.training.generator.proof()
    if after.difference <= allowed:
        if moved <= 2 * allowed:
            return CheckItem(
                name, None, measured, "proves nothing: old and new weights say the same of these responses"
            )
        return CheckItem(name, True, measured, "the engine speaks with the weights of the last update")
    if stale <= allowed:
        means = "the engine still speaks with the weights from before the update: look at what hands them over"
    else:
        means = (
            "the engine speaks neither with the new weights nor with the old ones: a part of them (a layer, an "
            "adapter, tied embeddings) is not handed over, or arrives changed"
        )
    return CheckItem(name, False, measured, means)


def _rates(bench: Bench) -> list[float]:
    return [bench.recipe.optim.lr * 10**power for power in range(RATES)]


def _visible_rate(bench: Bench, least: float) -> float | None:
    """The first rate whose update the trainer's own log-probabilities show; the update stays made."""
    learner, update = bench.models.trained, bench.arranged(bench.examples)
    bench.restore()
    old_K = bench.answers(learner, update)
    for rate in _rates(bench):
        bench.restore()
        bench.update(learner, rate)
        if root_mean_square(old_K, bench.answers(learner, update)) > least:
            return rate
    return None


def rate_zero(bench: Bench, before: EngineAndTrainer | None) -> CheckItem:
    """Updates at a rate of 0 must change nothing, in the trainer or between the engine and the trainer."""
    bench.restore()
    update, allowed = bench.arranged(bench.examples), bench.tolerance.logprob
    old = {learner.name: bench.answers(learner, update) for learner in bench.models.learners}
    for learner in bench.models.learners:
        for _ in range(STANDSTILL):
            bench.update(learner, 0.0)
    drifts = {
        learner.name: root_mean_square(old[learner.name], bench.answers(learner, update))
        for learner in bench.models.learners
    }
    drift = max(drifts.values())
    measured = f"{STANDSTILL} updates at rate 0 moved the model's answers by {drift:.2g} (allowed {allowed:.2g})"
    means = "weights stand still without a learning rate"
    failed = []
    if not drift <= allowed:
        whose = max(drifts, key=lambda name: drifts[name])
        failed.append(
            f"weights of `{whose}` move without a learning rate: master weights that are not the weights, decay or "
            "momentum outside the rate, a buffer that counts, dropout left on"
        )
    if before is not None:
        after = generate_and_score(bench)
        grown = abs(after.difference - before.difference)
        measured += f"; engine and trainer were {before.difference:.2g} apart and are {after.difference:.2g}"
        means += ", and engine and trainer stay as near as they were"
        if not grown <= allowed:
            failed.append("engine and trainer drift apart: the engine keeps something from call to call")
    bench.restore()
    return CheckItem("learning rate 0", not failed, measured, "; ".join(failed) or means)


def prefill_and_decode(bench: Bench, whole: EngineAndTrainer) -> CheckItem:
    """A first token needs the prompt alone; later ones need what was added to the cache since.

    `whole` are responses from the recorded weights.
    """
    bench.restore()
    name, allowed = "prefill and decode", bench.tolerance.logprob
    first, later = generate_and_score(bench, max_tokens=1), whole.later()
    measured = f"engine against trainer: first token {first.difference:.2g}, "
    measured += f"later ones {later.difference:.2g} (allowed {allowed:.2g})"
    if not first.difference <= allowed:
        where = worst_difference(first.engine_K, first.trainer_K, "response")
        means = (
            f"prefill is off, or the one pass that draws the first token ({where}): how the engine runs a prompt "
            "(positions, mask, cache, temperature); what is said of later tokens follows from it"
        )
    elif not later.difference <= allowed:
        where = worst_difference(later.engine_K, later.trainer_K, "later token")
        means = f"decode is off, prefill is not ({where}): the cache that tokens are added to, its blocks, positions"
    elif len(later.engine_K):
        means = "the engine runs prompts and continues responses as the trainer scores them"
    else:
        means = "prefill is right; no response has a second token to try decode"
    return CheckItem(name, first.difference <= allowed and later.difference <= allowed, measured, means)


def padding(bench: Bench) -> CheckItem:
    """The same sequences packed in a line and padded two by two."""
    bench.restore()
    allowed, learner = bench.tolerance.logprob, bench.models.trained
    line_K = bench.answers(learner, bench.packed())
    # A value head that begins at 0 says 0 of everything: it must learn something to be tried.
    if bool((line_K == line_K[0]).all()) and _visible_rate(bench, least=1.0) is None:
        bench.restore()
        return CheckItem("padding and packing", None, "", "proves nothing: the model says the same of every token")
    line_K, rows_K = (bench.answers(learner, update) for update in (bench.packed(), bench.padded()))
    bench.restore()
    difference = root_mean_square(line_K, rows_K)
    measured = f"packed against padded, {len(bench.examples)} sequences: {difference:.2g} (allowed {allowed:.2g})"
    if difference <= allowed:
        return CheckItem("padding and packing", True, measured, "micro-batches do not change what the model says")
    where = worst_difference(line_K, rows_K, "target")
    means = (
        f"sequences see each other or their padding, or stand at wrong positions ({where}): try the twin kernel, "
        "model.attention=sdpa"
    )
    return CheckItem("padding and packing", False, measured, means)
