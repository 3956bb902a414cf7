"""Prints what PyTorch's DataLoader, with two workers, reads from data sets of files.

Jobs are `{"folders": DIR}`, torchvision's ImageFolder, and `{"samples": DIR}`, a data set of sample directories.
Of each item there is its path below DIR, its class if any, and the SHA-256 of what its files hold.
`{"numbers": DIR}` asks ImageFolder for the numbers that it gives to classes, and to each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from torch.utils.data import DataLoader, Dataset
from with_torchvision import make_importable

make_importable()
from torchvision.datasets import ImageFolder  # noqa: E402  (only then)
from torchvision.datasets.folder import default_loader  # noqa: E402


class Folders(ImageFolder):
    """The content as it is, after a look at the decoded image."""

    def __getitem__(self, number: int) -> tuple[str, str, str]:
        path, label = self.samples[number]
        assert default_loader(path).mode == "RGB"
        return os.path.relpath(path, self.root), self.classes[label], digest(path)


class Samples(Dataset):
    """Every directory without further directories is a sample."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.places = sorted(place for place, folders, names in os.walk(root) if names and not folders)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[str, str, str]:
        place = self.places[number]
        content = {name: digest(os.path.join(place, name)) for name in sorted(os.listdir(place))}
        return os.path.relpath(place, self.root), "", json.dumps(content)


def digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def numbers(root: str) -> dict[str, Any]:
    data = ImageFolder(root)
    return {
        "class_to_idx": data.class_to_idx,
        "labels": sorted((os.path.relpath(path, root), label) for path, label in data.samples),
    }


def items(job: dict[str, str]) -> list[list[str]] | dict[str, Any]:
    if "numbers" in job:
        return numbers(job["numbers"])
    data: Any = Folders(job["folders"]) if "folders" in job else Samples(job["samples"])
    batches = DataLoader(data, batch_size=3, shuffle=True, num_workers=2, multiprocessing_context="fork")
    return sorted([path, label, content] for batch in batches for path, label, content in zip(*batch, strict=True))


if __name__ == "__main__":
    print(json.dumps([items(job) for job in json.loads(sys.argv[1])]))
