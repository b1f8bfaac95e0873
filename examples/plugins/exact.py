"""A device: a CPU that computes only in full precision."""

from lockstep.device.cpu import Cpu
from lockstep.device.select import DEVICES


class ExactCpu(Cpu):
    name = "exact"
    fused_optimizer = False

    @property
    def autocast_dtypes(self):
        return ()


DEVICES["exact"] = ExactCpu
