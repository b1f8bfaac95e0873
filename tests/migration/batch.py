"""One batch of responses for both sides: ours as an experience, theirs as padded tensors, and the update of each.

What the models said before the update is drawn at random around what they say now, so that bounds and penalties bite.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hand_rollouts import plans_of, rollout
from lockstep.device.select import select
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.reward.row_rewards import shaped
from lockstep.train.advantages import TrainBatch, estimate_advantages
from lockstep.train.experience import Experience, ModelOutputs, build_experience
from lockstep.train.models import Models, Packing, build_critic, build_learner
from lockstep.train.update import update_policy
from lockstep.train.update_terms import update_critic

CPU = torch.device("cpu")
PROMPTS, EACH, LONGEST, TEMPERATURE = 3, 4, 9, 1.0
LENGTHS = ((3, 5), (3, 2), (3, 7), (3, 9), (6, 1), (6, 4), (6, 3), (6, 6), (2, 8), (2, 2), (2, 9), (2, 5))
SCORES = (1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 0.0, 1.5, -0.5, 1.0, 0.75, 0.0)
Gradients = dict[str, torch.Tensor]


def drawn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made() -> Experience:
    """Three prompts with four responses each, of different lengths."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=draw).tolist()

    prompts = [ids(LENGTHS[EACH * number][0]) for number in range(PROMPTS)]
    return build_experience(
        [
            rollout(i // EACH, ids(length), SCORES[i], sample=i % EACH, prompt=prompts[i // EACH])
            for i, (_, length) in enumerate(LENGTHS)
        ]
    )


class Batch:
    """Both sides' view of the same responses. Matrices are (responses, LONGEST), left-aligned."""

    def __init__(self, model: Path):
        self.experience = made()
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        rows = self.experience.rollouts
        width = max(len(row.prompt.ids) + len(row.ids) for row in rows)
        self.ids = torch.zeros(len(rows), width, dtype=torch.long)
        self.attended = torch.zeros_like(self.ids)
        self._trained = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        self.mask = torch.zeros(len(rows), LONGEST)
        for i, row in enumerate(rows):
            line = [*row.prompt.ids, *row.ids]
            self.ids[i, : len(line)] = torch.tensor(line)
            self.attended[i, : len(line)] = 1
            self._trained[i, len(row.prompt.ids) - 1 : len(line) - 1] = True
            self.mask[i, : len(row.ids)] = 1
        self.scores = torch.tensor(SCORES)
        self.groups = self.experience.group_S
        with torch.no_grad():
            now_K = self.logprobs()[0][self.mask > 0]
        tokens = len(now_K)
        self.old_K = now_K + drawn(2, tokens, scale=0.4)
        self.reference_K = now_K + drawn(3, tokens, scale=0.3)
        self.values_K = drawn(4, tokens, scale=0.5)

    def matrix(self, vector_K: torch.Tensor) -> torch.Tensor:
        placed = torch.zeros_like(self.mask, dtype=vector_K.dtype)
        placed[self.mask > 0] = vector_K
        return placed

    def logprobs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The library's log-probabilities and entropies of the response tokens, with gradients."""
        logits = self.model(input_ids=self.ids, attention_mask=self.attended, use_cache=False).logits[:, :-1]
        every = (logits / TEMPERATURE).log_softmax(-1)
        own, entropy = every.gather(-1, self.ids[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)
        return self._placed(own), self._placed(entropy)

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        # Rows in order are tokens in order, on both sides.
        return torch.zeros_like(self.mask).masked_scatter(self.mask > 0, values[self._trained])

    def theirs(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[float, Gradients]:
        """The value and gradient of a loss of log-probabilities and entropies."""
        self.model.zero_grad()
        value = loss(*self.logprobs())
        if value.requires_grad:
            value.backward()
        return float(value.detach()), gradients(self.model)


class Ours:
    """The update of a migrated recipe: its advantages, its loss, its aggregation, on the model's real weights."""

    def __init__(self, recipe: Recipe, batch: Batch):
        where = (select("cpu"), World(), CPU)
        learner = build_learner(recipe, *where)
        self.recipe, self.batch = recipe, batch
        self.models = Models(learner.module, Packing.of(recipe, World(), 0), CPU, learner, build_critic(recipe, *where))
        kl = recipe.algorithm.kl
        known = ModelOutputs(
            batch.old_K,
            batch.reference_K if kl.where != "none" else None,
            batch.values_K if self.models.critic is not None else None,
        )
        self.beta = kl.coefficient
        experience = build_experience([shaped(row, recipe) for row in batch.experience.rollouts])
        self.advantages = estimate_advantages(experience, known, recipe, self.beta)
        self.learned = TrainBatch(experience, known, self.advantages)
        (self.plan,) = plans_of(experience, self.models, recipe.batch)

    def policy(self) -> tuple[float, Gradients]:
        """Loss and gradient of one update of the policy, which stops short of its optimizer."""
        self.models.trained.optim_step = lambda lr: {}  # type: ignore[method-assign,assignment,misc]
        metrics = update_policy(self.plan, self.learned, self.models, self.recipe, self.beta, 0.0, (0,))
        return metrics["actor/loss"], gradients(self.models.module.model)  # type: ignore[arg-type]

    def critic(self) -> tuple[float, Gradients]:
        assert self.models.critic is not None
        self.models.critic.optim_step = lambda lr: {}  # type: ignore[method-assign,assignment,misc]
        metrics = update_critic(self.plan, self.learned, self.models, self.recipe, 0.0)
        return metrics["critic/vf_loss"], gradients(self.models.critic.module)

    def values(self) -> torch.Tensor:
        """What the critic says of every token now, with gradients."""
        from lockstep.data.batching import run_on

        assert self.models.critic is not None
        self.models.critic.module.zero_grad()
        values_K = torch.zeros(len(self.batch.values_K))
        for batch in self.plan.batches:
            values_K = values_K.index_add(0, batch.index_K, run_on(self.models.critic.module, batch, CPU))
        return values_K


def gradients(module: torch.nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def distance(ours: Gradients, theirs: Gradients) -> float:
    """The largest difference of two gradients, relative to the largest entry."""
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert largest > 1e-5, "there is no gradient to compare"
    return max(float((ours[name] - g).abs().max()) for name, g in theirs.items()) / largest


def assert_same(ours: tuple[float, Gradients], theirs: tuple[float, Gradients], within: float = 1e-5) -> None:
    assert abs(ours[0] - theirs[0]) <= within * max(1.0, abs(theirs[0])), (ours[0], theirs[0])
    apart = distance(ours[1], theirs[1])
    assert apart <= within, apart


def adapted(recipe: Recipe, model: Path) -> Recipe:
    """The migrated recipe on the tiny model, in fp32, as one update of the whole batch: nothing else is changed."""
    critic = recipe.critic.model_copy(update={"path": str(model)})
    return recipe.model_copy(
        update={
            "device": "cpu",
            "critic": critic,
            "model": recipe.model.model_copy(
                update={"path": str(model), "dtype": "fp32", "master_weights": False, "gradient_checkpointing": False}
            ),
        }
    )
