"""Properties of chips, also of absent ones: memory, FLOP/s, links, and the measured efficiency of our code.

Values are those of the vendors unless a comment says that they were measured; each row names its sources. A device is
what torch counts as one device, such as one of the two dies of an Ascend 910C. Links are in bytes per second, in one
direction, of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Reached:
    """Measured efficiency of lockstep's kernels on a chip."""

    attention: float
    """Speed of attention over packed rows, forward and backward, relative to large matmuls."""
    layer_passes: float
    """How often an update reads or writes the activations saved for backward, at memory speed."""
    head_passes: float
    """How often an update reads or writes the fp32 logits, at memory speed."""
    optimizer_passes: float
    """Time of an AdamW step relative to the time to read its bytes."""
    decoding: float
    """Speed of matmuls in a decoding step, relative to large matmuls."""
    reading: float
    """Speed of reading the KV cache relative to a copy."""
    layer_seconds: float
    """Overhead per layer of a decoding step, besides arithmetic and memory."""
    micro_batch_seconds: float = 0.0
    """Overhead per layer of a micro-batch's forward and backward pass."""


# One H200 with bf16. Decoding: the three numbers are fitted to six rows of bench/results/engine_h200_*.json, with an
# error of at most 2.2 %. Attention and AdamW: from the profile of an update in docs/speed.md (17 and 9 of 125 ms, lower
# bounds 2.7 and 3.4). Reads and writes of activations and logits: fitted to the remaining time in the two rows of
# bench/results/sft_h200_bf16_*_1024.json.
H200_REACHED = Reached(
    attention=0.16,
    layer_passes=4.43,
    head_passes=11.0,
    optimizer_passes=2.6,
    decoding=0.748,
    reading=1.07,
    layer_seconds=50.8e-6,
)
# One core with fp32: fitted to rows of bench/results/predictions_cpu.json (see bench/predictions.py).
CORE_REACHED = Reached(
    attention=0.228,
    layer_passes=77.0,
    head_passes=0.0,
    optimizer_passes=1.0,
    decoding=1.0,
    reading=1.0,
    layer_seconds=4.36e-3,
)
# Large matmuls and copies on the H200 (790 TFLOP/s and 4.3 TB/s) as shares of the vendor's 989 and 4.8. Used for every
# chip without a measurement.
PRODUCTS, COPIES = 790 / 989, 4.3 / 4.8
# Share of a link's speed that a large collective operation reaches. Not measured by us.
LINKS = 0.75


@dataclass(frozen=True)
class ChipFacts:
    """The properties of one chip."""

    name: str
    kind: str
    """Name of its device class in `device/select.py`."""
    memory: int | None
    """Memory in bytes; None for the current machine, whose processes share its memory."""
    half: float | None
    """Dense matrix FLOP/s in bfloat16; None if unknown."""
    single: float | None
    """Dense matrix FLOP/s in float32, as torch computes it by default."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    inside: float
    """Speed of the link to the other devices of the node."""
    between: float
    """Speed of the link to other nodes."""
    host: float
    """Speed of the link to host memory."""
    reached: Reached = H200_REACHED
    measured: bool = False
    """Whether `reached` and the speeds of matmuls and memory were measured on this chip."""
    most_devices: int | None = None
    """Devices per node; `inside` applies to at most this many devices."""
    most_nodes: int | None = None
    """Number of nodes up to which `between` applies: the largest published cluster with this chip."""

    @property
    def products(self) -> float:
        """The share of the vendor's FLOP/s that a large matmul reaches."""
        return 1.0 if self.measured else PRODUCTS

    @property
    def copies(self) -> float:
        return 1.0 if self.measured else COPIES

    def flops(self, size: int) -> float | None:
        """Returns the FLOP/s of large matmuls with elements of `size` bytes; None if unknown."""
        peak = self.single if size == 4 else self.half
        return None if peak is None else peak * self.products

    @property
    def memory_speed(self) -> float:
        return self.bandwidth * self.copies


_GB = 10**9
CHIPS = {
    chip.name: chip
    for chip in (
        # Memory as reported by torch (bench/results/memory_h200.json). Matmuls and copies were measured; the vendor
        # states 989 TFLOP/s and 4.8 TB/s. NVLink 4: 900 GB/s both ways; ConnectX-7: 400 Gbit/s per GPU; PCIe 5 x16.
        # float32 is the vendor's value times the same share. https://www.nvidia.com/en-us/data-center/h200/; links in
        # github.com/mlcommons/inference_results_v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json. Nodes: as
        # for the H100, which has the same network adapters.
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
            most_devices=8,
            most_nodes=3072,
        ),
        # SXM. https://www.nvidia.com/en-us/data-center/h100/: 80 GB, 3.35 TB/s, 989 TFLOP/s dense, NVLink 900 GB/s both
        # ways. DGX H100: a ConnectX-7 of 400 Gbit/s per GPU. 3,072 nodes: Meta's published clusters of 24,576 GPUs,
        # https://engineering.fb.com/2024/03/12/data-center-engineering/building-metas-genai-infrastructure/.
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
            most_devices=8,
            most_nodes=3072,
        ),
        # SXM. https://www.nvidia.com/en-us/data-center/a100/: 80 GB, 2,039 GB/s, 312 TFLOP/s, NVLink 600 GB/s both
        # ways. DGX A100: a ConnectX-6 of 200 Gbit/s per GPU; PCIe 4 x16. 2,000 nodes: Meta's RSC,
        # https://ai.meta.com/blog/supercomputer-meta-research-cluster-2023/.
        ChipFacts(
            "a100-80g",
            "cuda",
            memory=80 * 2**30,
            half=312e12,
            single=19.5e12,
            bandwidth=2.039e12,
            inside=300 * _GB,
            between=25 * _GB,
            host=32 * _GB,
            most_devices=8,
            most_nodes=2000,
        ),
        # Ascend 910B3, the slowest with 64 GB. Arithmetic: `device/npu.py`. Memory 1.6 TB/s; 7 HCCS links of
        # 28 GB/s each way to the 7 others (392 GB/s both ways): https://arthurchiao.art/blog/gpu-advanced-notes-2-zh/;
        # 200 Gbit/s RoCE per device. To the host: 17 GB/s, measured by others (github.com/xiaojia151/Hixl,
        # benchmarks/A2_benchmark_performance.md, which has 19.3 GB/s on one HCCS link). 1,024 nodes: the 8,192 devices
        # of https://arxiv.org/abs/2504.07866. Not run on that hardware here.
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
            most_devices=8,
            most_nodes=1024,
        ),
        # A die of an Ascend 910C in a super-node of 48 nodes of 16 dies (Atlas 900 A3, CloudMatrix384):
        # https://arxiv.org/abs/2506.12708: 64 GB and 1.6 TB/s per die; unified bus of 196 GB/s per die and direction,
        # inside a node and between nodes. Arithmetic: `device/npu.py`. To the host: as for 910B. Not run by us.
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
            most_devices=16,
            most_nodes=48,
        ),
        # One core of an Arm Neoverse N1, measured with torch 2.13 on one thread: a matmul of 1,024^3 in fp32, a copy.
        # It has no bfloat16 arithmetic. Processes of a machine share its memory. The speed of the links between them
        # (gloo over the loopback) and the number of nodes are guesses.
        ChipFacts(
            "cpu",
            "cpu",
            memory=None,
            half=None,
            single=35.5e9,
            bandwidth=34 * _GB,
            inside=1 * _GB,
            between=1 * _GB,
            host=34 * _GB,
            reached=CORE_REACHED,
            measured=True,
            most_nodes=64,
        ),
    )
}


def chip_named(name: str) -> ChipFacts | None:
    return CHIPS.get(name.lower())


def nearest_chip(name: str) -> str | None:
    return next(iter(get_close_matches(name.lower(), CHIPS, n=1, cutoff=0.5)), None)
