"""GPUs: datasheet rates, link speeds, assumed prices.

Peaks are the datasheets' dense bf16 rates with fp32 accumulation; memory is as shown by nvidia-smi or rocm-smi. Links
are one way. An MI250X is two GPUs to torch and to Slurm, each half of it; one of its links counts, and half its
network. Prices are round numbers for on-demand rental, assumed in 2026-11: override them with --price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

PRICE_DATE = "2026-11"
MIB = 1 << 20
_OF_DRIVER = 0.97  # torch reports 0.985 to 0.994 of nvidia-smi's memory: it excludes the driver's part


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in nodes of `per_node`.

    Attributes:
        label: its usual name.
        peak_flops: dense bf16 FLOP/s.
        memory_bytes: memory of one GPU.
        memory_rate: bytes/s of its memory.
        node_link: bytes/s, one way, from one GPU to the others of its node.
        network_link: bytes/s, one way, of one GPU's share of the network between nodes.
        price: US dollars for one GPU for one hour; an assumption.
        per_node: GPUs in a node.
        bf16: True if it computes in bf16.
        rocm: True for AMD's. The roofline's shares were measured on NVIDIA GPUs, so these are shown by name only.
    """

    label: str
    peak_flops: float
    memory_bytes: int
    memory_rate: float
    node_link: float
    network_link: float
    price: float
    per_node: int = 8
    bf16: bool = True
    rocm: bool = False


@dataclass(frozen=True)
class RunGpus:
    """The GPUs that a run computes on.

    Attributes:
        label: their name; if they differ, the smallest one's.
        memory_bytes: memory of the smallest.
        per_node: number in one machine.
        bf16: True if all compute in it.
        lacks: reasons why one of them supports neither compiled layers nor fused kernels, a few words each.
    """

    label: str
    memory_bytes: int
    per_node: int = 8
    bf16: bool = True
    lacks: tuple[str, ...] = ()

    @classmethod
    def of_kind(cls, gpu: HasMemory) -> RunGpus:
        """Return GPUs of one kind, without known limits."""
        return gpu if isinstance(gpu, cls) else cls(gpu.label, gpu.memory_bytes, gpu.per_node, gpu.bf16)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> RunGpus:
        """Read the result of `asdict`."""
        return replace(cls(**tree), lacks=tuple(tree["lacks"]))

    def hold_as(self, other: RunGpus, ranks: int) -> bool:
        """True if these GPUs are of the other ones' kind, and a run of `ranks` ranks that fits those fits these too."""
        like = replace(self, memory_bytes=other.memory_bytes, per_node=other.per_node) == other
        shared = self.per_node >= min(ranks, other.per_node)
        return like and shared and self.memory_bytes > _OF_DRIVER * other.memory_bytes

    @classmethod
    def of_ranks(cls, gpus: list[RunGpus]) -> RunGpus:
        """Combine the GPUs of all ranks; an ability counts only if all of them have it."""
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        lacks = dict.fromkeys(reason for gpu in gpus for reason in gpu.lacks)
        return cls(
            smallest.label, smallest.memory_bytes, smallest.per_node, all(gpu.bf16 for gpu in gpus), tuple(lacks)
        )


HasMemory = Gpu | RunGpus

GPUS: dict[str, Gpu] = {
    "b200": Gpu("B200", 2250e12, 183_359 * MIB, 8.0e12, 900e9, 50e9, 5.00),
    "h200": Gpu("H200", 989e12, 143_771 * MIB, 4.8e12, 450e9, 50e9, 3.50),
    "h100": Gpu("H100 SXM", 989e12, 81_559 * MIB, 3.35e12, 450e9, 50e9, 2.50),
    "h100-pcie": Gpu("H100 PCIe", 756e12, 81_559 * MIB, 2.0e12, 64e9, 25e9, 2.20),
    "a100": Gpu("A100 80GB", 312e12, 81_920 * MIB, 2.04e12, 300e9, 25e9, 1.50),
    "l40s": Gpu("L40S", 362e12, 46_068 * MIB, 0.864e12, 32e9, 12.5e9, 1.00),
    "rtx4090": Gpu("RTX 4090", 165e12, 24_564 * MIB, 1.008e12, 16e9, 3.1e9, 0.40),
    "mi300x": Gpu("MI300X", 1307.4e12, 196_592 * MIB, 5.3e12, 448e9, 50e9, 2.00, rocm=True),
    "mi250x": Gpu("half an MI250X", 191.5e12, 65_520 * MIB, 1.6e12, 50e9, 12.5e9, 0.65, rocm=True),
}
HOPPER = ("h200", "h100", "h100-pcie")
# name in torch and nvidia-smi -> key in GPUS; only names that share the datasheet's rate
DEVICE_NAMES = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI250X": "mi250x",
}
