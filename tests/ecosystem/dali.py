"""Prints what pipelines of NVIDIA DALI read on a CPU, one sample at a time.

Jobs are the arguments of `readers.webdataset`, or of `readers.file` when there is a `file_root`. Of each sample
there is the SHA-256 of each output, and the number of a class as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from nvidia.dali import fn, pipeline_def


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def outputs(arguments: dict[str, Any]) -> Any:
    reader = fn.readers.file if "file_root" in arguments else fn.readers.webdataset
    return tuple(reader(**arguments, name="reader"))


def samples(arguments: dict[str, Any]) -> list[list[str | int]]:
    pipeline = outputs(arguments)
    pipeline.build()
    number = pipeline.reader_meta("reader")["epoch_size"]
    return [[plain(output.at(0)) for output in pipeline.run()] for _ in range(number)]


def plain(output: Any) -> str | int:
    return int(output[0]) if output.dtype == "int32" else hashlib.sha256(output.tobytes()).hexdigest()


if __name__ == "__main__":
    print(json.dumps([samples(job) for job in json.loads(sys.argv[1])]))
