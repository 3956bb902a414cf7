"""Runs a program, given by its path and arguments, with torchvision.

The wheel of torchvision that registries have is built for CUDA. Beside PyTorch without CUDA its compiled operators
cannot be loaded, and then the import fails at two of them that it wants to describe. Its data sets use none: it is
enough that the two are declared.
"""

from __future__ import annotations

import runpy
import sys

from torch import library


def make_importable() -> None:
    try:
        import torchvision  # noqa: F401  (to see whether it goes)
    except RuntimeError:
        for operator in ("nms", "qnms"):
            library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


if __name__ == "__main__":
    make_importable()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
