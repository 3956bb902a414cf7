"""SHARDS as users type them, against real directories; braces against the braceexpand library."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sets
from tests.tar.test_scan import count_calls
from wdsfs import shards
from wdsfs.errors import MissingShard, NoMatch, SpecError, UnreadableShard
from wdsfs.names import SHARD_SUFFIXES
from wdsfs.shards import Shard, Shards
from wdsfs.spec import existence, spec_words
from wdsfs.spec.expand import Slice, _stems, expand
from wdsfs.spec.expand import names_of as names_of_paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory. The real path: `tmp_path` may lead through a link."""
    monkeypatch.chdir(tmp_path)
    return Path(os.getcwd())


def touch(*paths: str | bytes) -> None:
    for path in paths:
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def found(*specs: str | bytes) -> list[str]:
    """The expanded paths, relative to the current directory."""
    return [os.path.relpath(os.fsdecode(shard.path)) for shard in expand(specs)]


def names_of(*specs: str | bytes) -> list[str]:
    return [os.fsdecode(shard.name) for shard in expand(specs)]


# -- what is expanded ------------------------------------------------------------------------------------

ABOUT = "set/a.tar set/b.tar set/classes.txt set/set.wdsidx set/a.tar.idx notes/x.txt"
CAPITALS = "set/A.TAR set/a.tar set/B.TAR.GZ set/c.taZ"
SHORT = "a.taz b.tbz2 c.tbz d.tb2 e.tz2 f.txz g.tzst h.tgz"
LITERAL = ["a{1,2}.tar", "{", "x[1].tar", "*.tar", "a::b.tar", "~", r"a\{b\}.tar", "{a}/b?.tar", "back\\slash.tar"]
VARIABLES = "data/a-0.tar data/a-1.tar b-3.tar b-4.tar"
DIRECTORY = "set/b.tar set/a.tar set/._a.tar set/deep/c.tar set/index.json set/x.gz set/a.tar.idx"


# The files that there are, the specs, and the files that these stand for.
FOUND = [
    ("a.tar b.tar c.tar", "c.tar {b,a}.tar", "c.tar b.tar a.tar"),
    ("a.tar b.tar c.tar", "{c..a}.tar", "c.tar b.tar a.tar"),
    ("é.tar B.tar a.tar 10.tar 9.tar x.txt", "*.tar", "10.tar 9.tar B.tar a.tar é.tar"),
    ("a/1.tar a/b/2.tar 3.tar", "**/*.tar", "3.tar a/1.tar a/b/2.tar"),
    (DIRECTORY, "set", "set/a.tar set/b.tar"),
    (DIRECTORY, "set/", "set/a.tar set/b.tar"),
    (CAPITALS, "set", "set/A.TAR set/B.TAR.GZ set/a.tar"),
    # A glob leaves out files about shards unless it asks for them.
    (ABOUT, "set/*", "set/a.tar set/b.tar"),
    (ABOUT, "set/*t*", "set/a.tar set/b.tar"),
    (ABOUT, "set/*.txt", "set/classes.txt"),
    (ABOUT, "notes/*", "notes/x.txt"),
    # A directory from a brace or a glob is a directory, and braces come before globs.
    ("x/1.tar y/2.tar y/1.tar z.tar", "{y,z.tar,x}", "y/1.tar y/2.tar z.tar x/1.tar"),
    ("x/1.tar y/2.tar y/1.tar z.tar", "[xy]", "x/1.tar y/1.tar y/2.tar"),
    ("t-a-2.tar t-a-1.tar t-b-1.tar", "t-{b,a}-*.tar", "t-b-1.tar t-a-1.tar t-a-2.tar"),
    ("a-0.tar a-1.tar b-0.tar", "a-{0..1}.tar::b-*.tar", "a-0.tar a-1.tar b-0.tar"),
    # A tilde is the home directory.
    ("home/a.tar home/b.tar", "~/a.tar", "home/a.tar"),
    ("home/a.tar home/b.tar", "{~/b,~/a}.tar", "home/b.tar home/a.tar"),
    ("home/a.tar home/b.tar", "~/*.tar", "home/a.tar home/b.tar"),
    ("home/a.tar home/b.tar", "~", "home/a.tar home/b.tar"),
    # What exists is taken literally, also what comes out of braces; a backslash keeps braces and commas.
    *((f"a1.tar a2.tar x1.tar {name}", name, name) for name in LITERAL),
    ("x[1]-0.tar x[1]-1.tar x1-0.tar", "x[1]-{0..1}.tar", "x[1]-0.tar x[1]-1.tar"),
    ("a{b}1.tar a{b}2.tar", r"a\{b\}{1,2}.tar", "a{b}1.tar a{b}2.tar"),
    ("${DATA}.tar $DATA.tar", "${DATA}.tar $DATA.tar", "${DATA}.tar $DATA.tar"),
    ("@x.tar @b/x.tar @c.tar", "@x.tar @{b/x,c}.tar", "@x.tar @b/x.tar @c.tar"),
    ("x.json/a.tar x.yaml/b.tar", "x.json x.yaml", "x.json/a.tar x.yaml/b.tar"),
    # Variables are replaced before braces.
    (VARIABLES, "${DATA}/a-{0..1}.tar::b-${RANGE}.tar", VARIABLES),
    (VARIABLES, "${ALL} b-{3,4}.tar", VARIABLES),
]


@pytest.mark.parametrize(("files", "specs", "expected"), FOUND)
def test_what_specs_stand_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, files: str, specs: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    for name, value in (("DATA", "data"), ("RANGE", "{3..4}"), ("ALL", "${DATA}/a-{0..1}.tar")):
        monkeypatch.setenv(f"WDS_{name}", value)
    touch(*files.split())
    assert found(*specs.split()) == expected.split()


@pytest.mark.parametrize("directory", [b"plain", b"odd\xff\n dir"])
def test_any_byte_can_be_in_a_name(here: Path, directory: bytes) -> None:
    touch(directory + b"/\xfe\xff-0.tar", directory + b"/\xfe\xff-1.tar")
    expected = [
        Shard(os.path.join(bytes(here), directory, b"\xfe\xff-%d.tar" % i), b"\xfe\xff-%d" % i) for i in (0, 1)
    ]
    assert expand([os.fsdecode(directory + b"/\xfe\xff-{0..1}.tar")]) == expected
    assert expand([os.fsdecode(directory + b"/*.tar")]) == expected
    assert expand([directory]) == expected


def test_whether_a_directory_holds_files_takes_a_look_at_each_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    paths = [f"set/{number}.tar" for number in range(300)]
    touch(*paths)
    monkeypatch.setattr(existence, "_shard_names", lambda directory: list(map(Name, paths)))
    assert not existence.holds_files("set")
    assert len(compared) < 3 * len(paths)


# -- paths -------------------------------------------------------------------------------------------------


def test_dots_and_doubled_slashes_are_cleaned(here: Path) -> None:
    touch("a/x.tar", "y.tar")
    assert expand(["a//./x.tar"])[0].path == bytes(here / "a/x.tar")
    assert expand(["a/..//y.tar"])[0].path == bytes(here / "y.tar")
    os.chdir("a")
    assert expand(["../y.tar"])[0].path == bytes(here / "y.tar")
    assert expand(["..//a/x.tar"])[0].path == bytes(here / "a/x.tar")


def test_links_keep_their_own_path_and_two_dots_behind_one_name_what_the_kernel_opens(here: Path) -> None:
    touch("far/away/inner/z", "far/away/x.tar", "x.tar")
    os.symlink("far/away/inner", "link")
    os.symlink("x.tar", "train-0.tar")
    assert found("train-0.tar", "link/z") == ["train-0.tar", "link/z"]
    assert expand(["link/../x.tar"])[0].path == bytes(here / "far/away/x.tar")


def test_the_same_name_here_and_at_the_top_of_the_file_system_are_two_paths(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(existence, "_mode", lambda word: 0o100644)
    monkeypatch.setattr(existence, "_listed_files", lambda parent, siblings: set(siblings))
    assert [shard.path for shard in expand(["x.tar", "/x.tar"])] == [bytes(here / "x.tar"), b"/x.tar"]
    assert names_of("x.tar", "/x.tar") == [f"{here.name}--x", "x"]


# -- what is refused ---------------------------------------------------------------------------------------


def refused(error: type[Exception], *specs: str | bytes) -> str:
    with pytest.raises(error) as caught:
        expand(specs)
    return str(caught.value)


THOUSAND = [f"{i:04d}.tar" for i in range(1000) if i != 500]
NEITHER = "is neither a path nor a URL"

# The files that there are, the specs, the error, and a part of its text.
REFUSED: list[tuple[list[str], list[str], type[SpecError | MissingShard], str]] = [
    ([], ["nothing.tar"], MissingShard, "no such shard: 'nothing.tar'"),
    ([], ["y.json"], MissingShard, "no such shard: 'y.json'"),
    ([], ["${N}.tar"], SpecError, "the environment variable WDS_N is not set; '${N}.tar' needs it"),
    (["a.tar"], ["a.tar/a/im0"], MissingShard, "'a.tar/a/im0'; to list the content of a shard: wdsfs ls a.tar"),
    (
        ["t-0.tar", "t-1.tar"],
        ["t-{0..6}.tar"],
        MissingShard,
        "5 of 7 shards are missing: 't-2.tar', 't-3.tar', 't-4.tar' and 2 more;",
    ),
    (["cc-00000.tar"], ["cc-{0..2}.tar"], MissingShard, "there is 'cc-00000.tar': write as many leading zeros"),
    (["cc-00000.tar"], ["cc-0.tar"], MissingShard, "there is 'cc-00000.tar'"),
    (THOUSAND, ["{0000..0999}.tar"], MissingShard, "1 of 1,000 shards are missing: '0500.tar';"),
    (["a.tar"], ["a.tar/b.tar"], MissingShard, "'a.tar/b.tar'"),
    (["a.tar"], ["a.tar/"], MissingShard, "'a.tar/'"),
    ([], ["x" * 300 + ".tar"], MissingShard, "no such shard"),
    *(([], [text], SpecError, f"{text!r}") for text in ("a{1..3.tar", "a{b", "x}", "{a,{b}")),
    ([], ["a{b"], SpecError, r"\{"),
    ([], [], SpecError, "no shards given"),
    (["empty/x/y"], ["empty/x/z*"], NoMatch, "no file matches"),
    (["above/[set]/a.tar"], ["above"], NoMatch, " 'above/**/*.tar'"),
    (["mnt/.wdsfs/status.json"], ["mnt"], SpecError, "it is a mount of wdsfs, so name its shards"),
    ([], ["*.tar"], NoMatch, "no file matches '*.tar'"),
    ([], [""], SpecError, "empty shard name"),
    ([], ["a.tar::"], SpecError, "empty shard name"),
    ([], ["a\0.tar"], SpecError, "NUL"),
    ([], ["\ud800.tar"], SpecError, "cannot be encoded"),
    ([], ["hdfs://host/a-{0..9}.tar"], SpecError, NEITHER),
    ([], ["ftp://host/a.tar"], SpecError, NEITHER),
    ([], ["file://host/a.tar"], SpecError, NEITHER),
    ([], ["/dev/null"], SpecError, "is not a regular file"),
    (["a/1.tar", "a/2.tar"], ["a/1.tar", "./a/../a/1.tar"], SpecError, "/a/1.tar' is named twice"),
    (["a/1.tar", "a/2.tar"], ["a", "a/*.tar"], SpecError, "(and 1 more) is named twice"),
    ([], ["{" * 2000 + "}" * 2000], SpecError, "nested too deeply"),
    ([], ["{" * 33 + "a,b" + "}" * 33], SpecError, "nested too deeply: the limit is 32 levels"),
    ([], ["{0.." + "9" * 5000 + "}"], SpecError, "too large"),
    ([], ["*/" * 2000 + "*.tar"], SpecError, "too many directories for a glob: the limit is 256"),
    ([], ["*/" * 256 + "*.tar"], NoMatch, "no file matches"),
]


@pytest.mark.parametrize(
    ("files", "specs", "error", "message"), REFUSED, ids=lambda value: value[:25] if isinstance(value, str) else ""
)
def test_what_is_refused(
    here: Path, files: list[str], specs: list[str], error: type[Exception], message: str
) -> None:
    touch(*files)
    assert message in refused(error, *specs)


def test_an_empty_directory_and_what_is_no_file(here: Path) -> None:
    os.mkdir("empty")
    assert refused(NoMatch, "empty").endswith("'empty' holds no shard, such as x.tar or x.tar.gz")
    os.mkfifo("fifo.tar")
    assert "'fifo.tar' is not a regular file" in refused(SpecError, "fifo.tar")
    assert "'./fifo.tar' is not a regular file" in refused(SpecError, ".")


def test_an_option_that_goes_on_without_missing_shards_is_named_where_there_is_one(here: Path) -> None:
    touch("t-0.tar")
    for spec, allow_missing, is_named in (("t", None, False), ("t", False, True), ("u", False, False)):
        with pytest.raises(MissingShard) as caught:
            expand([f"{spec}-{{0..6}}.tar"], allow_missing=allow_missing)
        assert ("--allow-missing" in str(caught.value)) == is_named


def test_a_dangling_link_is_a_missing_shard_and_a_directory_is_none(here: Path) -> None:
    touch("set/a.tar")
    os.mkdir("set/extracted.tar")
    os.symlink("extracted.tar", "set/link-to-a-directory.tar")
    assert found("set") == ["set/a.tar"]
    os.symlink("gone", "set/b.tar")
    for spec in ("set/[ab].tar", "set"):
        assert "'set/b.tar'" in refused(MissingShard, spec)


@pytest.mark.parametrize(
    ("call", "spec", "message"),
    [("stat", "a.tar", "the shard 'a.tar'"), ("listdir", "set", "cannot list the directory 'set'")],
)
def test_a_refused_look_is_not_a_missing_shard(
    here: Path, monkeypatch: pytest.MonkeyPatch, call: str, spec: str, message: str
) -> None:
    touch("set/a.tar")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, call, refuse)
    assert f"{message}: Permission denied" in refused(UnreadableShard, spec)


# -- large and hostile expressions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{0..99999999999}.tar",
        "{0..9999}{0..9999}.tar",
        "{{0..9999999},{0..9999999}}",
        "x{a,{1..99999999}}{b,c}",
        "{1..99999999999\n}",
        "{0..9}" * 40,
        "{0..9}" * 6000,
    ],
)
def test_a_huge_expression_is_refused_before_it_is_expanded(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The words are counted in about as many steps as the expression has characters, and none is made."""
    monkeypatch.setattr(spec_words, "braceexpand", lambda _: pytest.fail("expanded"))
    with count_calls(50 * len(text) + 1000):
        assert "more than 10,000,000" in refused(SpecError, text)


def test_the_limit_holds_for_all_specs_together(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_words, "MAX_SHARDS", 100)
    assert "more than 100 shards" in refused(SpecError, "{0..59}", "{60..119}")


def test_a_set_has_no_more_shards_than_inode_numbers_can_tell_apart(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(*(f"{number}.tar" for number in range(6)))
    monkeypatch.setattr(shards, "SHARD_MAX", 2)
    with pytest.raises(SpecError, match=r"^6 shards.* 3: .*--shard-id"):
        expand(["{0..5}.tar"])
    assert len(expand(["{0..5}.tar"], slice=Slice(1, 2))) == 3
    with pytest.raises(SpecError, match=r"^4 shards"):
        Shards(sets.at(f"/{number}.tar".encode()) for number in range(4))


def test_what_is_nested_up_to_the_limits(here: Path) -> None:
    assert next(spec_words.expand_braces("{" * 32 + "a,b" + "}" * 32)).count("{") == 31
    touch("a/b/c.tar")
    assert names_of("*/" * 2 + "*.tar") == ["c"]


def test_a_message_about_a_long_spec_is_short(here: Path) -> None:
    for spec in ("{" + "a," * 10_000 + "}", "*a" * 5000, "{a,b" * 30 + "x" * 5000, "{0..99}" * 500):
        assert len(refused(SpecError, spec)) < 500


WELL_FORMED = st.recursive(
    st.sampled_from(["a", "{1..3}", "{9..1..2}", "{c..A}", "{A..Z..7}", "{05..7}"]),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(lambda items: "{" + ",".join(items) + "}")
        | st.lists(inner, max_size=3).map("".join)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.text("{}{},,..019aZ\\\n", max_size=24) | WELL_FORMED)
def test_the_count_of_an_expression_is_what_the_library_makes_of_it(text: str) -> None:
    try:
        count = spec_words._expansions(text)
    except ValueError:
        with pytest.raises(UnbalancedBracesError):
            list(braceexpand(text))
    else:
        assert count >= 100_000 or count == len(list(braceexpand(text)))


def test_a_hundred_thousand_shards_cost_no_more_than_a_look_each(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed where there are many together, looked at one by one otherwise; never both."""
    looks: Counter[object] = Counter()
    real = os.stat

    def counting(path: str) -> os.stat_result:
        looks[path] += 1
        return real(path)

    touch(*(f"many/{i:05d}.tar" for i in range(5000)), *(f"few{i}/x.tar" for i in range(20)))
    for i in range(0, 5000, 100):
        os.rename(f"many/{i:05d}.tar", f"many/{i:05d}")
        os.symlink(f"{i:05d}", f"many/{i:05d}.tar")
    monkeypatch.setattr(os, "stat", counting)
    assert len(expand(["many/{00000..04999}.tar", "few{0..19}/x.tar"])) == 5020
    assert set(looks.values()) == {1}
    assert len(looks) == 50 + 20  # the links and the few


def test_a_few_shards_of_a_crowded_directory_do_not_wait_for_its_listing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    class Crowd:
        name = "someone-else"

    @contextlib.contextmanager
    def crowded(path: str) -> Iterator[Iterator[Crowd]]:
        def entries() -> Iterator[Crowd]:
            nonlocal read
            while True:
                read += 1
                yield Crowd()

        yield entries()

    touch(*(f"{i}.tar" for i in range(existence.LISTING_PAYS)))
    monkeypatch.setattr(os, "scandir", crowded)
    assert len(expand([f"{{0..{existence.LISTING_PAYS - 1}}}.tar"])) == existence.LISTING_PAYS
    assert read == existence.LISTING_PAYS * existence.LISTING_RATIO


# -- names -------------------------------------------------------------------------------------------------

SUFFIXES = [f"{n:02}{os.fsdecode(suffix)}" for n, suffix in enumerate(SHARD_SUFFIXES)]

# Shards, and their names.
NAMED = [
    (" ".join(SUFFIXES), " ".join(base[:2] for base in SUFFIXES)),
    (SHORT, "a b c d e f g h"),
    ("f.txz f.tar.xz g.tzst g.tar", "f.txz f.tar.xz g.tzst g"),
    ("A.TAR B.TAR.GZ a.tar", "A.TAR B.TAR.GZ a"),
    ("c.tar.lz4 d.TAR e", "c.tar.lz4 d.TAR e"),
    # Equal names get the shortest trailing path that tells them apart, and give way to a shard that is called so.
    ("x/a/t.tar y/a/t.tar z/b/t.tar z/b/u.tar", "x--a--t y--a--t b--t u"),
    ("a/t.tar b/t.tar a--t.tar a--t~2.tar", "a--t~3 b--t a--t a--t~2"),
    ("a/b--t.tar c/b--t.tar a--b/t.tar d/t.tar", "a--b--t c--b--t a--b--t~2 d--t"),
    # Names that keep their suffix: without it nothing would be left, or another path.
    *((base, base) for base in (".tar", "..tar", "...tar", ".tar.gz", ".tgz", "tar")),
    ("x.tar.tar x.tar x", "x.tar.tar x.tar x"),
    ("x.tar.tar", "x.tar"),
    # Of a shard and its compressed copies the plain one has the short name.
    ("x.tar x.tgz y.tar.gz", "x x.tgz y"),
    ("y.tar.gz y.tar.xz z.tgz z", "y.tar.gz y.tar.xz z.tgz z"),
    ("x.tar.gz x.tar.gz.tar x.tgz", "x.tar.gz x.tar.gz.tar x.tgz"),
]


@pytest.mark.parametrize(("shards", "expected"), NAMED)
def test_names_of_shards(here: Path, shards: str, expected: str) -> None:
    touch(*shards.split())
    assert names_of(*shards.split()) == expected.split()


def test_a_directory_means_the_shards_of_every_suffix(here: Path) -> None:
    touch(*(f"set/{base}" for base in SUFFIXES), *(f"set/{base}" for base in SHORT.split()))
    touch("set/.hidden.tgz", "set/x.zip", "set/tgz", "set/i.tlz", "set/j.taZ", "set/tzst")
    assert found("set") == [f"set/{base}" for base in [*SUFFIXES, *SHORT.split()]]


# A small alphabet with all that names are made of, so that they clash.
component = st.text("ab-~", min_size=1, max_size=4) | st.sampled_from(["a--b", "x", "x.tar", "a" * 250])
path = st.builds(
    lambda folders, base, suffix: "/" + "/".join([*folders, base]) + suffix,
    st.lists(component, max_size=3),
    component | st.sampled_from(["", ".", ".."]),
    st.sampled_from([".tar", ".tar", "", ".tar.gz", ".tgz", ".txz", ".tar.tar"]),
).filter(lambda path: os.path.normpath(path) == path and path != "/")


@settings(max_examples=200)
@given(st.lists(path, unique=True, min_size=1, max_size=12))
def test_names_are_distinct_path_components_and_only_clashing_ones_are_lengthened(paths: list[str]) -> None:
    encoded = list(map(os.fsencode, paths))
    stems, given_names = _stems(encoded), names_of_paths(encoded)
    assert len(set(given_names)) == len(paths)
    bases = Counter(stem.rpartition(b"/")[2] for stem in stems)
    for stem, name in zip(stems, given_names, strict=True):
        assert b"/" not in name
        assert name not in (b"", b".", b"..")
        assert len(name) <= 255
        base = stem.rpartition(b"/")[2]
        assert name == base or bases[base] > 1 or len(base) > 255
