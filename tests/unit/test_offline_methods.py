"""What each offline method minimises and reports, against numbers from plain transformers, one sequence at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.evaluate import validation as evaluate_rows
from lockstep.kernels.logit_divergence import TeacherDivergence
from lockstep.methods import METHODS
from lockstep.model.load import load_policy, load_value_model
from lockstep.model.policy import Policy, Scoring, Teacher
from lockstep.parallel.world import World
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.schema import Model
from lockstep.train.models import Models, Packing
from lockstep.types import Example, Item, LabeledResponse, Origin, Ranking, ScoredExample, StepLabels
from refusals import refuses

CPU = torch.device("cpu")
# Everything at once, a few rows at once, each row alone; packed and padded.
CUTS: list[dict[str, int | None]] = [
    {"tokens": 2000, "rows": None},
    {"tokens": 60, "rows": None},
    {"tokens": None, "rows": 1},
    {"tokens": None, "rows": 3},
]
A, B, C = [257, 65, 66, 67], [257, 70, 71], [257, 80, 81, 82, 83]


def response(prompt: Sequence[int], answer: Sequence[int], row: int = 0) -> Example:
    return Example([*prompt, *answer], [0] * len(prompt) + [1] * len(answer), Origin("rows.jsonl", row))


PAIRS = [
    Ranking((response(A, [10, 11, 12, 13]), response(A, [10, 99]))),
    Ranking((response(B, [20, 21]), response(B, [30, 31, 32, 33, 34, 35]))),
    Ranking((response(C, [40, 41, 42]), response(C, [40, 41]))),
    Ranking((response(A, [50]), response(A, [51, 52, 53, 54, 55, 56, 57, 58, 59]))),
]
JUDGED = [
    LabeledResponse(response(A, [10, 11, 12, 13], 0), True),
    LabeledResponse(response(A, [14, 15], 1), False),
    LabeledResponse(response(B, [20, 21, 22], 2), True),
    LabeledResponse(response(C, [40], 3), False),
    LabeledResponse(response(C, [43, 44, 45, 46, 47], 4), False),
]
# The next row with another prompt: rows 0 and 1 share theirs, so do 3 and 4.
PARTNERS = [2, 2, 3, 0, 0]


@pytest.fixture(scope="module")
def other_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model somewhat changed: a reference, a teacher."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_folder, folder)
    draw = torch.Generator().manual_seed(4)
    weights = load_file(folder / "model.safetensors")
    moved = {name: w + 0.2 * w.std(correction=0) * torch.randn(w.shape, generator=draw) for name, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def recipe_of(tiny_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    path = tmp_path / "recipe.yaml"

    def make(method: str, *overrides: str) -> Recipe:
        path.write_text(f"method: {method}\nmodel: {{path: {tiny_folder}}}\ndata: {{train: rows.jsonl}}\n")
        return load_recipe(str(path), list(overrides))

    return make


def policy_of(folder: Path, scoring: Scoring | None = None) -> Policy:
    return load_policy(Model(path=str(folder)), CPU, "sdpa", 0, scoring)


def models_of(module: Any, cut: dict[str, int | None], reference: Policy | None = None, longest: int = 500) -> Models:
    packing = Packing(World(), cut["tokens"], cut["rows"], 0)
    return Models(module, packing, CPU, reference=reference, longest=longest)


def measured(recipe: Recipe, items: Sequence[Item], models: Models) -> dict[str, float]:
    objective = METHODS[recipe.method].objective(recipe)
    return evaluate_rows.measure(items, objective, models)


class Plain:
    """A model by transformers alone, with its own attention, one sequence at a time."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()

    def each(self, example: Example) -> list[float]:
        """The log-probabilities of the trained tokens."""
        every = self.logits(example.ids).log_softmax(-1)
        return [float(every[i - 1, example.ids[i]]) for i in range(1, len(example)) if example.loss_mask[i]]

    def total(self, example: Example) -> float:
        return sum(self.each(example))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.daily("cut0", "cut2")
@pytest.mark.parametrize("cut", CUTS)
def test_dpo_equals_transformers(tiny_folder: Path, other_folder: Path, recipe_of, cut) -> None:
    own, other = Plain(tiny_folder), Plain(other_folder)
    chosen = [0.3 * (own.total(p.examples[0]) - other.total(p.examples[0])) for p in PAIRS]
    rejected = [0.3 * (own.total(p.examples[1]) - other.total(p.examples[1])) for p in PAIRS]
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert 0 < sum(m > 0 for m in margins) < 4, "the accuracy must be able to be wrong"
    models = models_of(policy_of(tiny_folder), cut, policy_of(other_folder))
    found = measured(recipe_of("dpo", "preference.beta=0.3"), PAIRS, models)
    wanted = {
        "loss": mean([-math.log(sigmoid(m)) for m in margins]),
        "pair_accuracy": mean([float(m > 0) for m in margins]),
        "chosen": mean(chosen),
        "rejected": mean(rejected),
        "margin": mean(margins),
    }
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def log_odds(m: float) -> float:
    return m - math.log(1 - math.exp(m))


def wanted_loss(method: str, pair: Ranking, own: Plain, other: Plain) -> float:
    """Each method's formula with the default settings of its row in the table, from mean log-probabilities."""
    (c, r), (n, m) = (own.total(e) for e in pair.examples), (e.targets for e in pair.examples)
    if method == "ipo":
        rc, rr = (other.total(e) for e in pair.examples)
        return ((c - rc) / n - (r - rr) / m - 1 / (2 * 0.1)) ** 2
    if method == "simpo":
        return -math.log(sigmoid(2.0 * (c / n - r / m) - 1.0))
    if method == "orpo":
        return -c / n - 0.1 * math.log(sigmoid(log_odds(c / n) - log_odds(r / m)))
    assert method == "cpo"
    return -c / n - math.log(sigmoid(0.1 * (c - r)))


@pytest.mark.daily
@pytest.mark.parametrize("method", ["ipo", "simpo", "orpo", "cpo"])
@pytest.mark.parametrize("cut", [CUTS[0], CUTS[3]])
def test_the_family_equals_transformers(tiny_folder: Path, other_folder: Path, recipe_of, method: str, cut) -> None:
    own, other = Plain(tiny_folder), Plain(other_folder)
    reference = policy_of(other_folder) if method == "ipo" else None
    found = measured(recipe_of(method), PAIRS, models_of(policy_of(tiny_folder), cut, reference))
    assert found["loss"] == pytest.approx(mean([wanted_loss(method, pair, own, other) for pair in PAIRS]), rel=1e-4)
    if method in ("orpo", "cpo"):
        likelihoods = [-own.total(p.examples[0]) / p.examples[0].targets for p in PAIRS]
        assert found["nll"] == pytest.approx(mean(likelihoods), rel=1e-4)


@pytest.mark.daily("cut0", "cut2")
@pytest.mark.parametrize("cut", CUTS)
def test_ranks_are_those_of_the_update(tiny_folder: Path, other_folder: Path, recipe_of, cut) -> None:
    """AOT's sorted margins, and its unpaired form with the surplus of the longer responses at a quarter (LD-DPO)."""
    own, other = Plain(tiny_folder), Plain(other_folder)
    models = models_of(policy_of(tiny_folder), cut, policy_of(other_folder))

    def margin(model: Plain, pair: Ranking) -> float:
        return model.total(pair.examples[0]) - model.total(pair.examples[1])

    margins = [sorted(margin(model, pair) for pair in PAIRS) for model in (own, other)]
    wanted = mean([-math.log(sigmoid(0.3 * (ours - theirs))) for ours, theirs in zip(*margins, strict=True)])
    found = measured(recipe_of("dpo", "preference.beta=0.3", "preference.loss=aot"), PAIRS, models)
    assert found["loss"] == pytest.approx(wanted, rel=1e-4)

    def ratio(pair: Ranking, which: int) -> float:
        shared = min(example.targets for example in pair.examples)
        tokens = zip(own.each(pair.examples[which]), other.each(pair.examples[which]), strict=True)
        return sum((1 if i < shared else 0.25) * (ours - theirs) for i, (ours, theirs) in enumerate(tokens))

    ratios = [sorted(ratio(pair, which) for pair in PAIRS) for which in (0, 1)]
    wanted = mean([-math.log(sigmoid(0.3 * (c - r))) for c, r in zip(*ratios, strict=True)])
    keys = ["preference.beta=0.3", "preference.loss=aot_unpaired", "preference.ld_alpha=0.25", "preference.nll=0.7"]
    found = measured(recipe_of("dpo", *keys), PAIRS, models)
    # The likelihood of the chosen responses counts every token.
    nll = mean([-own.total(pair.examples[0]) / pair.examples[0].targets for pair in PAIRS])
    assert found["nll"] == pytest.approx(nll, rel=1e-4)
    assert found["loss"] == pytest.approx(wanted + 0.7 * nll, rel=1e-4)


@pytest.mark.daily
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_kto_holds_rows_against_the_whole_updates_kl(
    tiny_folder: Path, other_folder: Path, recipe_of, swapped: bool, cut
) -> None:
    """Of two models one finds the mismatched pairs likelier: so the estimate is positive one way, and 0 the other."""
    first, second = (other_folder, tiny_folder) if swapped else (tiny_folder, other_folder)
    own, other = Plain(first), Plain(second)

    def ratio(example: Example) -> float:
        return own.total(example) - other.total(example)

    prompts = [A, A, B, C, C]
    answers = [item.example.ids[len(p) :] for item, p in zip(JUDGED, prompts, strict=True)]
    raw = mean([ratio(response(p, answers[partner])) for p, partner in zip(prompts, PARTNERS, strict=True)])
    kl = max(raw, 0.0)
    assert abs(raw) > 0.05
    weights = {True: 1.5, False: 0.7}
    losses, right = [], []
    for item in JUDGED:
        above = 0.4 * (ratio(item.example) - kl)
        losses.append(weights[item.desirable] * (1 - sigmoid(above if item.desirable else -above)))
        right.append(float((above > 0) == item.desirable))
    good = mean([0.4 * ratio(item.example) for item in JUDGED if item.desirable])
    bad = mean([0.4 * ratio(item.example) for item in JUDGED if not item.desirable])
    recipe = recipe_of("kto", "preference.beta=0.4", "preference.desirable=1.5", "preference.undesirable=0.7")
    found = measured(recipe, JUDGED, models_of(policy_of(first), cut, policy_of(second)))
    wanted = {
        "loss": mean(losses),
        "label_accuracy": mean(right),
        "kl": kl,
        "chosen": good,
        "rejected": bad,
        "margin": good - bad,
    }
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_one_way_the_kl_is_clamped_and_the_other_it_is_not(tiny_folder: Path, other_folder: Path, recipe_of) -> None:
    policies = policy_of(tiny_folder), policy_of(other_folder)
    both = [
        measured(recipe_of("kto"), JUDGED, models_of(own, CUTS[0], other))["kl"]
        for own, other in (policies, policies[::-1])
    ]
    assert min(both) == 0.0
    assert max(both) > 0.05


def test_kto_cuts_mismatched_pairs_to_the_limit_and_counts_them(
    tiny_folder: Path, other_folder: Path, recipe_of
) -> None:
    """Seven tokens leave three of the answer 20 21 22 after A, two of 10 11 12 13 after C, and one after B."""
    own, other = Plain(other_folder), Plain(tiny_folder)
    mixed = [
        response(A, [20, 21, 22]),
        response(A, [20, 21, 22]),
        response(B, [40]),
        response(C, [10, 11]),
        response(C, [10, 11]),
    ]
    raw = mean([own.total(example) - other.total(example) for example in mixed])
    models = models_of(policy_of(other_folder), CUTS[0], policy_of(tiny_folder), longest=7)
    found = measured(recipe_of("kto"), JUDGED, models)
    assert found["kl"] == pytest.approx(max(raw, 0.0), rel=1e-4)
    assert found["kl_cut"] == 2


def test_kto_without_a_reference_takes_mean_logprobs(tiny_folder: Path, recipe_of) -> None:
    own = Plain(tiny_folder)
    prompts = [A, A, B, C, C]
    answers = [item.example.ids[len(p) :] for item, p in zip(JUDGED, prompts, strict=True)]
    mixed = [response(p, answers[partner]) for p, partner in zip(prompts, PARTNERS, strict=True)]
    baseline = mean([own.total(example) / example.targets for example in mixed])
    losses = []
    for item in JUDGED:
        above = 0.1 * (own.total(item.example) / item.example.targets - baseline)
        losses.append(1 - sigmoid(above if item.desirable else -above))
    found = measured(
        recipe_of("kto", "preference.reference_free=true"), JUDGED, models_of(policy_of(tiny_folder), CUTS[1])
    )
    assert baseline < 0
    assert found["kl"] == pytest.approx(baseline, rel=1e-4)
    assert found["loss"] == pytest.approx(mean(losses), rel=1e-4)


def test_kto_refuses_an_update_of_one_answer_alone(tiny_folder: Path, other_folder: Path, recipe_of) -> None:
    rows = [LabeledResponse(response(A, [5, 6], 3), True), LabeledResponse(response(B, [5, 6], 4), False)]
    with refuses("rows.jsonl row 3, rows.jsonl row 4", "too-few-rows", "KL of this update"):
        measured(recipe_of("kto"), rows, models_of(policy_of(tiny_folder), CUTS[0], policy_of(other_folder)))


def scored(example: Example) -> ScoredExample:
    return ScoredExample(example.ids, bytes(len(example)), example.origin, positions=(len(example) - 1,))


RANKINGS = [
    Ranking((scored(response(A, [10, 11, 12, 13])), scored(response(A, [10, 99]))), margin=0.25),
    Ranking((scored(response(B, [20, 21])), scored(response(B, [30, 31])), scored(response(B, [30, 32, 33, 34])))),
    Ranking((scored(response(C, [40])), scored(response(C, [41]))), margin=1.5),
]


@pytest.fixture(scope="module")
def reward_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.daily
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("ranking", ["pairs", "plackett_luce"])
def test_rm_scores_the_last_token_of_each_text(reward_folder: Path, recipe_of, cut, ranking: str) -> None:
    library = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    with torch.no_grad():
        scores = [
            [float(library(input_ids=torch.tensor([list(e.ids)])).logits) for e in item.examples] for item in RANKINGS
        ]
    losses, right, gaps = [], [], []
    for item, given in zip(RANKINGS, scores, strict=True):
        pairs = [(b, w) for i, b in enumerate(given) for w in given[i + 1 :]]
        if ranking == "pairs":
            losses.append(mean([-math.log(sigmoid(b - w - item.margin)) for b, w in pairs]))
        else:
            low = [given[0] - item.margin, *given[1:]]
            chances = [math.exp(low[i]) / sum(map(math.exp, low[i:])) for i in range(len(low) - 1)]
            losses.append(-sum(map(math.log, chances)) / (len(low) - 1))
        # Keeps scores around zero: the square of twice the mean.
        losses[-1] += 0.01 * (2 * mean(given)) ** 2
        right.append(mean([float(b > w) for b, w in pairs]))
        gaps.append(mean([b - w for b, w in pairs]))
    every = [score for given in scores for score in given]
    assert 0 < mean(right) < 1
    module = load_value_model(Model(path=str(reward_folder)), str(reward_folder), CPU, "sdpa", 0)
    found = measured(
        recipe_of("rm", f"rm.ranking={ranking}", "rm.center_rewards_coef=0.01"), RANKINGS, models_of(module, cut)
    )
    wanted = {
        "loss": mean(losses),
        "pair_accuracy": mean(right),
        "margin": mean(gaps),
        "chosen": mean([given[0] for given in scores]),
        "rejected": mean([given[-1] for given in scores]),
        "score_mean": mean(every),
        "score_std": mean([(score - mean(every)) ** 2 for score in every]) ** 0.5,
    }
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


GOOD, BAD, PLACE = 43, 45, 64


def judged_steps(ids: Sequence[int], *labels: tuple[float, ...]) -> StepLabels:
    places = tuple(i for i, token in enumerate(ids) if token == PLACE)
    probe = ScoredExample(list(ids), bytes(len(ids)), Origin("rows.jsonl", 0), positions=places, token_ids=(GOOD, BAD))
    return StepLabels(probe, labels)


STEPS = [
    judged_steps([257, 65, PLACE, 66, 67, PLACE], (1.0, 0.0), (0.0, 1.0)),
    judged_steps([257, 70, 71, 72, PLACE, 73], (0.3, 0.7)),
    judged_steps([257, 80, PLACE, 81, PLACE, 82, 83, 84, PLACE], (1.0, 0.0), (0.5, 0.5), (1.0, 0.0)),
]


@pytest.mark.parametrize("cut", CUTS)
def test_prm_reads_the_judging_words_where_the_placeholder_stands(tiny_folder: Path, recipe_of, cut) -> None:
    own = Plain(tiny_folder)
    losses, good, right, wished = [], [], [], []
    for item in STEPS:
        logits = own.logits(item.example.ids)
        for place, (wanted_good, wanted_bad) in zip(item.example.positions, item.labels, strict=True):
            # Only the two words take part: the rest of the vocabulary is out of the softmax.
            chance = sigmoid(float(logits[place, GOOD] - logits[place, BAD]))
            losses.append(-wanted_good * math.log(chance) - wanted_bad * math.log(1 - chance))
            good.append(chance)
            wished.append(wanted_good)
            right.append(0.5 if wanted_good == 0.5 else float((chance > 0.5) == (wanted_good > 0.5)))
    found = measured(recipe_of("prm"), STEPS, models_of(policy_of(tiny_folder), cut))
    assert len(losses) == 6
    assert 0 < mean(right) < 1
    wanted = {
        "loss": mean(losses),
        "step_accuracy": mean(right),
        "positive": mean(good),
        "label_positive": mean(wished),
    }
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


ROWS = [item.example for item in JUDGED]


def divergence_of(p: torch.Tensor, q: torch.Tensor, kind: str, mix: float) -> float:
    def kl(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a * (a / b).log()).sum())

    between = mix * q + (1 - mix) * p
    return {
        "forward": kl(q, p),
        "reverse": kl(p, q),
        "jsd": mix * kl(q, between) + (1 - mix) * kl(p, between),
    }[kind]


@pytest.mark.daily
@pytest.mark.parametrize(("kind", "mix"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3)])
@pytest.mark.parametrize(("temperature", "cut"), [(1.0, CUTS[0]), (2.0, CUTS[1]), (2.0, CUTS[3])])
def test_distill_compares_whole_distributions(
    tiny_folder: Path, other_folder: Path, recipe_of, kind: str, mix: float, temperature: float, cut
) -> None:
    own, other = Plain(tiny_folder), Plain(other_folder)
    apart, likelihood = [], []
    for example in ROWS:
        logits, taught = own.logits(example.ids), other.logits(example.ids)
        for i in range(1, len(example)):
            if example.loss_mask[i]:
                p, q = ((x[i - 1] / temperature).softmax(-1) for x in (logits, taught))
                apart.append(temperature**2 * divergence_of(p, q, kind, mix))
                likelihood.append(-float(logits[i - 1].log_softmax(-1)[example.ids[i]]))
    recipe = recipe_of("distill", "distill.teacher=unused", "distill.coefficient=0.8")
    policy = policy_of(tiny_folder, Scoring(comparison=TeacherDivergence(kind, mix, temperature)))
    models = models_of(policy, cut)
    models.teacher = Teacher(policy_of(other_folder)).eval()
    found = measured(recipe, ROWS, models)
    wanted = {
        "loss": 0.2 * mean(likelihood) + 0.8 * mean(apart),
        "nll": mean(likelihood),
        "divergence": mean(apart),
    }
    assert found == pytest.approx(wanted, rel=1e-4)


def test_the_loss_is_known_while_policy_and_reference_are_equal(tiny_folder: Path, recipe_of) -> None:
    """What `start` promises is what the objective measures then."""
    known = {
        "dpo": math.log(2),
        "dpo preference.loss=hinge": 1.0,
        "dpo preference.loss=robust preference.label_smoothing=0.1": math.log(2),
        "dpo preference.loss=aot": math.log(2),
        "dpo preference.loss=sppo_hard": 50.0,
        "ipo": 25.0,
        "kto": 0.5,
        "kto preference.desirable=2.0 preference.undesirable=2.0": 1.0,
    }
    policy = policy_of(tiny_folder)
    for words, loss in known.items():
        recipe = recipe_of(*words.split())
        objective = METHODS[recipe.method].objective(recipe)
        assert objective.initial_loss() == pytest.approx(loss), words
        items = JUDGED if recipe.method == "kto" else PAIRS
        assert measured(recipe, items, models_of(policy, CUTS[1], policy))["loss"] == pytest.approx(loss, abs=1e-5)
    unknown = ["sft", "rm", "prm", "simpo", "orpo", "cpo", "distill distill.teacher=x"]
    unknown += ["kto preference.reference_free=true", "kto preference.desirable=2.0"]
    for words in unknown:
        recipe = recipe_of(*words.split())
        assert METHODS[recipe.method].objective(recipe).initial_loss() is None, words


def test_a_likelihood_term_does_not_hide_the_starting_loss(tiny_folder: Path, recipe_of) -> None:
    recipe = recipe_of("dpo", "preference.nll=0.7")
    policy = policy_of(tiny_folder)
    assert METHODS["dpo"].objective(recipe).initial_loss() == pytest.approx(math.log(2))
    found = measured(recipe, PAIRS, models_of(policy, CUTS[0], policy))
    assert found["loss"] - 0.7 * found["nll"] == pytest.approx(math.log(2), abs=1e-5)


def test_validation_rows_may_come_in_several_groups(
    tiny_folder: Path, other_folder: Path, reward_folder: Path, recipe_of, monkeypatch
) -> None:
    """Groups of 1 and 2 rows: their sums are added up before the one division."""
    policy, reference = policy_of(tiny_folder), policy_of(other_folder)
    module = load_value_model(Model(path=str(reward_folder)), str(reward_folder), CPU, "sdpa", 0)
    cases: list[tuple[str, Sequence[Item], Any, Policy | None]] = [
        ("dpo", PAIRS[:3], policy, reference),
        ("rm", RANKINGS, module, None),
        ("prm", STEPS, policy, None),
    ]
    at_once = [measured(recipe_of(m), items, models_of(own, CUTS[0], other)) for m, items, own, other in cases]
    monkeypatch.setattr(evaluate_rows, "GROUP", 2)
    grouped = [measured(recipe_of(m), items, models_of(own, CUTS[0], other)) for m, items, own, other in cases]
    for one, two in zip(at_once, grouped, strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-6)


def test_kto_reports_no_mean_of_a_kind_that_is_absent(recipe_of) -> None:
    """An update may hold desirable rows alone: no rejected reward, and no margin, rather than 0/0."""
    objective = METHODS["kto"].objective(recipe_of("kto"))
    sums = {
        "desirable": 3.0,
        "undesirable": 0.0,
        "reward_desirable": 1.5,
        "reward_undesirable": 0.0,
        "accuracy": 2.0,
        "kl": 0.6,
        "kl_cut": 0.0,
    }
    assert objective.report(sums, 3) == pytest.approx({"label_accuracy": 2 / 3, "kl": 0.2, "chosen": 0.5})
