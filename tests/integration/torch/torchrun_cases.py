"""A rank of rank_cases under torchrun: torchrun_cases.py CASE FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))

import rank_cases

from partsong.engines.torch_distributed import TorchDistributed

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    rank_cases.main(TorchDistributed, TorchDistributed().communicator(), *sys.argv[1:])
    distributed.destroy_process_group()
