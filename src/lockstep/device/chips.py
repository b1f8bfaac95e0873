"""Properties of accelerator chips: memory, FLOP/s, link speeds, and the measured efficiency of lockstep's code.

The table also covers chips that this machine does not have. Values are those of the vendors unless a comment says that
they were measured. Each entry names its sources. A device is what torch counts as one device, such as one of the two
dies of an Ascend 910C. Link speeds are in bytes per second, in one direction, for one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from math import log


@dataclass(frozen=True)
class Reached:
    """Measured efficiency of lockstep's kernels on a chip."""

    attention: tuple[tuple[float, float], ...]
    """Speed of attention over packed rows, forward and backward, relative to large matmuls: pairs of the length of the
    rows and the speed, in ascending order of lengths. `attention_at` interpolates."""
    layer_passes: float
    """Time in which a training update reads and writes the activations saved for backward, as a multiple of the time to
    read them once from memory."""
    head_passes: float
    """Time in which a training update reads and writes the fp32 logits, as a multiple of the time to read them once."""
    optimizer_passes: float
    """Time of an AdamW step, as a multiple of the time to read its bytes from memory."""
    decoding: float
    """Speed of matmuls in a decoding step, relative to large matmuls."""
    reading: float
    """Speed of reading the KV cache, relative to a memory copy."""
    layer_seconds: float
    """Seconds of overhead per layer of a decoding step, in addition to the time of arithmetic and memory access."""

    def attention_at(self, length: float) -> float:
        """Returns the relative speed of attention over rows of this length: linear in the logarithm of the length
        between two measured lengths, and constant outside."""
        for (short, low), (long, high) in pairwise(self.attention):
            if short < length <= long:
                return low + (high - low) * log(length / short) / log(long / short)
        return self.attention[0][1] if length <= self.attention[0][0] else self.attention[-1][1]


# Measured on one H200 with bf16. `decoding`, `reading` and `layer_seconds` are fitted to six rows of
# bench/results/engine_h200_*.json, with an error of at most 6 %. `attention` for 1,024 tokens (heads of 64) and
# `optimizer_passes` come from the profile of an update of 125 ms in docs/speed.md: attention takes 17 ms (lower bound
# 2.7 ms), and the optimizer takes 9 ms (lower bound 3.4 ms). `layer_passes` and `head_passes` are fitted to the
# remaining time in the two rows of bench/results/sft_h200_bf16_*_1024.json.
#
# `attention` for longer rows (heads of 128) is not a measurement of the kernel. It is fitted to the time of two updates
# of bench/results/low_memory_h200.json, tiled-32k and long-128k. Other programs used the card during them, so the two
# values are lower bounds. The kernel alone reaches 0.34 to 0.36 (bench/results/attention_lengths_h200.json).
H200_REACHED = Reached(
    attention=((1024, 0.16), (32768, 0.26), (131072, 0.312)),
    layer_passes=4.43,
    head_passes=11.0,
    optimizer_passes=2.6,
    decoding=0.748,
    reading=1.07,
    layer_seconds=50.8e-6,
)
# One CPU core with fp32. The numbers are fitted to rows of bench/results/predictions_cpu.json (see
# bench/predictions.py).
CORE_REACHED = Reached(
    attention=((256, 0.228),),
    layer_passes=77.0,
    head_passes=0.0,
    optimizer_passes=1.0,
    decoding=1.0,
    reading=1.0,
    layer_seconds=4.36e-3,
)
# Large matmuls and copies reach 790 TFLOP/s and 4.3 TB/s on an H200, where the vendor states 989 TFLOP/s and 4.8 TB/s.
# The fractions 790 / 989 and 4.3 / 4.8 are used for every chip without a measurement.
PRODUCTS, COPIES = 790 / 989, 4.3 / 4.8
# Assumed fraction of a link's speed that a large collective operation reaches. It was not measured.
LINKS = 0.75


@dataclass(frozen=True)
class ChipFacts:
    """The properties of one chip."""

    name: str
    kind: str
    """Name of the chip's device class in `device/select.py`."""
    memory: int | None
    """Memory in bytes, or None for the CPU entry, because all processes of a machine share its memory."""
    half: float | None
    """Dense matrix FLOP/s in bfloat16, or None if unknown."""
    single: float | None
    """Dense matrix FLOP/s in float32, as torch computes it by default."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    inside: float
    """Speed of the link to the other devices of the node."""
    between: float | None
    """Speed of the link to other nodes, or None if no source states it. Clusters of several nodes are then refused."""
    host: float
    """Speed of the link to host memory."""
    reached: Reached = H200_REACHED
    measured: bool = False
    """Whether `reached` and the speeds of matmuls and memory were measured on this chip."""
    published: tuple[int, int] | None = None
    """The least and the greatest error of the time predicted for steps and updates that other frameworks published for
    this chip, in percent (`python bench/predictions.py`)."""
    most_devices: int | None = None
    """Number of devices per node. The speed `inside` applies to at most this many devices."""

    @property
    def products(self) -> float:
        """The fraction of `half` or `single` (FLOP/s) that a large matmul reaches, or 1 if `half` and `single` were
        measured."""
        return 1.0 if self.measured else PRODUCTS

    @property
    def copies(self) -> float:
        return 1.0 if self.measured else COPIES

    def flops(self, size: int) -> float | None:
        """Returns the FLOP/s of large matmuls with elements of `size` bytes, or None if they are unknown."""
        peak = self.single if size == 4 else self.half
        return None if peak is None else peak * self.products

    @property
    def memory_speed(self) -> float:
        return self.bandwidth * self.copies


_GB = 10**9
CHIPS = {
    chip.name: chip
    for chip in (
        # H200: the memory size is the value that torch reports (bench/results/memory_h200.json). The speeds of matmuls
        # and copies were measured; the vendor states 989 TFLOP/s and 4.8 TB/s. `single` is the vendor's value times the
        # measured fraction PRODUCTS. The links are NVLink 4 with 900 GB/s in both directions together, ConnectX-7 with
        # 400 Gbit/s per GPU, and PCIe 5 x16. Sources: https://www.nvidia.com/en-us/data-center/h200/, and for the links
        # github.com/mlcommons/inference_results_v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json.
        ChipFacts(
            "h200",
            "cuda",
            memory=150_109_880_320,
            half=790e12,
            single=67e12 * PRODUCTS,
            bandwidth=4.3e12,
            inside=450 * _GB,
            between=50 * _GB,
            host=64 * _GB,
            measured=True,
            published=(-13, 60),
            most_devices=8,
        ),
        # H100 SXM: 80 GB, 3.35 TB/s, 989 TFLOP/s dense, NVLink with 900 GB/s in both directions together
        # (https://www.nvidia.com/en-us/data-center/h100/). A DGX H100 has one ConnectX-7 of 400 Gbit/s per GPU.
        ChipFacts(
            "h100",
            "cuda",
            memory=80 * 2**30,
            half=989e12,
            single=67e12,
            bandwidth=3.35e12,
            inside=450 * _GB,
            between=50 * _GB,
            host=64 * _GB,
            published=(-44, 28),
            most_devices=8,
        ),
        # H20: 96 GB, 4.0 TB/s, 148 TFLOP/s dense in bfloat16, NVLink with 900 GB/s in both directions together
        # (https://willitrunai.com/es/gpus/h20-96gb), 44 TFLOP/s in fp32 (https://zangshuxian.com/new/674733024499207168).
        # The other links are assumed to be those of the H100.
        ChipFacts(
            "h20",
            "cuda",
            memory=96 * 2**30,
            half=148e12,
            single=44e12,
            bandwidth=4.0e12,
            inside=450 * _GB,
            between=50 * _GB,
            host=64 * _GB,
            published=(-49, -49),
            most_devices=8,
        ),
        # Ascend 910B3, the slowest 910B with 64 GB. The FLOP/s are from `device/npu.py`. The memory speed is 1.6 TB/s.
        # Each device has 7 HCCS links of 28 GB/s per direction to the 7 other devices of its node
        # (https://arthurchiao.art/blog/gpu-advanced-notes-2-zh/), and 200 Gbit/s RoCE. The link to the host has 17
        # GB/s, measured in github.com/xiaojia151/Hixl, benchmarks/A2_benchmark_performance.md, which also measured 19.3
        # GB/s on one HCCS link. Lockstep has not run on this hardware.
        ChipFacts(
            "atlas-800t-a2",
            "npu",
            memory=64 * 2**30,
            half=294.9e12,
            single=None,
            bandwidth=1.6e12,
            inside=196 * _GB,
            between=25 * _GB,
            host=17 * _GB,
            published=(-58, -58),
            most_devices=8,
        ),
        # One die of an Ascend 910C in a super-node of 48 nodes with 16 dies each (Atlas 900 A3, CloudMatrix384).
        # Source: https://arxiv.org/abs/2506.12708. A die has 64 GB at 1.6 TB/s, and 196 GB/s per direction on the
        # unified bus, both inside a node and between nodes. The FLOP/s are from `device/npu.py`. The link to the host
        # is assumed to be that of the 910B. Lockstep has not run on this hardware.
        ChipFacts(
            "atlas-a3",
            "npu",
            memory=64 * 2**30,
            half=353.9e12,
            single=None,
            bandwidth=1.6e12,
            inside=196 * _GB,
            between=196 * _GB,
            host=17 * _GB,
            published=(-95, -46),
            most_devices=16,
        ),
        # One core of an Arm Neoverse N1, which has no bfloat16 arithmetic. A matmul of 1,024^3 in fp32 and a copy were
        # measured with torch 2.13 on one thread. Processes of a machine share its memory. The link speed between
        # processes (gloo over the loopback) is a guess.
        ChipFacts(
            "cpu",
            "cpu",
            memory=None,
            half=None,
            single=35.5e9,
            bandwidth=34 * _GB,
            inside=1 * _GB,
            between=None,
            host=34 * _GB,
            reached=CORE_REACHED,
            measured=True,
        ),
    )
}


def chip_named(name: str) -> ChipFacts | None:
    return CHIPS.get(name.lower())


def nearest_chip(name: str) -> str | None:
    return next(iter(get_close_matches(name.lower(), CHIPS, n=1, cutoff=0.5)), None)
