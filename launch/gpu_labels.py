"""The label that NVIDIA's GPU feature discovery gives a Kubernetes node: nvidia.com/gpu.product, by the GPU's name.

The label's value is the name that nvidia-smi shows, with `-` for each space.
"""

from __future__ import annotations

import re

from modernbert_train.errors import ConfigError

LABELS = {
    "b200": "NVIDIA-B200",
    "h200": "NVIDIA-H200",
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h100-pcie": "NVIDIA-H100-PCIe",
    "a100": "NVIDIA-A100-SXM4-80GB",
    "a100-40gb": "NVIDIA-A100-SXM4-40GB",
    "a100-pcie": "NVIDIA-A100-80GB-PCIe",
    "l40s": "NVIDIA-L40S",
    "rtx4090": "NVIDIA-GeForce-RTX-4090",
}


def product_label(gpu: str) -> str:
    """The label's value for a name as in `plan --gpu`, or for the value itself.

    Raises:
        ConfigError: neither: no node would have it, and the job would wait for ever.
    """
    if gpu.lower() in LABELS:
        return LABELS[gpu.lower()]
    if re.fullmatch(r"(NVIDIA|Tesla|Quadro)-[A-Za-z0-9._-]{0,55}[A-Za-z0-9]", gpu):
        return gpu
    raise ConfigError(
        f"launch.gpu={gpu}: on Kubernetes one of {', '.join(LABELS)}, or the label of a node as it is; "
        "`kubectl get nodes -L nvidia.com/gpu.product` shows them."
    )
