"""What each rank of test_held.py does: a run, and the most bytes of tensors that it held in each stage of it.

    torchrun --nproc-per-node 2 held_ranks.py FOLDER WORDS

The words are those of `lockstep`. The host has fused kernels of its own here, so that what devices do with theirs is
done too, and checkpoints are in small files. Every rank writes `FOLDER/held.RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from allocated import allocated, marked
from host_kernels import HOST
from lockstep.cli import main
from lockstep.kernels.fused import FUSED
from lockstep.kernels.fused_modules import plug_in
from lockstep.parallel import sharded_files as stored
from lockstep.train import offline, training
from lockstep.train.checkpointing import Checkpointer

if __name__ == "__main__":
    folder, *sys.argv[1:] = sys.argv[1:]
    FUSED["sdpa"] = lambda model, gather: plug_in(model, HOST, gather)
    stored.FILE_BYTES = 2**17
    training.load_models = marked("load", training.load_models)
    offline.train_step = marked("update", offline.train_step)
    Checkpointer.save = marked("save", Checkpointer.save)  # type: ignore[method-assign]
    Checkpointer.resume = marked("resume", Checkpointer.resume)  # type: ignore[method-assign]
    status: str | int | None = None
    with allocated() as held:
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    Path(folder, f"held.{os.environ['RANK']}.json").write_text(json.dumps(held), encoding="utf-8")
    sys.exit(status)
