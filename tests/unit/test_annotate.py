"""From responses to advantages: what is computed and what is not, rewards and metrics by hand, micro-batches once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hand_rollouts import FAILED, plans_of, recipe_of, rollout
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.preflight.batch_plan import old_needed
from lockstep.recipe import Recipe
from lockstep.train.advantages import _energy, estimate_advantages
from lockstep.train.experience import Experience, ModelOutputs, UpdatePlan, build_experience, compute_model_outputs
from lockstep.train.models import Models, Packing, build_learner, build_reference
from lockstep.types import MicroBatch, Score

# Two prompts, two responses each; K = 2 + 1 + 3 + 1 tokens.
LENGTHS = (2, 1, 3, 1)
SCORES = (1.0, 0.0, 2.0, 2.0)
ENGINE = [-1.0, -2.0, -0.5, -1.0, -1.5, -2.5, -0.25]
OLD = [-1.1, -2.0, -0.5, -0.5, -1.5, -2.0, -0.25]
REFERENCE = [-1.0, -1.0, -0.5, -1.0, -2.5, -2.0, -0.75]
VALUES = [0.5, 0.25, 0.0, 1.0, 1.5, 2.0, 1.0]


def made() -> Experience:
    engine = iter(ENGINE)
    return build_experience(
        [
            rollout(i // 2, range(40, 40 + n), SCORES[i], sample=i % 2, logprobs=[next(engine) for _ in range(n)])
            for i, n in enumerate(LENGTHS)
        ]
    )


class FakeModels:
    """Gives prepared vectors update by update, and remembers what it was asked."""

    def __init__(self, *, critic: bool = False, old: Sequence[float] = OLD):
        self.critic = object() if critic else None
        self.module = torch.nn.Identity()
        self._vectors = {"old": old, "reference": REFERENCE, "values": VALUES}
        self._used = dict.fromkeys(self._vectors, 0)
        self.asked: list[tuple[str, list[MicroBatch]]] = []

    def _next(self, name: str, plan: UpdatePlan) -> torch.Tensor:
        self.asked.append((name, plan.batches))
        first = self._used[name]
        self._used[name] += plan.targets
        return torch.tensor(self._vectors[name][first : first + plan.targets])

    def logprobs(self, plan: UpdatePlan) -> torch.Tensor:
        return self._next("old", plan)

    def reference_logprobs(self, plan: UpdatePlan) -> torch.Tensor:
        return self._next("reference", plan)

    def values(self, plan: UpdatePlan) -> torch.Tensor:
        return self._next("values", plan)


class Phases(list[str]):
    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.append(name)
        yield


def planned(experience: Experience, recipe: Recipe, world: World | None = None) -> list[UpdatePlan]:
    models = Models(torch.nn.Identity(), Packing.of(recipe, world or World(), 0), torch.device("cpu"))
    return plans_of(experience, models, recipe.batch)


def annotated(beta: float = 0.1, *, old: Sequence[float] = OLD, **keys: Any) -> tuple[Any, FakeModels, Phases]:
    """What the models said and what followed from it, in one."""
    recipe = recipe_of(**{"batch__prompts": 2, "rollout__n": 2, **keys})
    models, phases = FakeModels(critic=recipe.algorithm.advantage == "gae", old=old), Phases()
    plans, rollout_logprobs_K = planned(made(), recipe), made().rollout_logprobs_K
    known = compute_model_outputs(plans, models, recipe, phases, rollout_logprobs_K)  # type: ignore[arg-type]
    advantages = estimate_advantages(made(), known, recipe, beta)
    return SimpleNamespace(**vars(known), **vars(advantages)), models, phases


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "updates", "keys"),
    [
        (False, 1, {}),
        (False, 1, {"algorithm__kl__where": "none"}),
        (False, 1, {"algorithm__loss": "gspo"}),
        (False, 1, {"method": "ppo", "algorithm__kl__where": "loss"}),
        (True, 2, {}),
        (True, 1, {"algorithm__epochs": 2}),
        (True, 1, {"algorithm__correction__weight": "token"}),
        (True, 1, {"algorithm__correction__mask": "sequence"}),
        (True, 1, {"algorithm__correction__reject": [{"by": "k2", "high": 1.0}]}),
        (True, 1, {"algorithm__advantage": "optimal_token_baseline"}),
        (True, 1, {"algorithm__kl__where": "reward"}),
        (True, 1, {"method": "ppo"}),
        (True, 1, {"algorithm__loss": "clip_cov"}),
        (True, 1, {"algorithm__loss": "kl_cov"}),
    ],
    ids=str,
)
def test_old_log_probabilities_are_computed_only_where_something_needs_them(
    needed: bool, updates: int, keys: dict[str, Any]
) -> None:
    assert old_needed(recipe_of(**keys), updates) is needed


@pytest.mark.parametrize(
    ("keys", "phases"),
    [
        ({"method": "dr_grpo"}, []),
        ({}, ["ref"]),
        ({"algorithm__epochs": 2}, ["old_log_prob", "ref"]),
        ({"method": "rloo"}, ["old_log_prob", "ref"]),
        ({"method": "ppo", "algorithm__kl__where": "none"}, ["values"]),
        ({"method": "ppo"}, ["old_log_prob", "ref", "values"]),
    ],
    ids=str,
)
def test_models_are_run_only_where_the_recipe_uses_them(keys: dict[str, Any], phases: list[str]) -> None:
    known, models, seen = annotated(**keys)
    assert seen == phases
    names = {"old_log_prob": known.old_K, "ref": known.reference_K, "values": known.values_K}
    assert {name for name, vector in names.items() if vector is not None} == set(phases)
    assert len(models.asked) == len(phases)


def test_vectors_of_several_updates_are_joined_in_order() -> None:
    known, models, _ = annotated(batch__prompts_per_update=1)
    assert known.old_K is not None
    assert known.reference_K is not None
    assert known.old_K.tolist() == pytest.approx(OLD)
    assert known.reference_K.tolist() == pytest.approx(REFERENCE)
    # Old and reference run the very micro-batches that the update will run.
    parts = [batches for name, batches in models.asked if name == "old"]
    assert len(parts) == 2
    assert [batches for name, batches in models.asked if name == "reference"] == parts


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_a_score_stands_on_the_last_token_of_its_response() -> None:
    known, _, _ = annotated(method="dr_grpo")
    assert known.rewards_K.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 2.0]
    assert known.metrics["critic/score/mean"] == 1.25
    assert known.metrics["critic/score/max"] == 2.0
    assert known.metrics["critic/score/min"] == 0.0
    assert known.metrics["critic/rewards/mean"] == 1.25
    assert "actor/reward_kl_penalty" not in known.metrics
    # The second prompt's responses earned the same: half of the responses can teach something.
    assert known.metrics["critic/mixed_groups"] == 0.5
    # s - group mean: +-0.5 for the first prompt, 0 for the second.
    assert known.advantages_K.tolist() == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_divergence_is_taken_off_each_token(estimator: str) -> None:
    d = [p - q for p, q in zip(OLD, REFERENCE, strict=True)]
    each = {
        "k1": d,
        "abs": [abs(x) for x in d],
        "k2": [x * x / 2 for x in d],
        "k3": [math.exp(-x) + x - 1 for x in d],
    }[estimator]
    known, _, _ = annotated(
        0.5, method="reinforce", rollout__n=2, algorithm__kl={"where": "reward", "estimator": estimator}
    )
    scores = [0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 2.0]
    rewards = [score - 0.5 * kl for score, kl in zip(scores, each, strict=True)]
    assert known.rewards_K.tolist() == pytest.approx(rewards, abs=1e-6)
    assert known.metrics["actor/reward_kl_penalty"] == pytest.approx(sum(each) / 7, abs=1e-6)
    # Scores are what the rewards said; rewards are what is learned from.
    assert known.metrics["critic/score/mean"] == 1.25
    assert known.metrics["critic/rewards/mean"] == pytest.approx(sum(rewards) / 4, abs=1e-6)
    # REINFORCE: the return to go within each response.
    expected = [rewards[0] + rewards[1], rewards[1], rewards[2], sum(rewards[3:6]), sum(rewards[4:6]), *rewards[5:]]
    assert known.advantages_K.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_divergence_in_the_loss_leaves_the_rewards_alone() -> None:
    known, _, _ = annotated(5.0)
    assert known.metrics["critic/rewards/mean"] == known.metrics["critic/score/mean"] == 1.25
    assert known.reference_K is not None


def test_values_have_metrics_of_their_own() -> None:
    known, _, _ = annotated(method="ppo", algorithm__kl__where="none")
    # With gamma = lambda = 1 the return of a token is its response's score.
    returns = [1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 2.0]
    assert known.returns_K.tolist() == pytest.approx(returns)
    assert known.metrics["critic/values/mean"] == pytest.approx(sum(VALUES) / 7)
    errors = [r - v for r, v in zip(returns, VALUES, strict=True)]

    def variance(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values)

    assert known.metrics["critic/vf_explained_var"] == pytest.approx(1 - variance(errors) / variance(returns))
    # Whitened over the step: A = R - V, here by hand.
    mean = sum(errors) / 7
    deviation = math.sqrt(sum((e - mean) ** 2 for e in errors) / 6)
    assert known.advantages_K.tolist() == pytest.approx([(e - mean) / deviation for e in errors], rel=1e-5)


@pytest.mark.parametrize(
    ("scores", "defined"), [([0.7], False), ([0.7, 0.7], False), ([0.0, 0.0], False), ([0.7, 0.701], True)], ids=str
)
def test_the_explained_variance_of_equal_returns_is_missing(scores: list[float], defined: bool) -> None:
    """In exact numbers every return is its response's score; in single precision they differ by rounding."""
    made = build_experience([rollout(number, [9] * 400, score) for number, score in enumerate(scores)])
    values_K = torch.randn(400 * len(scores), generator=torch.Generator().manual_seed(3))
    recipe = recipe_of(method="ppo", algorithm__kl__where="none")
    metrics = estimate_advantages(made, ModelOutputs(None, None, values_K), recipe, 0.0).metrics
    assert ("critic/vf_explained_var" in metrics) is defined
    if defined:
        returns_K = torch.tensor(scores, dtype=torch.float64).repeat_interleave(400)
        expected = 1 - (returns_K - values_K.double()).var() / returns_K.var()
        assert metrics["critic/vf_explained_var"] == pytest.approx(float(expected), rel=1e-2)


# -- correction --------------------------------------------------------------------------------------------------------


def test_without_a_correction_everything_is_kept_and_weighs_one() -> None:
    known, _, _ = annotated()
    assert known.keep_K.tolist() == known.is_weights_K.tolist() == [1.0] * 7
    assert not any(name.startswith("rollout_corr/") for name in known.metrics)


def test_tokens_out_of_the_band_are_left_out() -> None:
    """Ratios of trainer to engine: e^-0.1, 1, 1, e^0.5, 1, e^0.5, 1."""
    known, _, _ = annotated(algorithm__rollout_correction={"mask": "token", "low": 0.5, "high": 1.5})
    assert known.keep_K.tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert known.is_weights_K.tolist() == [1.0] * 7
    assert known.metrics["rollout_corr/masked_share"] == pytest.approx(2 / 7)


def test_sequences_out_of_the_band_are_left_out_whole() -> None:
    """Geometric means: e^-0.05, 1, e^(1/3) = 1.396, 1."""
    known, _, _ = annotated(algorithm__rollout_correction={"mask": "sequence", "low": 0.5, "high": 1.39})
    assert known.keep_K.tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert known.metrics["rollout_corr/masked_sequence_share"] == 0.25


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("token", [math.exp(-0.1), 1, 1, 1.6, 1, 1.6, 1]),
        ("sequence", [math.exp(-0.1), math.exp(-0.1), 1, 1.6, 1.6, 1.6, 1]),
    ],
)
def test_importance_weights_are_capped(weight: str, expected: list[float]) -> None:
    known, _, _ = annotated(algorithm__rollout_correction={"weight": weight, "cap": 1.6})
    assert known.keep_K.tolist() == [1.0] * 7
    assert known.is_weights_K.tolist() == pytest.approx(expected, rel=1e-5)


# -- updates and micro-batches -----------------------------------------------------------------------------------------


def many() -> Experience:
    """Six prompts with two responses each, lengths 1 to 12; one response and one whole prompt failed."""
    return build_experience(
        [rollout(i // 2, range(100, 101 + i), FAILED if i in (3, 8, 9) else 1.0, sample=i % 2) for i in range(12)]
    )


@pytest.mark.parametrize(
    "batch", [{"batch__tokens": 30}, {"batch__micro_batch_size": 2}, {"batch__tokens": 4096}], ids=str
)
@pytest.mark.parametrize(("each", "sizes"), [(6, [9]), (2, [3, 4, 2]), (1, [2, 1, 2, 2, 2])])
def test_every_response_is_in_one_update_once_and_in_order(batch: dict[str, Any], each: int, sizes: list[int]) -> None:
    experience = many()
    recipe = recipe_of(**{"batch__prompts": 6, "batch__prompts_per_update": each, **batch})
    parts = planned(experience, recipe)
    assert [part.responses.stop - part.responses.start for part in parts] == sizes
    assert [part.responses.start for part in parts] == [0, *(part.responses.stop for part in parts)][:-1]
    assert [part.tokens.start for part in parts] == [0, *(part.tokens.stop for part in parts)][:-1]
    assert parts[-1].tokens.stop == len(experience.sequence_K) == sum(part.targets for part in parts)
    line = [token for r in experience.rollouts for token in r.ids]
    for part in parts:
        places = torch.cat([b.index_K for b in part.batches])
        assert sorted(places.tolist()) == list(range(part.targets))
        targets = torch.cat([b.targets_K for b in part.batches])
        assert targets[places.argsort()].tolist() == line[part.tokens]


def test_ranks_share_an_update_without_overlap() -> None:
    experience = many()
    recipe = recipe_of(batch__prompts=6, batch__prompts_per_update=3, batch__tokens=30)
    ranks = [planned(experience, recipe, World(rank, 2)) for rank in range(2)]
    for one, two in zip(*ranks, strict=True):
        assert len(one.batches) == len(two.batches)
        assert (one.tokens, one.responses) == (two.tokens, two.responses)
        places = torch.cat([b.index_K for part in (one, two) for b in part.batches])
        assert sorted(places.tolist()) == list(range(one.targets))


@pytest.mark.parametrize("batch", [{"batch__tokens": 30}, {"batch__micro_batch_size": 2}], ids=str)
def test_a_real_policy_gives_its_tokens_in_the_order_of_the_responses(tiny_folder: Path, batch: dict[str, Any]) -> None:
    """Against the library's model on one response after another; the reference is the same model here."""
    from transformers import AutoModelForCausalLM

    experience = many()
    recipe = recipe_of(
        str(tiny_folder), **{"batch__prompts": 6, "batch__prompts_per_update": 2, "algorithm__epochs": 2, **batch}
    )
    where = (select("cpu"), World(), torch.device("cpu"))
    learner, packing = build_learner(recipe, *where), Packing.of(recipe, World(), 0)
    models = Models(learner.module, packing, where[2], learner, reference=build_reference(recipe, *where))
    parts = planned(experience, recipe)
    known = compute_model_outputs(parts, models, recipe, Phases(), torch.zeros(0))
    library = AutoModelForCausalLM.from_pretrained(tiny_folder)
    expected = []
    with torch.no_grad():
        for r in experience.rollouts:
            ids = torch.tensor([[*r.prompt.ids, *r.ids]])
            every = library(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            expected += every[len(r.prompt.ids) - 1 :].tolist()
    assert known.old_K is not None
    assert known.reference_K is not None
    assert known.old_K.tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(known.old_K, known.reference_K)
    assert models.module.training


# -- what is learned from ----------------------------------------------------------------------------------------------


def test_bypass_takes_the_engines_logprobs_for_old_ones() -> None:
    found, models, _ = annotated(algorithm__correction__bypass=True, algorithm__kl__where="none")
    assert found.old_K.tolist() == ENGINE
    assert models.asked == []  # no pass before the first update
    band = [{"over": "token", "by": "ratio", "low": 0.9, "high": 1.2}]
    found, models, _ = annotated(algorithm__correction__bypass=True, algorithm__correction__reject=band)
    assert found.old_K.tolist() == ENGINE
    assert found.trainer_K.tolist() == pytest.approx(OLD)
    # The trainer's over the engine's: e^-0.1, 1, 1, e^0.5, 1, e^0.5, 1.
    assert found.keep_K.tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert [name for name, _ in models.asked] == ["old", "reference"]


def test_responses_that_met_the_limit_are_skipped_and_still_compared() -> None:
    recipe = recipe_of(
        batch__prompts=2, rollout__n=2, algorithm__overlong__mask_truncated=True, algorithm__kl__where="none"
    )
    experience = made()
    stops = [replace(r, stop="length" if i in (1, 2) else "token") for i, r in enumerate(experience.rollouts)]
    cut = build_experience(stops)
    found = estimate_advantages(cut, ModelOutputs(None, None, None), recipe, 0.0)
    whole = estimate_advantages(experience, ModelOutputs(None, None, None), recipe, 0.0)
    assert found.keep_K.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert found.advantages_K.tolist() == whole.advantages_K.tolist()
    assert found.metrics["response/skipped_ratio"] == 0.5


def test_filtered_responses_count_as_often_as_they_are_drawn() -> None:
    recipe = recipe_of(batch__prompts=2, rollout__n=2, algorithm__pf_ppo__method="max_min")
    known = ModelOutputs(None, torch.tensor(REFERENCE), None)
    found = estimate_advantages(made(), known, recipe, 0.1, (3, 1))
    assert found.repeats_S is not None
    assert found.repeats_S.sum() == 4
    assert found.repeats_S[0] == 0  # its score of 1 is neither the best nor the worst
    assert found.metrics["actor/filtered_share"] == pytest.approx(float((found.repeats_S == 0).double().mean()))
    assert estimate_advantages(made(), known, recipe_of(batch__prompts=2, rollout__n=2), 0.1).repeats_S is None


def test_rewards_one_by_one_and_a_missing_one() -> None:
    scores = [
        Score(1.0, {"rule": 1.0, "function/form": 0.0}),
        Score(0.0, {"rule": 0.0, "function/form": 1.0}),
        Score(1.0, {"rule": 1.0, "function/form": 0.0}),
        Score(1.0, {"rule": 1.0, "function/form": 1.0}),
    ]
    experience = build_experience([replace(r, score=s) for r, s in zip(made().rollouts, scores, strict=True)])
    keys = {"batch__prompts": 2, "rollout__n": 2, "algorithm__advantage": "gdpo", "algorithm__kl__where": "none"}
    keys |= {"algorithm__whiten__over": "none"}
    recipe = recipe_of(**keys, algorithm__gdpo_rewards={"rule": 1.0, "function/form": 2.0})
    found = estimate_advantages(experience, ModelOutputs(None, None, None), recipe, 0.0)
    one = 1 / math.sqrt(2)  # two numbers are +-1/sqrt(2) of their deviation apart; the second group's rules are equal
    assert found.advantages_K.tolist() == pytest.approx([-one, -one, one, *[-2 * one] * 3, 2 * one], rel=1e-4)
    recipe = recipe_of(**keys)  # those of the recipe: the rule alone
    found = estimate_advantages(experience, ModelOutputs(None, None, None), recipe, 0.0)
    assert found.advantages_K.tolist() == pytest.approx([one, one, -one, 0, 0, 0, 0], rel=1e-4)
    recipe = recipe_of(**keys, algorithm__gdpo_rewards={"model": 1.0})
    with pytest.raises(Refusal, match=r"no reward 'model' in its score"):
        estimate_advantages(experience, ModelOutputs(None, None, None), recipe, 0.0)


def test_squares_of_all_words_and_the_energy_of_a_token(tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    experience = many()
    recipe = recipe_of(
        str(tiny_folder),
        batch__prompts=6,
        rollout__temperature=0.7,
        algorithm__advantage="optimal_token_baseline",
        algorithm__kl__where="none",
    )
    where = (select("cpu"), World(), torch.device("cpu"))
    learner, packing = build_learner(recipe, *where), Packing.of(recipe, World(), 0)
    models = Models(learner.module, packing, where[2], learner)
    known = compute_model_outputs(planned(experience, recipe), models, recipe, Phases(), experience.rollout_logprobs_K)
    library = AutoModelForCausalLM.from_pretrained(tiny_folder)
    squares, energies = [], []
    with torch.no_grad():
        for r in experience.rollouts:
            ids = torch.tensor([[*r.prompt.ids, *r.ids]])
            first = len(r.prompt.ids) - 1
            every = (library(input_ids=ids).logits[0, first:-1].double() / 0.7).softmax(-1)
            squares += every.square().sum(-1).tolist()
            target = torch.nn.functional.one_hot(torch.tensor(list(r.ids)), every.shape[-1])
            energies += (target - every).square().sum(-1).tolist()  # the gradient of log p by the logits, squared
    assert known.squares_K is not None
    assert known.squares_K.tolist() == pytest.approx(squares, rel=1e-4)
    found = _energy(known, torch.full((len(squares),), 2.0))
    assert found is not None
    assert found.tolist() == pytest.approx([4 * energy for energy in energies], rel=1e-3, abs=1e-5)
