"""Dynamo's worker where PyTorch has no CUDA: the program that test_dynamo.py runs.

Dynamo imports torchvision for models with images. Its wheels are built for CUDA: elsewhere their
library is not loaded, and the import ends where it describes two operators of that library, unless
they are declared before. No text model calls them. The directory of torchvision comes in
TORCHVISION, and not in PYTHONPATH: vLLM's other programs import it wherever they find it, and lack
the declarations.
"""

from __future__ import annotations

import os
import sys

import torch

OPERATORS = torch.library.Library("torchvision", "DEF")  # declared for as long as this is there
for _name in ("nms", "qnms"):
    OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(os.environ["TORCHVISION"])

if __name__ == "__main__":  # vLLM's engine is a process that imports this module by another name
    from dynamo.vllm.main import main

    main()
