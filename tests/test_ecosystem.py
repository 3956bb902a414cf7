"""The tools of the ecosystem read what wdsfs writes and shows, and wdsfs reads what they write.

One set in four forms: `written` by the webdataset library's ShardWriter as it does it by default, `packed` by GNU
tar, `made` by `wdsfs pack` of a directory for each class, and `committed` by wdsfs from `written` with changes;
the last two have indexes for DALI. `prepared` is a copy of
`written` after `energon prepare`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset
from PIL import Image

from tests import tars
from tests.conftest import Mounted, Program
from tests.peers import DALI, LONG_PATIENCE, TOOLS, environment_of, need_tool, run_script
from tests.processes import finished
from wdsfs.spec.expand import expand

Samples = dict[str, dict[str, bytes]]  # by key, then by extension; in the order of the set

NAMES = ["cat", "dog", "owl"]
SHARDS = "{000000..000002}.tar"

pytestmark = pytest.mark.timeout(3 * LONG_PATIENCE)  # of one test, which may run two scripts and prepare a set


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number * 15, 200 - number * 10, 50)).save(file, "JPEG")
    return file.getvalue()


def sample(number: int, kind: int) -> dict[str, bytes]:
    description = {"label": NAMES[kind], "number": number}
    return {
        "cls": b"%d" % kind,
        "jpg": picture(number),
        "json": json.dumps(description).encode(),
        "left.txt": b"left of %d" % number,
    }


def original() -> Samples:
    return {f"im{number:03d}": sample(number, number % 3) for number in range(12)}


def changed() -> Samples:
    """`original()` after `change()`: a label, a sample less, one renamed where it is, one more at the end."""
    samples = original()
    samples["im001"]["cls"] = b"0"
    del samples["im006"]
    samples["im012"] = sample(12, 0)
    return {"renamed" if key == "im004" else key: columns for key, columns in samples.items()}


def change(top: Path) -> None:
    (top / "t-000000/im001/cls").write_bytes(b"0")
    shutil.rmtree(top / "t-000001/im006")
    (top / "t-000001/im004").rename(top / "t-000001/renamed")
    (top / "t-000002/im012").mkdir()
    for extension, content in sample(12, 0).items():
        (top / "t-000002/im012" / extension).write_bytes(content)


def write_with_webdataset(directory: Path) -> None:
    pattern = f"{directory}/t-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0, encoder=False) as writer:
        for key, columns in original().items():
            writer.write({"__key__": key, **columns})


def pack_with_gnu_tar(program: Program, directory: Path) -> None:
    samples = list(original().items())
    for number in range(3):
        loose = program.directory(f"loose-{number}")
        for key, columns in samples[number * 4 : number * 4 + 4]:
            for extension, content in columns.items():
                (loose / f"{key}.{extension}").write_bytes(content)
        program.tool("tar", "--sort=name", "-cf", directory / f"t-{number:06d}.tar", "-C", loose, ".")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digests(samples: Samples) -> dict[str, dict[str, str]]:
    return {
        key: {extension: sha256(content) for extension, content in columns.items()}
        for key, columns in samples.items()
    }


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("ecosystem"))


@pytest.fixture(scope="module")
def written(program: Program) -> Path:
    directory = program.directory("written")
    write_with_webdataset(directory)
    return directory


@pytest.fixture(scope="module")
def packed(program: Program) -> Path:
    directory = program.directory("packed")
    pack_with_gnu_tar(program, directory)
    return directory


@pytest.fixture(scope="module")
def committed(program: Program, written: Path) -> Path:
    directory = program.directory("committed")
    with program.mounted("--overlay", "upper", f"{written}/t-{SHARDS}") as mounted:
        change(mounted.path)
        program.run("commit", "--export", "dali", "-o", f"{directory}/t-%06d.tar", mounted.path)
    return directory


@pytest.fixture(scope="module")
def made(program: Program) -> Path:
    """Three classes with a directory each, and no `cls`."""
    tree, directory = program.directory("tree"), program.directory("made")
    for path, columns in in_folders().items():
        (tree / path).parent.mkdir(exist_ok=True)
        for extension in columns.keys() - {"cls"}:
            (tree / f"{path}.{extension}").write_bytes(columns[extension])
    options = ("--layout", "classes", "--maxcount", "4", "--export", "dali")
    program.run("pack", *options, tree, "-o", f"{directory}/t-%06d.tar")
    assert (directory / "classes.txt").read_text().split() == NAMES
    return directory


def in_folders() -> Samples:
    """The samples by their class and key, in the order of `made`."""
    samples = {f"{NAMES[int(columns['cls'])]}/{key}": columns for key, columns in original().items()}
    return dict(sorted(samples.items()))


def run_tool(program: Program, name: str, *arguments: object) -> None:
    command = TOOLS / "bin" / name
    finished(command, *map(str, arguments), env=environment_of(program), timeout=LONG_PATIENCE)


def prepare(program: Program, directory: Path, ratio: str) -> None:
    answers = ["--non-interactive", "--no-progress", "--num-workers", "1", "--sample-type", "CrudeWebdataset"]
    run_tool(program, "energon", "prepare", directory, *answers, "--split-ratio", ratio)


@pytest.fixture(scope="module")
def prepared(program: Program, written: Path) -> Path:
    need_tool("megatron.energon")
    directory = program.home / "prepared"
    shutil.copytree(written, directory)
    prepare(program, directory, "2,1,0")
    split = directory / ".nv-meta" / "split.yaml"
    text = split.read_text()
    assert "exclude: []" in text
    split.write_text(text.replace("exclude: []", "exclude: [t-000000.tar, t-000001.tar/im005]"))
    return directory


@pytest.fixture(scope="module")
def classes(program: Program, committed: Path) -> Iterator[Mounted]:
    """Committed images in a folder for each class, as loaders of files want them."""
    options = ("--layout", "classes", "--class-from", "cls", "--columns", "jpg")
    with program.mounted(*options, f"{committed}/t-{SHARDS}", at=program.directory("classes")) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def twelve(program: Program) -> Iterator[Mounted]:
    """Images of twelve classes, of which samples know the number only."""
    directory = program.directory("twelve")
    pattern = f"{directory}/t-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=10, verbose=0, encoder=False) as writer:
        for number in range(24):
            kind = 5 * number % 12
            writer.write({"__key__": f"{kind:02d}-{number}", "cls": b"%d" % kind, "jpg": picture(number % 12)})
    with program.mounted(
        "--layout", "classes", f"{directory}/t-{SHARDS}", at=program.directory("numbers")
    ) as mounted:
        yield mounted


def number_in(path: str) -> int:
    """The number of its class in `cls`, from the path of an image in `twelve`."""
    return int(os.path.basename(path).split("--")[1].split("-")[0])


def in_classes(samples: Samples) -> list[list[str]]:
    """Path, class and content of each image in a mount like `classes`."""
    found = []
    for number, (key, columns) in enumerate(samples.items()):
        shard = 0 if number < 4 else 1 if number < 7 else 2
        label = columns["cls"].decode()
        found.append([f"{label}/t-{shard:06d}--{key}.jpg", label, sha256(columns["jpg"])])
    return sorted(found)


# --- webdataset ----------------------------------------------------------------------------------------------


def read_with_webdataset(*shards: Path) -> Samples:
    samples = [sample for shard in shards for sample in tars.by_webdataset(shard.read_bytes())]
    return {sample.pop("__key__"): sample for sample in samples}


def test_webdataset_reads_committed_and_packed_sets(committed: Path, made: Path) -> None:
    for directory, expected in ((committed, changed()), (made, in_folders())):
        samples = read_with_webdataset(*sorted(directory.glob("*.tar")))
        assert list(samples.items()) == list(expected.items())


@pytest.mark.parametrize(
    "spec",
    [
        "written/t-{000000..000002}.tar",
        "written/t-{000002..000000..2}.tar",
        "written/t-00000{0,2}.tar::packed/t-000001.tar",
        "${SET}/t-{000000..000001}.tar",
        "${BOTH}",
        "written/t-000000.tar::${SET}/t-{000001..000002}.tar",
    ],
)
def test_specs_mean_what_webdataset_makes_of_them(
    program: Program, written: Path, packed: Path, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.home)
    monkeypatch.setenv("WDS_SET", "packed")
    monkeypatch.setenv("WDS_BOTH", "{written,${SET}}/t-000001.tar")  # a name in a value, braces in it
    expected = webdataset.shardlists.expand_urls(spec)
    assert len(expected) >= 2
    assert [os.fsdecode(shard.path) for shard in expand([spec])] == [os.path.abspath(url) for url in expected]


def test_a_yaml_spec_means_what_webdataset_makes_of_it(
    program: Program, written: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")  # the library prefers wids by now
    monkeypatch.setenv("SETS", str(program.home))  # here the library takes variables by their own names
    path = program.write(
        "mixture.yaml",
        b"""
        prefix: ${SETS}/
        datasets:
          - {name: a, buckets: written, shards: ["t-{000000..000001}.tar"]}
          - {name: b, buckets: [packed], shards: t-000002.tar}
        """,
    )
    sources = webdataset.shardlists.MultiShardSample(str(path)).sources
    expected = [url for source in sources for url in source.urls]
    assert len(expected) == 3
    assert [os.fsdecode(shard.path) for shard in expand([str(path)])] == expected


# --- Hugging Face datasets -----------------------------------------------------------------------------------


def loaded_rows(samples: Samples) -> list[dict[str, Any]]:
    """The samples as the `webdataset` builder decodes them."""
    return [
        {
            "cls": int(columns["cls"]),
            "jpg": sha256(columns["jpg"]),
            "json": json.loads(columns["json"]),
            "left.txt": columns["left.txt"].decode(),
            "__key__": key,
        }
        for key, columns in samples.items()
    ]


def test_hugging_face_loads_committed_sets_and_mounts(
    program: Program, written: Path, packed: Path, made: Path, committed: Path, classes: Mounted, twelve: Mounted
) -> None:
    need_tool("datasets")
    places = (written, packed, made, committed)
    jobs: list[dict[str, Any]] = [
        {"path": "webdataset", "data_files": sorted(map(str, place.glob("*.tar")))} for place in places
    ]
    jobs += [{"path": "imagefolder", "data_dir": mounted.path} for mounted in (classes, twelve)]
    *sets, folders, many = run_script(program, "huggingface", jobs)
    for found, samples in zip(sets, (original(), original(), in_folders(), changed()), strict=True):
        for row in found["rows"]:
            assert os.path.basename(row.pop("__url__")).startswith("t-")
            row["__key__"] = row["__key__"].removeprefix("./")
        assert found["rows"] == loaded_rows(samples)
    assert folders["classes"] == ["0", "1", "2"]
    assert sorted((row["label"], row["image"]) for row in folders["rows"]) == sorted(
        (int(label), digest) for _, label, digest in in_classes(changed())
    )
    assert many["classes"] == [f"{number:02d}" for number in range(12)]
    contents = {sha256(path.read_bytes()): int(path.parent.name) for path in twelve.path.glob("*/*.jpg")}
    assert len(many["rows"]) == 24
    assert {row["label"] == contents[row["image"]] for row in many["rows"]} == {True}


# --- PyTorch -------------------------------------------------------------------------------------------------


def test_pytorch_loads_mounts_in_several_processes(
    program: Program, committed: Path, classes: Mounted, twelve: Mounted
) -> None:
    """Of twelve classes, too: by the sorted names of their folders, 10 must not come before 2."""
    need_tool("torchvision")
    with program.mounted(f"{committed}/t-{SHARDS}") as mounted:
        jobs = [{"folders": classes.path}, {"samples": mounted.path}, {"numbers": str(twelve.path)}]
        images, samples, numbers = run_script(program, "pytorch", jobs)
    assert images == in_classes(changed())
    assert {path.partition("/")[2]: json.loads(content) for path, _, content in samples} == digests(changed())
    assert numbers["class_to_idx"] == {f"{number:02d}": number for number in range(12)}
    assert len(numbers["labels"]) == 24
    assert {label == number_in(path) for path, label in numbers["labels"]} == {True}


def test_pytorch_trains_in_the_order_of_shuffle(program: Program, written: Path) -> None:
    """The same one however workers start, by a new loader, too; each sample once although all ranks are killed and
    others go on."""
    need_tool("torch")
    shards = f"{written}/t-{SHARDS}"
    jobs: list[dict[str, Any]] = [{"start": start} for start in ("fork", "spawn")]
    jobs += [{"persistent": True}, {"again": True}, {"ranks": [1, 4]}, {"ranks": [2, 1]}]
    *epochs, more, fewer = run_script(program, "training", [{"shards": shards, **job} for job in jobs])
    assert epochs[1:] == epochs[:-1]
    assert len({json.dumps(epoch) for epoch in epochs[0]}) == 2
    for keys in (*([key for batch in epoch for key in batch] for epoch in epochs[0]), more, fewer):
        assert sorted(keys) == sorted(original())


def test_a_stateful_loader_resumes_on_other_ranks(program: Program, written: Path) -> None:
    need_tool("torchdata")
    ways: list[dict[str, Any]] = [{"again": True}, {"ranks": [1, 4]}, {"ranks": [2, 1]}]
    jobs = [{"shards": f"{written}/t-{SHARDS}", "stateful": True, **way} for way in ways]
    epochs, *resumed = run_script(program, "training", jobs)
    assert epochs[0] != epochs[1]
    for keys in (*([key for batch in epoch for key in batch] for epoch in epochs), *resumed):
        assert sorted(keys) == sorted(original())


def test_workers_refuse_a_shard_that_is_replaced(program: Program, written: Path) -> None:
    need_tool("torch")
    shutil.copytree(written, program.home / "set")
    job = {"shards": f"set/t-{SHARDS}", "replaced": "set/t-000001.tar"}
    for errors in run_script(program, "training", [{**job, "start": start} for start in ("fork", "spawn")]):
        last_lines = [error.splitlines()[-1] for error in errors]
        assert len(last_lines) == 2
        assert all(re.search("StaleShard: .* has changed since", line) for line in last_lines), errors


# --- Megatron-Energon ----------------------------------------------------------------------------------------


def shown(top: Path) -> Samples:
    """The samples of a mount in the samples layout."""
    return {
        sample.name: {column.name: column.read_bytes() for column in sorted(sample.iterdir())}
        for shard in sorted(top.iterdir())
        for sample in sorted(shard.iterdir())
    }


def test_energon_reads_committed_sets_and_mounts_show_what_it_reads(
    program: Program, prepared: Path, committed: Path, made: Path
) -> None:
    """A part of a prepared set without what its split.yaml excludes; and sets that wdsfs has written."""
    for directory in (made, committed):
        prepare(program, directory, "1,0,0")
        assert b"wrong index" not in program.run("check", directory, code=None).stdout
    jobs = [
        {"path": made, "split": "train", "workers": 0},
        {"path": prepared, "split": "train", "workers": 0},
        {"path": committed, "split": "train", "workers": 0},
        {"path": committed, "split": "train", "workers": 1},
    ]
    new, part, *whole = ([tuple(one) for one in found] for found in run_script(program, "energon", jobs))
    assert new == list(digests(in_folders()).items())
    for found in whole:
        assert found == list(digests(changed()).items())
    with program.mounted("--split", "train", prepared) as mounted:
        assert os.listdir(mounted.path) == ["t-000001"]
        assert list(digests(shown(mounted.path)).items()) == part
        assert sorted(shown(mounted.path)) == ["im004", "im006", "im007"]


# --- wids ----------------------------------------------------------------------------------------------------


def with_dots(samples: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    """wids splits names at the first dot, and keeps that with the column."""
    return [
        {"__key__": key, **{f".{name}": digest for name, digest in columns.items()}}
        for key, columns in samples.items()
    ]


def test_wids_finds_samples_by_number(program: Program, committed: Path) -> None:
    need_tool("wids")
    index = committed / "shardindex.json"
    run_tool(program, "widsindex", "create", *sorted(committed.glob("*.tar")), "--output", index)
    (samples,) = run_script(program, "by_number", [index])
    assert samples == with_dots(digests(changed()))
    with program.mounted("--index-tree", index) as mounted:
        for number, key in enumerate(changed()):
            place = mounted.path / "by-index/000/000" / f"{number:06d}"
            assert (place / "jpg").read_bytes() == changed()[key]["jpg"]


# --- DALI ----------------------------------------------------------------------------------------------------


@pytest.mark.dali
def test_dali_reads_exported_indexes_and_mounts(
    program: Program, committed: Path, packed: Path, made: Path, classes: Mounted, twelve: Mounted
) -> None:
    """With the indexes of a commit, a pack and an export; and images from mounts by class, as numbered."""
    need_tool("nvidia.dali", DALI)
    program.run("export", f"{packed}/t-{SHARDS}", "--output", "indexes")
    jobs: list[dict[str, Any]] = [
        {
            "paths": sorted(map(str, shards.glob("*.tar"))),
            "index_paths": [str(indexes / f"t-{number:06d}.idx") for number in range(3)],
            "ext": ["jpg", "cls", "left.txt"],
        }
        for shards, indexes in ((committed, committed), (made, made), (packed, program.home / "indexes"))
    ]
    jobs += [{"file_root": str(mounted.path)} for mounted in (classes, twelve)]
    *sets, images, many = run_script(program, "dali", jobs, DALI)
    for found, samples in zip(sets, (changed(), in_folders(), original()), strict=True):
        assert found == [
            [columns["jpg"], columns["cls"], columns["left.txt"]] for columns in digests(samples).values()
        ]
    assert sorted(images) == sorted([digest, int(label)] for _, label, digest in in_classes(changed()))
    contents = {sha256(path.read_bytes()): number_in(str(path)) for path in twelve.path.glob("*/*.jpg")}
    assert len(many) == 24
    assert {label == contents[digest] for digest, label in many} == {True}
