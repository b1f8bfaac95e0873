"""What a difference in a key does to the curves of two runs."""

from __future__ import annotations

from typing import Literal, NamedTuple

Weight = Literal["blocks", "matters", "harmless"]


class Effect(NamedTuple):
    """`blocks`: something else is computed, so the curves mean different things. `matters`: the same is meant, and the
    curves differ by rounding, order or chance. `harmless`: the curves must not change, which the tests hold."""

    weight: Weight
    why: str


NAME = Effect("harmless", "only a name")
COLUMN = Effect("matters", "other columns may be read; the counts of kept rows and tokens tell")
LIMIT = Effect("matters", "other rows may be cut or left out; the counts of kept rows and tokens tell")
FOLDER = Effect("matters", "another folder: other weights in it would give other values")
STORED = Effect("harmless", "what is stored or shown, not what is computed")
UPDATE = Effect("blocks", "another update is made from the same gradient")
RATE = Effect("blocks", "the learning rate at the same step is another")
GROUPS = Effect("blocks", "an update sees another number of rows: noise, and progress a step, are others")
SAMPLING = Effect("blocks", "responses are drawn from another distribution")
REWARD = Effect("blocks", "the same response earns another reward")
CACHE = Effect("harmless", "memory and speed of generation; the drawn tokens are the same")
MICRO = Effect("harmless", "how an update is cut into pieces; there is one division over all of it")
SPREAD = Effect("harmless", "where the parts of a model are held; the same sums are taken over all ranks")
