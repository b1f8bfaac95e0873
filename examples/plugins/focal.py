"""An offline method: SFT with the focal loss."""

from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods import METHODS
from lockstep.methods.base import Method, MethodModels, Plain, Task
from lockstep.methods.sft import reader
from lockstep.recipe import Recipe
from lockstep.recipe.methods import OFFLINE, OfflineRow
from lockstep.types import Example, MicroBatch, Sums


def focal(scores: Scores, batch: MicroBatch) -> Sums:
    """Focal loss (arXiv 1708.02002) with gamma 2: tokens with a high probability get a small weight."""
    logprobs_K = scores.logprobs_K
    return Sums(-((1 - logprobs_K.exp()).square() * logprobs_K).sum(), {"nll": -logprobs_K.detach().sum()})


class Focal(Plain):
    def __init__(self, recipe: Recipe):
        pass

    def task(self, update: Update[Example], models: MethodModels) -> Task:
        return Task(update.batches, focal, update.targets)


METHODS["focal"] = Method(reader=reader, objective=Focal)
OFFLINE["focal"] = OfflineRow(defaults={"optim": {"lr": 2e-4}})
