"""Validation of a run: the loss on its validation rows, and the answers to its questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.evaluate.validation import answer_metrics
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.rollout.generator import Generator
from lockstep.rollout.questions import Examiner, asked_as, encode_questions, validation_keys
from lockstep.rollout.sampling import validation_sampling
from lockstep.types import Prompt, Question, Rollout

# Answers of a validation that are stored in samples.jsonl.
STORED_ANSWERS = 20


class Validator:
    """`loss_on_rows` gives the metrics of the validation rows, where there are some."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        questions: Sequence[Question] = (),
        generator: Generator | None = None,
        judge: Examiner | None = None,
        loss_on_rows: Callable[[], dict[str, float]] | None = None,
    ):
        self.recipe, self.world, self.generator, self.judge = recipe, world, generator, judge
        self.loss_on_rows = loss_on_rows
        self.prompts: list[Prompt] = []
        if generator is not None:
            data = asked_as(recipe)
            self.prompts = encode_questions(generator.tokenizer, questions, recipe.data.system, data)

    def validate(self, step: int) -> tuple[dict[str, float], list[Rollout]]:
        """Metrics, and the answers to store."""
        with self.world.stage(f"validation after step {step}"):
            metrics: dict[str, float] = {}
            if self.loss_on_rows is not None:
                metrics |= {f"val/{name}": value for name, value in self.loss_on_rows().items()}
            if not self.prompts:
                return metrics, []
            answers = self._answers()
            assert self.judge is not None
            return metrics | answer_metrics(answers, self.judge.answer_of, self.recipe.val.n), answers[:STORED_ANSWERS]

    def _answers(self) -> list[Rollout]:
        assert self.generator is not None
        assert self.judge is not None
        sampling = validation_sampling(self.recipe, self.generator.stop_ids)
        keys = validation_keys(len(self.prompts))
        return self.generator.generate(self.prompts, keys, self.recipe.val.n, sampling, self.judge)
