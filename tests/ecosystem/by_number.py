"""The samples that wids finds by number, for a JSON list of indexes: the SHA-256 of each column by its name."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import wids


def samples(index: str) -> list[dict[str, str]]:
    data = wids.ShardListDataset(index, transformations=[])
    found = [data[number] for number in reversed(range(len(data)))]
    return [plain(sample) for sample in reversed(found)]


def plain(sample: dict[str, Any]) -> dict[str, str]:
    columns = {name: value.read() for name, value in sample.items() if not name.startswith("__")}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in columns.items()}
    return {"__key__": sample["__key__"], **digests}


if __name__ == "__main__":
    print(json.dumps([samples(index) for index in json.loads(sys.argv[1])]))
