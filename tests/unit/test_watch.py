"""What a rank tells of where it is."""

from __future__ import annotations

import json

import torch.distributed as dist

from hang import wait_until
from lockstep.parallel.watch import Told, Watch


def test_a_step_is_told_when_it_begins_and_named_after_its_end() -> None:
    """Steps may be far shorter than the pace of telling, which is 250 s here."""
    store = dist.HashStore()
    watch = Watch(store, rank=0, size=1, after=1000)

    def told() -> str:
        return Told(*json.loads(store.get("0"))).where

    try:
        wait_until(lambda: told() == "the start of the run")
        for step in ("step 1", "step 2"):
            with watch.stage(step):
                wait_until(lambda wanted=step: told() == wanted)
                with watch.stage("gen"):
                    assert watch._moment.where == f"{step}, gen"
            with watch.collective("a gathering"):
                assert watch._moment.where == f"a gathering, in what comes after {step}"
    finally:
        watch.close()
    assert not any(thread.is_alive() for thread in watch._threads)
