"""Print a `train` process's first GPU memory requests; run by test_memory.py on the null device."""

import json

from modernbert_train.distributed.visible_gpus import use_expandable_segments
from tests.cuda_build.null import Account

if __name__ == "__main__":
    use_expandable_segments()
    import torch

    torch.empty(1, device="cuda")
    print(json.dumps([name for name in Account().read() if name in ("cudaMalloc", "cuMemCreate")]))
