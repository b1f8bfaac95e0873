"""The table of offline methods. A new offline method is a new entry with a data reader and an objective.

Online methods are named sets of recipe defaults (`recipe/methods.py`).
"""

from __future__ import annotations

from lockstep.methods import distill, kto, pairs, prm, rm, sft
from lockstep.methods.base import Method

_PAIRS = Method(reader=pairs.reader, objective=pairs.Pairwise, score_rows=pairs.scores)

METHODS: dict[str, Method] = {
    "sft": Method(reader=sft.reader, objective=sft.Supervised, uniform_gradient=True),
    "rm": Method(
        reader=rm.reader,
        objective=rm.Ranked,
        model="value",
        usage=("use it", "reward.model: {run}/export"),
        score_rows=rm.scores,
    ),
    "prm": Method(
        reader=prm.reader,
        objective=prm.Stepwise,
        usage=("judge with it", "lockstep eval {run} STEPS"),
        files=prm.files,
        score_rows=prm.scores,
    ),
    "dpo": _PAIRS,
    "ipo": _PAIRS,
    "simpo": _PAIRS,
    "orpo": _PAIRS,
    "cpo": _PAIRS,
    "kto": Method(reader=kto.reader, objective=kto.KtoObjective, check=kto.check),
    "distill": Method(reader=sft.reader, objective=distill.Distilled),
}
