"""The models of an offline run, as its methods ask them: the policy now, the reference, the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.data.batching import to_device
from lockstep.data.updates import Update, arrange
from lockstep.kernels.divergence import Likeliest, Whole, likeliest
from lockstep.model.policy import Policy, Teacher
from lockstep.parallel.world import World
from lockstep.recipe.methods import reference_folder, reference_kind
from lockstep.train.build import load_reference, load_teacher
from lockstep.train.evaluate import evaluating
from lockstep.train.roles import Roles
from lockstep.train.session import Session
from lockstep.train.setup import Prepared
from lockstep.train.tables import Columns, Shape, Table, fingerprint, open_table
from lockstep.types import Item, MicroBatch

T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Packing:
    """How rows become micro-batches in this run."""

    world: World
    tokens: int | None
    rows: int | None
    pad_id: int

    def __call__(self, items: Sequence[T]) -> Update[T]:
        return arrange(items, self.world, tokens=self.tokens, rows=self.rows, pad_id=self.pad_id)


class Consulted:
    """Answers cover all targets of an update, on the host, the same on every rank."""

    def __init__(
        self,
        roles: Roles,
        packing: Packing,
        longest: int,
        table: Table | None = None,
        teacher: Teacher | None = None,
    ):
        self.roles, self.packing, self.table, self.teacher = roles, packing, table, teacher
        self.longest = longest
        self.references: list[torch.Tensor] = []
        """What the reference said since the loop last cleared it, for the tape."""

    def arrange(self, items: Sequence[T]) -> Update[T]:
        return self.packing(items)

    def logprobs(self, update: Update[Any]) -> torch.Tensor:
        return self.roles.logprobs(update.batches, update.targets)

    def reference_logprobs(self, update: Update[Any]) -> torch.Tensor:
        if self.table is not None:
            said = self.table.take("logprobs", self.table.rows(update))
        else:
            said = self.roles.reference_logprobs(update.batches, update.targets)
        self.references.append(said)
        return said

    def taught(self, update: Update[Any]) -> list[MicroBatch]:
        if self.table is None:
            assert self.teacher is not None
            return [replace(batch, teacher=self.teacher) for batch in update.batches]
        return [replace(batch, teacher=_Remembered(self.table, self.table.rows(update))) for batch in update.batches]


@dataclass(frozen=True)
class _Remembered:
    """A teacher that has said everything before."""

    table: Table
    rows_K: np.ndarray

    def __call__(self, batch: MicroBatch) -> Likeliest:
        rows, place = self.rows_K[batch.index_K.numpy()], batch.targets_K.device
        return Likeliest(self.table.take("ids", rows).long().to(place), self.table.take("logprobs", rows).to(place))


def consulted(session: Session, prepared: Prepared) -> Consulted:
    """Load what the method asks, or what it says once and for all."""
    recipe, world = session.recipe, session.world
    packing = Packing(world, recipe.batch.tokens, recipe.batch.rows, prepared.pad_id)
    roles = Roles(session.learner, session.reference, None, world, session.torch_device)
    asked = Consulted(roles, packing, prepared.limit)
    if reference_kind(recipe) == "disk":
        asked.table = _reference_table(session, prepared, packing)
    if recipe.method == "distill":
        if recipe.distill.top_k is not None:
            asked.table = _teacher_table(session, prepared, packing, recipe.distill.top_k)
        else:
            asked.teacher = load_teacher(recipe, session.device, world, session.torch_device)
    return asked


def _reference_table(session: Session, prepared: Prepared, packing: Packing) -> Table:
    recipe, world, place = session.recipe, session.world, session.torch_device
    models: list[Policy] = []

    def compute(items: Sequence[Item]) -> Columns:
        if not models:
            models.append(load_reference(recipe, session.device, world, place))
        update = packing(items)
        roles = Roles(session.learner, models[0], None, world, place)
        return {"logprobs": roles.reference_logprobs(update.batches, update.targets)}

    shapes = {"logprobs": Shape("float32")}
    return _table(
        session, prepared, "reference", reference_folder(recipe), {"dtype": recipe.model.dtype}, shapes, compute
    )


def _teacher_table(session: Session, prepared: Prepared, packing: Packing, k: int) -> Table:
    recipe, world, place = session.recipe, session.world, session.torch_device
    k = min(k, prepared.config.vocab_size)
    temperature = recipe.distill.temperature
    models: list[Teacher] = []

    @torch.no_grad()
    def compute(items: Sequence[Item]) -> Columns:
        if not models:
            models.append(load_teacher(recipe, session.device, world, place))
        update = packing(items)
        ids, logprobs = torch.zeros(update.targets, k), torch.zeros(update.targets, k + 1)
        with evaluating(models[0]):
            for batch in update.batches:
                whole = models[0](to_device(batch, place))
                assert isinstance(whole, Whole)
                top = likeliest(whole, k, temperature)
                # As floats: words are numbered far below what fp32 counts exactly, and ranks add up one type.
                ids[batch.index_K], logprobs[batch.index_K] = top.ids_Kk.float().cpu(), top.logprobs_Kk1.cpu()
        return {"ids": world.sum_tensor(ids).int(), "logprobs": world.sum_tensor(logprobs)}

    shapes = {"ids": Shape("int32", k), "logprobs": Shape("float32", k + 1)}
    asked = {"dtype": recipe.model.dtype, "top_k": k, "temperature": temperature}
    return _table(session, prepared, "teacher", str(recipe.distill.teacher), asked, shapes, compute)


def _table(
    session: Session,
    prepared: Prepared,
    kind: str,
    path: str,
    asked: dict[str, Any],
    shapes: dict[str, Shape],
    compute: Any,
) -> Table:
    items: list[Item] = [*prepared.train.items, *(prepared.val.items if prepared.val else [])]
    examples = [example for item in items for example in item.examples]
    identity = fingerprint(path, examples, asked)
    parent = Path(session.recipe.run.folder) / "tables"
    with session.console.task(f"What the {kind} says of every row", len(items)) as task:
        return open_table(parent, kind, identity, shapes, items, compute, session.world, task.advance)
