"""Writes tables with the libraries that people have them from, for tests/test_tables_of_libraries.py.

    python tests/ecosystem/make_tables.py huggingface|img2dataset|nemo|labelstudio|datacomp DIRECTORY

Each runs where its library is installed: datasets 5.2.0, img2dataset 1.47.0 (with a web server on this machine),
nemo_toolkit 3.0.0 (its function was run alone), label-studio-sdk 2.1.2. DataComp has no library: its list of uids
is written as its README says. What they have written is in tests/data/tables.
"""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("cat/0001.png", "cat/0002.png", "dog/0003.png")
CAPTIONS = ("a cat on a mat", 'two cats, "quoted"', "un chien à Zürich")


def _pictures(top: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        importlib.import_module("PIL.Image").new("RGB", (8, 8), (60 * number, 20, 99)).save(top / name)


def huggingface(target: Path) -> None:
    datasets: Any = importlib.import_module("datasets")
    rows = [
        {"file_name": name, "text": text, "score": at + 0.5}
        for at, (name, text) in enumerate(zip(NAMES, CAPTIONS, strict=True))
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(target / "metadata.csv")
    table.to_json(target / "metadata.jsonl")
    table.to_parquet(target / "metadata.parquet")
    with sqlite3.connect(target / "metadata.sqlite") as base:
        table.to_sql("samples", base)
    table.save_to_disk(target / "disk")
    shutil.move(target / "disk" / "data-00000-of-00001.arrow", target / "data.arrow")
    shutil.rmtree(target / "disk")
    with tempfile.TemporaryDirectory() as top:
        _pictures(Path(top), NAMES)
        images = datasets.load_dataset("imagefolder", data_dir=top, split="train", cache_dir=f"{top}/cache")
        embed = importlib.import_module("datasets.table").embed_table_storage  # as before an upload to the Hub
        images = images.with_format("arrow").map(embed, batched=True, new_fingerprint="embedded")
        images.to_parquet(target / "images.parquet")


def img2dataset(target: Path) -> None:
    with tempfile.TemporaryDirectory() as top:
        _pictures(Path(top), ("0.jpg", "1.jpg", "2.jpg", "3.jpg"))
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=top)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [f"http://127.0.0.1:{server.server_port}/{number}.jpg" for number in (0, 1, 7, 2, 3)]
        lines = [f"{url},caption of {url[-5]},0.{url[-5]}" for url in urls]
        Path(top, "urls.csv").write_text("\n".join(["url,caption,similarity", *lines]))
        words = [
            "--url_list",
            f"{top}/urls.csv",
            "--input_format",
            "csv",
            "--url_col",
            "url",
            "--caption_col",
            "caption",
        ]
        words += [
            "--output_format",
            "webdataset",
            "--output_folder",
            str(target / "img2dataset"),
            "--image_size",
            "8",
        ]
        words += ["--number_sample_per_shard", "3", "--save_additional_columns", '["similarity"]']
        words += ["--processes_count", "1", "--thread_count", "1"]
        subprocess.run([Path(sys.executable).parent / "img2dataset", *words], check=True)
        server.shutdown()


def nemo(target: Path) -> None:
    manifest: Any = importlib.import_module("nemo.collections.asr.parts.utils.manifest_utils")
    names = [f"/data/LibriSpeech/dev-clean/84/121123/84-121123-000{number}.flac" for number in range(3)]
    rows = [{"audio_filepath": name, "duration": 2.5 + at, "text": CAPTIONS[at]} for at, name in enumerate(names)]
    manifest.write_manifest(target / "manifest.json", rows)


def labelstudio(target: Path) -> None:
    """Write an export of tasks as the server does, and what the converter of the SDK makes of it."""
    config = """<View><Image name="image" value="$image"/><Choices name="choice" toName="image">
        <Choice value="cat"/><Choice value="dog"/></Choices></View>"""
    about = {"created_at": "2026-11-01T10:00:00.000000Z", "updated_at": "2026-11-01T10:00:00.000000Z"}
    tasks = []
    for number, name in enumerate(NAMES, 1):
        value = {"choices": [name.partition("/")[0]]}
        result = {"id": f"r{number}", "type": "choices", "from_name": "choice", "to_name": "image", "value": value}
        annotation = {"id": 10 + number, "completed_by": 1, "result": [result], "task": number, "project": 1}
        annotation |= {"was_cancelled": False, "ground_truth": False, "lead_time": 3.5, **about}
        data = {"image": f"/data/local-files/?d=photos/{name}"}
        task = {
            "id": number,
            "annotations": [annotation],
            "drafts": [],
            "predictions": [],
            "data": data,
            "meta": {},
        }
        tasks.append(
            {**task, **about, "inner_id": number, "total_annotations": 1, "project": 1, "file_upload": None}
        )
    (target / "export.json").write_text(json.dumps(tasks))
    converter = importlib.import_module("label_studio_sdk.converter").Converter
    made = converter(config=config, project_dir=".", download_resources=False)
    for form, name in (("CSV", "result.csv"), ("JSON_MIN", "result.json")):
        with tempfile.TemporaryDirectory() as top:
            made.convert(str(target / "export.json"), top, form, is_dir=False)
            shutil.move(f"{top}/{name}", target / f"min{os.path.splitext(name)[1]}")


def datacomp(target: Path) -> None:
    uids = sorted(f"{number * 12345678901234567890123:032x}" for number in range(1, 4))
    np.save(target / "uids.npy", np.array([(int(uid[:16], 16), int(uid[16:], 16)) for uid in uids], "u8,u8"))


if __name__ == "__main__":
    {made.__name__: made for made in (huggingface, img2dataset, nemo, labelstudio, datacomp)}[sys.argv[1]](
        Path(sys.argv[2])
    )
