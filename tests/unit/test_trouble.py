"""A failed collective is an error of another process, not of the model or the device."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from commands import warm_python
from hang import HANG
from lockstep.device.device_errors import is_lost_peer, refuse_trouble

# The second rank goes away without a word; the first asks it for a sum.
TWO_RANKS = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from lockstep.device.device_errors import is_lost_peer, refuse_trouble
child = os.fork()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(child == 0), world_size=2,
                        timeout=timedelta(seconds=60))
dist.barrier()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    try:
        refuse_trouble(error, torch.device("cpu"))
    except RuntimeError as raised:
        print(is_lost_peer(error), raised is error)
os._exit(0)
"""


def test_a_rank_that_is_gone_is_no_fault_of_the_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [*warm_python(), "-u", "-c", TWO_RANKS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("error", [RuntimeError("shape '[3]' is invalid"), ValueError("Connection closed by peer")])
def test_what_the_model_does_wrong_stays_its_own(error: Exception) -> None:
    assert not is_lost_peer(error)
    refuse_trouble(error, torch.device("cpu"))
