"""Files: atomic, sealed, owned, and refused by name when they are not what was written."""

import errno
import importlib.util
import json
import os
import pickle
import random
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import rankone
from rankone import files
from rankone.errors import CheckpointError
from rankone.files import (
    RunDirectory,
    digest_of,
    fingerprint,
    load_sealed,
    read_json,
    read_text,
    save_sealed,
    sealed_bytes,
    sha256,
    write_atomic,
)

PINNED = sorted((Path(rankone.__file__).parent / "targets" / "pinned").glob("*.safetensors"))
CHANGES = {"open", "write", "fsync", "replace", "unlink"}


class SystemCalls:
    """Stands in for the module `os` inside rankone.files; notes each call that changes the disk,
    and may fail or kill the process at the n-th."""

    def __init__(self, at=None, act=None):
        self.calls, self.at, self.act, self.paths = [], at, act, {}

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def call(*arguments, **options):
            if self.at is not None and len(self.calls) == self.at:
                self.calls.append((name, "failed"))
                self.act(name, arguments)
            first = arguments[0]
            self.calls.append((name, self.paths.get(first, first) if isinstance(first, int) else Path(first)))
            result = real(*arguments, **options)
            if name == "open":
                self.paths[result] = Path(first)
            return result

        return call


def readable(calls, root):
    """Calls by file name, without the random token; opening the lock is left out."""
    lines = []
    for name, path in calls:
        text = "." if path == root else str(Path(path).relative_to(root))
        token = next((part for part in text.split(".") if len(part) == 16), "TOKEN")
        if text != ".lock":
            lines.append(f"{name} {text.replace(token, 'TOKEN')}")
    return lines


def record(monkeypatch, root, action):
    calls = SystemCalls()
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", calls)
        action()
    return readable(calls.calls, root)


def written(path, directory=".", call="write"):
    temporary = f"{Path(path).parent / f'.{Path(path).name}.TOKEN.tmp'}"
    return [
        f"open {temporary}",
        f"{call} {temporary}",
        f"fsync {temporary}",
        f"replace {temporary}",
        f"open {directory}",
        f"fsync {directory}",
    ]


@pytest.fixture(autouse=True)
def _disks_are_slow(monkeypatch):
    """Kills and errors are tried by the hundred; what matters here is when a sync is asked for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "file.safetensors"
    save_sealed(path, {"a": torch.arange(6.0), "b": torch.tensor(3)}, {"step": 5})
    return path


@pytest.fixture
def run(tmp_path):
    return RunDirectory.claim(tmp_path / "run")


def manifest_of(directory):
    return json.loads((directory.path / "manifest.json").read_text())


def forge(directory, **changes):
    """A manifest as an attacker would write it, with a seal that fits."""
    content = {key: value for key, value in (manifest_of(directory) | changes).items() if key != "seal"}
    if isinstance(content["files"], dict):
        content["files"] = dict(sorted(content["files"].items()))
    content["seal"] = sha256(json.dumps(content).encode())
    (directory.path / "manifest.json").write_text(json.dumps(content))


# Sealed files


def test_round_trip(sealed):
    tensors, meta = load_sealed(sealed)
    assert tensors["a"].tolist() == list(range(6))
    assert tensors["b"].item() == 3
    assert meta == {"step": 5}
    assert sealed.read_bytes() == sealed_bytes(tensors, meta)


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.stem)
def test_pinned_targets_load(path):
    tensors, meta = load_sealed(path)
    assert tensors
    assert meta


def test_every_truncation_is_refused_by_name(sealed):
    whole = sealed.read_bytes()
    for size in range(0, len(whole), 7):
        sealed.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"file.safetensors .*not loaded"):
            load_sealed(sealed)


def test_every_changed_byte_is_refused_by_name(sealed):
    """Any byte of content: what is left alone is only the padding of the header."""
    whole = bytearray(sealed.read_bytes())
    header = struct.unpack("<Q", whole[:8])[0]
    for place in [*range(8, 8 + header, 5), *range(8 + header, len(whole))]:
        if whole[place] == ord(" "):
            continue
        changed = bytearray(whole)
        changed[place] ^= 1
        sealed.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"file.safetensors"):
            load_sealed(sealed)


def test_an_edited_step_is_refused(sealed):
    whole = sealed.read_bytes()
    assert b'\\"step\\": 5' in whole
    sealed.write_bytes(whole.replace(b'\\"step\\": 5', b'\\"step\\": 6'))
    with pytest.raises(CheckpointError, match="does not match its seal"):
        load_sealed(sealed)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="not written by rankone"):
        load_sealed(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"x.safetensors cannot be read"):
        load_sealed(path)
    with pytest.raises(CheckpointError, match="There is no file"):
        load_sealed(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_sealed(tmp_path)


def with_header(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE_SEALED = {
    "empty": b"",
    "header of an exabyte": struct.pack("<Q", 2**60) + b"{}",
    "header of all ones": b"\xff" * 64,
    "header of 50 MB": struct.pack("<Q", 50 * 2**20) + b" " * 1000,
    "terabytes of data": with_header({"a": tensor(shape=(2**40,), offsets=(0, 2**42))}),
    "overflowing shape": with_header({"a": tensor(shape=(2**62, 2**62), offsets=(0, 0))}),
    "nothing times everything": with_header({"a": tensor(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
    "nothing of everything": with_header({"a": tensor(shape=(0, 2**63), offsets=(0, 0))}),
    "negative shape": with_header({"a": tensor(shape=(-1,))}, b"abcd"),
    "backward offsets": with_header({"a": tensor(offsets=(4, 0))}, b"abcd"),
    "unknown type": with_header({"a": tensor(dtype="X9")}, b"abcd"),
    "text for a type": with_header({"a": tensor(dtype="F8_E8M0", offsets=(0, 1))}, b"a"),
    "half a byte": with_header({"a": tensor(dtype="F4", shape=(2,), offsets=(0, 1))}, b"a"),
    "six bits": with_header({"a": tensor(dtype="F6_E2M3", shape=(4,), offsets=(0, 3))}, b"abc"),
    "many dimensions": with_header({"a": tensor(shape=(1,) * 5000)}, b"abcd"),
    "duplicate keys": with_header(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2), b"abcd"),
    "deep nesting": with_header(b'{"a":' + b"[" * 100_000),
    "no text": with_header(b"\xff\xfe{}"),
    "NaN": with_header(b'{"a":NaN}'),
    "metadata no dict": with_header({"__metadata__": 5}),
    "seal no text": with_header({"__metadata__": {"rankone": 5}}),
    "seal a list": with_header({"__metadata__": {"rankone": "[]"}}),
    "seal a number": with_header({"__metadata__": {"rankone": "5"}}),
    "seal nested": with_header({"__metadata__": {"rankone": "[" * 100_000}}),
    "seal nested whole": with_header({"__metadata__": {"rankone": "[" * 50_000 + "]" * 50_000}}),
    "meta nested": with_header(
        {"__metadata__": {"rankone": '{"seal":"","meta":' + '{"a":' * 900 + "1" + "}" * 901}}
    ),
    "meta of digits": with_header({"__metadata__": {"rankone": '{"seal": "", "meta": ' + "9" * 5000 + "}"}}),
    "meta a list": with_header({"__metadata__": {"rankone": '{"seal": "", "meta": []}'}}),
    "half a pair": with_header({"__metadata__": {"rankone": '{"seal": "", "meta": {"a": "\\ud800"}}'}}),
}


@pytest.mark.parametrize("case", HOSTILE_SEALED)
def test_hostile_sealed_files_are_refused_quickly(tmp_path, case):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE_SEALED[case])
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_sealed(path)
    assert time.perf_counter() - began < 2


def test_a_seal_over_metadata_that_is_no_dict_is_refused(tmp_path):
    header = {"meta": [1], "seal": sha256(f"{digest_of({})}|[1]".encode())}
    (tmp_path / "x").write_bytes(with_header({"__metadata__": {"rankone": json.dumps(header)}}))
    with pytest.raises(CheckpointError, match="does not match its seal"):
        load_sealed(tmp_path / "x")


def test_a_terabyte_of_holes_is_refused_quickly(tmp_path):
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_sealed(path)
    with pytest.raises(CheckpointError, match="more than 8388608 bytes"):
        read_json(path)


def test_fingerprint_sees_names_shapes_and_bits():
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    first = fingerprint(module)
    assert fingerprint(module) == first
    with torch.no_grad():
        module.weight[0, 0] = torch.nextafter(module.weight[0, 0], torch.tensor(9.0))
    assert fingerprint(module) != first
    assert fingerprint(nn.Sequential(module)) != fingerprint(module)


def test_the_digest_of_tensors_is_what_it_always_was():
    """Pinned targets and stored runs name these digests."""
    tensors = {"b": torch.zeros(2, 1, dtype=torch.int64), "a": torch.tensor(1.5)}
    assert digest_of(tensors) == "728df4e40c42b692708d888f162ee67a048627515090f4320dd82c27c10ba659"


# JSON and text


HOSTILE_JSON = {
    "empty": b"",
    "cut short": b"{",
    "deep lists": b"[" * 200_000,
    "deep lists, whole": b"[" * 100_000 + b"]" * 100_000,
    "deep dicts": b'{"a":' * 100_000,
    "5,000 digits": b"9" * 5000,
    "half a pair": b'"\\ud800"',
    "half a pair, in capitals": b'{"a": ["\\uDC00"]}',
    "half a pair as a key": b'{"\\ud800": 1}',
    "NUL": b"\x00",
    "NUL in text": b'"a\x00b"',
    "not UTF-8": b'"\xff"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "byte order mark": b"\xef\xbb\xbf{}",
    "too long": b" " * (8 * 2**20) + b"1",
    "UTF-16": "{}".encode("utf-16"),
}


@pytest.mark.parametrize("case", HOSTILE_JSON)
def test_hostile_json_is_refused_by_name(tmp_path, run, case):
    (tmp_path / "x.json").write_bytes(HOSTILE_JSON[case])
    with pytest.raises(CheckpointError, match=r"x\.json (is not|has more)"):
        read_json(tmp_path / "x.json")
    run.write("x.json", HOSTILE_JSON[case])
    with pytest.raises(CheckpointError, match=r"x\.json is not"):
        run.read_json("x.json")


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text('{}[]":,\\ud8019eE-.N aInfityul', max_size=60).map(str.encode))
@example(b"NaN")
@example(b'"\\ud83d\\ude00"')
def test_any_bytes_give_a_value_or_an_error_by_name(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    for read in (read_json, read_text, load_sealed):
        message = str(path)
        try:
            read(path)
        except CheckpointError as error:
            message = str(error)
        assert str(path) in message


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(max_size=3) | st.just("__metadata__"),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(
                    ["F32", "F16", "BF16", "BOOL", "U8", "U16", "U64", "C64", "F4", "F8_E5M2"]
                ),
                "shape": st.lists(st.integers(-1, 3) | st.integers(2**30, 2**65), max_size=4),
                "data_offsets": st.tuples(st.integers(0, 9), st.integers(0, 2**64))
                | st.sampled_from([(0, 0), (0, 4)]),
            }
        )
        | st.dictionaries(st.just("rankone"), st.text(max_size=9), max_size=1),
        max_size=3,
    ),
    st.binary(max_size=8),
)
def test_any_header_gives_tensors_or_an_error_by_name(tmp_path, header, data):
    path = tmp_path / "x"
    path.write_bytes(with_header(header, data))
    with pytest.raises(CheckpointError, match="not loaded"):  # none of them has a seal
        load_sealed(path)


def test_json_and_text(tmp_path):
    RunDirectory.claim(tmp_path / "d").write_json("x.json", {"ä": [1.5, None]})
    write_atomic(tmp_path / "x.json", (tmp_path / "d/x.json").read_bytes())
    assert read_json(tmp_path / "x.json") == {"ä": [1.5, None]}
    assert read_text(tmp_path / "x.json") == '{\n  "ä": [\n    1.5,\n    null\n  ]\n}\n'
    (tmp_path / "x.json").write_text('"\\ud83d\\ude00"')
    assert read_json(tmp_path / "x.json") == "\U0001f600"
    with pytest.raises(CheckpointError, match=r"There is no file .*y\.json"):
        read_json(tmp_path / "y.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_json(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_text(tmp_path / "x.json" / "y")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_text(tmp_path / "x\0")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_text(tmp_path / "pipe")


# Plain atomic writes


def test_atomic_write_leaves_nothing_behind(tmp_path):
    write_atomic(tmp_path / "d" / "x", "one")
    write_atomic(tmp_path / "d" / "x", b"two")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["x"]
    assert (tmp_path / "d" / "x").read_text() == "two"


def test_atomic_write_syncs_file_then_directory(tmp_path, monkeypatch):
    calls = record(monkeypatch, tmp_path, lambda: write_atomic(tmp_path / "x", "one"))
    assert calls == written("x")


def test_a_failed_atomic_write_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch):
    write_atomic(tmp_path / "x", "one")
    for at in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", SystemCalls(at, full_disk))
            with pytest.raises(OSError, match="No space"):
                write_atomic(tmp_path / "x", "two")
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
        assert (tmp_path / "x").read_text() == "one"


def test_atomic_write_does_not_write_through_a_link(tmp_path):
    (tmp_path / "x").symlink_to(tmp_path / "precious")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="x is a symbolic link"):
            write_atomic(tmp_path / "x", "one")
        (tmp_path / "precious").write_text("mine")
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_flock_and_nofollow_everything_but_the_lock_works(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "O_NOFOLLOW")
    spec = importlib.util.spec_from_file_location("files_without_fcntl", files.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = module.RunDirectory.claim(tmp_path / "run")
    with run.lock():
        run.write("x", "one")
        module.RunDirectory.claim(tmp_path / "run").write("y", "two")
    assert run.names() == ["x", "y"]


# Claiming and opening


def test_claim_makes_a_directory_with_its_parents_and_opens_it_again(tmp_path):
    run = RunDirectory.claim(tmp_path / "a" / "b")
    run.write("x", "one")
    assert RunDirectory.claim(str(tmp_path / "a" / "b")).read("x") == b"one"
    assert RunDirectory.open(tmp_path / "a" / "b").names() == ["x"]
    assert RunDirectory.claim(run) is run
    (tmp_path / "empty").mkdir()
    assert RunDirectory.claim(tmp_path / "empty").names() == []


def test_a_directory_in_use_is_refused_by_name(tmp_path):
    for name in ["d", "b", "a"]:
        (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError) as error:
        RunDirectory.claim(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is not empty and not a run directory: it has 'a', 'b', 'd'. Nothing in it was "
        "touched; choose a directory that is empty or does not exist yet."
    )
    (tmp_path / "c\x1b[31m").write_text("mine")
    with pytest.raises(CheckpointError, match=r"it has 'a', 'b', 'c\\x1b\[31m' and 1 more\."):
        RunDirectory.claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c\x1b[31m", "d"]


@pytest.mark.parametrize(
    "name", [".lock", ".manifest.json.tmp", ".manifest.json.0123456789ABCDEF.tmp", ".x.tmp"]
)
def test_a_single_foreign_file_makes_a_directory_foreign(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty and not a run directory"):
        RunDirectory.claim(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_the_working_directory_and_an_empty_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="An empty path"):
        RunDirectory.claim("")
    with pytest.raises(CheckpointError, match="'' is not a run directory"):
        RunDirectory.open("")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="it has 'mine'"):
        RunDirectory.claim(".")


def test_paths_that_cannot_be_a_run_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in ["file", "dangling", "file/below", "a\0b", "x" * 300, "\ud800"]:
        with pytest.raises(CheckpointError, match="cannot be a run directory"):
            RunDirectory.claim(tmp_path / path)
        with pytest.raises(
            CheckpointError, match=r"is not a run directory: it has no manifest.json. `rankone run`"
        ):
            RunDirectory.open(tmp_path / path)
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_the_directory_itself_may_be_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    RunDirectory.claim(tmp_path / "link").write("figures/x", "one")
    assert RunDirectory.open(tmp_path / "real").read("figures/x") == b"one"


def test_open_does_not_make_anything(tmp_path, run):
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="is not a run directory"):
        RunDirectory.open(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    run.write("x", "one")
    (run.path / ".lock").unlink()
    run.path.chmod(0o555)
    try:
        assert RunDirectory.open(run.path).read("x") == b"one"
    finally:
        run.path.chmod(0o755)
    assert sorted(path.name for path in run.path.iterdir()) == ["manifest.json", "x"]


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "1", "null", '{"name": "My web app", "icons": []}', "[" * 100_000, "", "\ud800"],
    ids=["dict", "list", "number", "null", "web", "deep", "empty", "surrogate"],
)
def test_a_foreign_manifest_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    (tmp_path / "config.yaml").write_text("mine")
    for opened in (RunDirectory.claim, RunDirectory.open):
        with pytest.raises(CheckpointError, match=r"manifest\.json (was not written by|is not)"):
            opened(tmp_path)
    assert path.read_bytes() == content.encode(errors="surrogatepass")


def test_an_edited_manifest_is_refused(run):
    run.write("x", "one")
    path = run.path / "manifest.json"
    for old, new in [('"x"', '"y"'), ('"format": 1', '"format": 2'), (sha256(b"one"), sha256(b"two"))]:
        whole = path.read_text()
        path.write_text(whole.replace(old, new))
        with pytest.raises(
            CheckpointError, match=r"manifest\.json was not written by this version of rankone, or was"
        ):
            RunDirectory.open(run.path)
        path.write_text(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../x": None}},
        {"files": {"/etc/passwd": None}},
        {"files": {"a/../../x": None}},
        {"files": {"x": "0" * 64}},
        {"files": {"x": {"a": 1}}},
        {"files": {"x": ["0" * 63]}},
        {"files": {"x": [5]}},
        {"files": {"x": 5}},
        {"files": {"x": 0}},
        {"files": []},
        {"token": "../../../../../x"},
        {"token": 5},
        {"token": ""},
        {"format": 2},
    ],
    ids=str,
)
def test_a_forged_manifest_cannot_name_what_is_not_below(run, changes):
    forge(run, files={"x": None, ".lock": None})
    assert RunDirectory.open(run.path).names() == []  # a forgery that fits opens
    forge(run, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json was not written by"):
        RunDirectory.open(run.path)


def test_the_manifest_is_as_documented(run):
    run.write("x", "one")
    run.appender("log").close()
    manifest = manifest_of(run)
    assert list(manifest) == ["format", "token", "files", "seal"]
    assert manifest["format"] == 1
    assert manifest["files"] == {".lock": None, "log": None, "x": [sha256(b"one")]}
    assert (run.path / "manifest.json").read_text().startswith('{\n  "format": 1,\n  "token": "')


# Names


BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/../x",
    "/x",
    "a//b",
    "a/",
    "a\\b",
    "C:x",
    "C:/x",
    "a\0",
    "a\n",
    "\x1b[1m",
]
BAD_NAMES += ["\x85", "\ud800", ".lock", ".x", "a/.b", "x" * 201, "ä" * 101, "/".join(["x" * 100] * 10)]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_could_leave_the_directory_are_refused(run, name):
    for action in (run.sub, run.read, run.remove, run.appender, run.seal, lambda n: run.write(n, "x")):
        with pytest.raises(CheckpointError, match="cannot name a file in a run directory"):
            action(name)
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "manifest.json"]


def test_ordinary_names(run):
    for name in [
        "x",
        "a/b/c.svg",
        "layers.0.mlp",
        "ä",
        "with space",
        "x" * 200,
        "decomposition/components.safetensors",
    ]:
        run.write(name, name)
        assert run.read_text(name) == name
        assert run.sub(name) == run.path / name
    assert run.names("a/") == ["a/b/c.svg"]


# Writing and reading


def test_write_read_replace_remove(run):
    run.write("a/x", "one")
    run.write("a/x", b"two")
    run.write_json("b.json", {"a": 1})
    run.write("c", sealed_bytes({"a": torch.ones(2)}, {"step": 1}))
    assert (run.read("a/x"), run.read_text("a/x"), run.read_json("b.json")) == (b"two", "two", {"a": 1})
    assert run.read_sealed("c")[1] == {"step": 1}
    assert run.names() == ["a/x", "b.json", "c"]
    assert run.has("a/x")
    run.remove("a/x")
    assert not run.has("a/x")
    assert not run.has("a")
    assert run.names() == ["b.json", "c"]
    assert "a/x" not in manifest_of(run)["files"]
    with pytest.raises(CheckpointError, match=r"There is no file .*a/x"):
        run.read("a/x")
    with pytest.raises(
        CheckpointError, match=r"There is no file .*a/x that rankone wrote; nothing is removed"
    ):
        run.remove("a/x")


def test_a_changed_file_is_refused_by_name_by_every_way_to_read(run):
    run.write("x", sealed_bytes({}, {}))
    (run.path / "x").write_bytes(sealed_bytes({}, {"step": 2}))
    for read in (run.read, run.read_text, run.read_json, run.read_sealed):
        with pytest.raises(
            CheckpointError, match=r"/run/x was changed after rankone wrote it \(its SHA-256 is now \w"
        ):
            read("x")


def test_an_older_content_is_not_accepted_after_a_replacement(run):
    run.write("x", "one")
    run.write("x", "two")
    (run.path / "x").write_text("one")
    with pytest.raises(CheckpointError, match="was changed"):
        run.read("x")


def test_a_file_that_is_not_recorded_is_neither_read_nor_replaced(run):
    (run.path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="notes was not written by rankone"):
        run.read("notes")
    for action in (run.remove, run.appender, lambda n: run.write(n, "x")):
        with pytest.raises(
            CheckpointError, match=r"notes is not a file that rankone wrote .* and is not touched"
        ):
            action("notes")
    with pytest.raises(CheckpointError, match="notes was not written by rankone"):
        run.seal("notes")
    assert not run.has("notes")
    assert (run.path / "notes").read_text() == "mine"
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a file that rankone wrote"):
        run.write("manifest.json", "{}")


def test_a_directory_or_a_file_in_the_way_is_refused(run):
    run.write("x", "one")
    (run.path / "x").unlink()
    (run.path / "x").mkdir()
    (run.path / "figures").write_text("mine")
    assert not run.has("x")
    for action in (run.remove, run.appender, lambda n: run.write(n, "two")):
        with pytest.raises(CheckpointError, match="x is not a file that rankone wrote"):
            action("x")
    with pytest.raises(CheckpointError, match="figures is not a directory, so 'figures/a' cannot be in it"):
        run.write("figures/a", "one")
    with pytest.raises(CheckpointError, match="x is not a regular file"):
        run.read("x")


def test_a_file_that_was_deleted_by_hand_is_not_there_and_can_be_written_again(run):
    run.write("x", "one")
    (run.path / "x").unlink()
    assert not run.has("x")
    assert run.names() == []
    run.write("x", "two")
    assert run.read("x") == b"two"
    assert manifest_of(run)["files"]["x"] == [sha256(b"two")]
    (run.path / "x").unlink()
    run.remove("x")
    assert "x" not in manifest_of(run)["files"]


# Files that grow


def test_appending_and_sealing(run):
    with run.appender("log") as log:
        assert manifest_of(run)["files"]["log"] is None
        log.write(b"one\ntwo\n")
    assert run.read("log") == b"one\ntwo\n"
    run.seal("log")
    assert run.read("log") == b"one\ntwo\n"
    with run.appender("log", keep=4) as log:
        assert manifest_of(run)["files"]["log"] is None
        log.write(b"three\n")
    assert run.read("log") == b"one\nthree\n"
    run.seal("log")
    (run.path / "log").write_bytes(b"one\nother\n")
    with pytest.raises(CheckpointError, match="log was changed after rankone wrote it"):
        run.read("log")
    with pytest.raises(CheckpointError, match="log was changed after rankone wrote it"):
        run.appender("log", keep=4)
    run.appender("log").close()
    assert run.read("log") == b""


def test_a_log_that_was_cut_short_is_refused_by_name(run):
    with run.appender("log") as log:
        log.write(b"one\n")
    with pytest.raises(
        CheckpointError, match=r"log has 4 bytes, not the 5 that this run had written: it was cut"
    ):
        run.appender("log", keep=5)
    with pytest.raises(CheckpointError, match="There is no file"):
        run.appender("other", keep=5)
    assert run.read("log") == b"one\n"
    assert run.names() == ["log"]


def test_a_growing_file_may_be_replaced(run):
    with run.appender("log") as log:
        log.write(b"one\n")
    run.write("log", "two")
    assert run.read("log") == b"two"
    assert manifest_of(run)["files"]["log"] == [sha256(b"two")]


def test_an_appender_does_not_reach_a_copy_made_of_hard_links(run, tmp_path):
    with run.appender("log") as log:
        log.write(b"one\ntwo\n")
    os.link(run.path / "log", tmp_path / "copy")
    with run.appender("log", keep=4) as log:
        log.write(b"three\n")
    assert (tmp_path / "copy").read_bytes() == b"one\ntwo\n"


# The order of system calls


def test_a_new_file_is_recorded_then_written_each_synced(run, monkeypatch):
    calls = record(monkeypatch, run.path, lambda: run.write("x", "one"))
    assert calls == written("manifest.json") + written("x")
    calls = record(monkeypatch, run.path, lambda: run.write("a/x", "one"))
    assert calls == [*written("manifest.json"), "open .", "fsync .", *written("a/x", "a")]


def test_a_replaced_file_is_recorded_written_and_the_old_content_forgotten(run, monkeypatch):
    run.write("x", "one")
    calls = record(monkeypatch, run.path, lambda: run.write("x", "two"))
    assert calls == written("manifest.json") + written("x") + written("manifest.json")
    calls = record(monkeypatch, run.path, lambda: run.write("x", "two"))
    assert calls == written("x")


def test_a_new_checkpoint_is_on_disk_before_the_old_one_goes(run, monkeypatch):
    run.write("checkpoints/1", "one")

    def next_checkpoint():
        run.write("checkpoints/2", "two")
        run.remove("checkpoints/1")

    calls = record(monkeypatch, run.path, next_checkpoint)
    assert calls == [
        *written("manifest.json"),
        *written("checkpoints/2", "checkpoints"),
        "unlink checkpoints/1",
        "open checkpoints",
        "fsync checkpoints",
        *written("manifest.json"),
    ]


def test_an_appender_is_recorded_before_its_file_is_there(run, monkeypatch):
    calls = record(monkeypatch, run.path, lambda: run.appender("log").close())
    assert calls == [
        *written("manifest.json"),
        *(c for c in written("log") if not c.startswith("write")),
        "open log",
    ]


# Kills and failures at every system call


def full_disk(name, arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory(name, arguments):
    raise MemoryError


def half_a_write_then_killed(name, arguments):
    if name == "write":
        os.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
    os._exit(9)


def checkpoint(step):
    return sealed_bytes({"a": torch.full((3,), float(step))}, {"step": step})


def scenario(path):
    """A small run as the training loop makes it; it begins again from what is there."""
    run = RunDirectory.claim(path)
    with run.lock():
        run.write("config.yaml", "seed: 0\n")
        steps = [int(name.split("/")[1]) for name in run.names("checkpoints/")]
        if 2 not in steps:
            run.write("checkpoints/1", checkpoint(1))
            run.write("checkpoints/2", checkpoint(2))
        if run.has("checkpoints/1"):
            run.remove("checkpoints/1")
        with run.appender("metrics.jsonl") as log:
            log.write(b'{"step": 1}\n')
        run.seal("metrics.jsonl")
        run.write("summary.json", "{}")
        run.write("summary.json", '{"done": true}')
    return run


ALLOWED = {
    "config.yaml": {b"seed: 0\n"},
    "checkpoints/1": {checkpoint(1)},
    "checkpoints/2": {checkpoint(2)},
    "metrics.jsonl": {b"", b'{"step": 1}\n'},
    "summary.json": {b"{}", b'{"done": true}'},
}


def check_invariants(path, later_than=()):
    """Everything that must hold after a kill or an error, whenever it came."""
    if not (path / "manifest.json").exists():
        assert not later_than
        return []
    run = RunDirectory.open(path)
    names = run.names()
    for name in names:
        assert run.read(name) in ALLOWED[name]
    assert set(later_than) <= set(names) | {"checkpoints/1"}
    checkpoints = [name for name in names if name.startswith("checkpoints/")]
    if "metrics.jsonl" in names:
        assert checkpoints == ["checkpoints/2"]
    for name in checkpoints:
        assert run.read_sealed(name)[1] == {"step": int(name[-1])}
    entries = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert entries - {".lock", "manifest.json"} == set(names)
    return names


def check_it_ends(path):
    for run in (scenario(path), RunDirectory.open(path)):
        assert run.names() == ["checkpoints/2", "config.yaml", "metrics.jsonl", "summary.json"]
        assert run.read_json("summary.json") == {"done": True}
        assert run.read("metrics.jsonl") == b'{"step": 1}\n'
    assert all(digests is None or len(digests) == 1 for digests in manifest_of(run)["files"].values())


@pytest.fixture
def number_of_calls(tmp_path, monkeypatch):
    calls = SystemCalls()
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", calls)
        scenario(tmp_path / "count")
    assert len(calls.calls) > 100
    return len(calls.calls)


def test_a_kill_at_every_system_call(tmp_path, number_of_calls):
    names_before = []
    for at in range(number_of_calls):
        path = tmp_path / str(at)
        child = os.fork()
        if child == 0:
            files.os = SystemCalls(at, half_a_write_then_killed)
            scenario(path)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        names_before = check_invariants(path, later_than=names_before)
        check_it_ends(path)


def test_a_failure_at_every_system_call(tmp_path, number_of_calls, monkeypatch):
    names_before = []
    for at in range(number_of_calls):
        path = tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", SystemCalls(at, (full_disk, no_memory)[at % 2]))
            with pytest.raises((OSError, MemoryError, CheckpointError)):
                scenario(path)
        names_before = check_invariants(path, later_than=names_before)
        check_it_ends(path)


def test_a_disk_that_stays_full_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """Nothing can be created or written any more, from each moment on; deleting still works."""
    run = RunDirectory.claim(tmp_path / "run")
    run.write("checkpoints/1", checkpoint(1))

    for room in range(20):
        calls = []

        def write(*arguments, room=room, calls=calls):
            calls.append(arguments)
            return os.write(*arguments) if len(calls) <= room else full_disk("write", arguments)

        with monkeypatch.context() as patch:
            patch.setattr(files, "os", SystemCalls())
            files.os.write = write
            with suppress(OSError):
                run.write("checkpoints/2", checkpoint(2))
                if run.has("checkpoints/1"):
                    run.remove("checkpoints/1")
            newest = RunDirectory.open(run.path).names("checkpoints/")[-1]
            assert run.read_sealed(newest)[1] == {"step": int(newest[-1])}
    assert run.names() == ["checkpoints/2"]


def test_a_kill_in_a_claim_can_be_claimed_again(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".manifest.json.0123456789abcdef.tmp").write_text('{"form')
    assert RunDirectory.claim(tmp_path).names() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]


def test_only_temporary_files_that_are_ours_are_deleted(run):
    run.write("figures/x.svg", "one")
    token = manifest_of(run)["token"]
    ours = [f".manifest.json.{token}.tmp", f"figures/.x.svg.{token}.tmp"]
    foreign = [".x.tmp", f".mine.{token}.tmp", "figures/.x.svg.0123456789abcdef.tmp", f".x.svg.{token}.tmp"]
    for name in ours + foreign:
        (run.path / name).write_text("mine")
    RunDirectory.open(run.path)
    assert [name for name in ours if (run.path / name).exists()] == []
    assert [name for name in foreign if not (run.path / name).exists()] == []


# Locks


def test_two_processes_do_not_write_in_one_directory(run):
    run.write("x", "one")
    temporary = run.path / f".x.{manifest_of(run)['token']}.tmp"
    locked, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with RunDirectory.open(run.path).lock():
            os.write(locked[1], b"1")
            os.read(go_on[0], 1)
        os._exit(0)
    os.read(locked[0], 1)
    temporary.write_text("half of what the other process writes")
    message = f"Another rankone process is running in {run.path}; wait for it, or choose another directory."
    try:
        for action in (run.lock().__enter__, lambda: run.write("x", "two"), lambda: run.remove("x")):
            with pytest.raises(CheckpointError) as error:
                action()
            assert str(error.value) == message
        assert RunDirectory.open(run.path).read("x") == b"one"  # reading goes on, and cleans nothing
        assert temporary.exists()
    finally:
        os.write(go_on[1], b"1")
        assert os.waitpid(child, 0)[1] == 0
    run.write("x", "two")
    assert not temporary.exists()


def test_a_lock_holds_for_a_whole_run_and_is_free_after_an_error(run):
    second = RunDirectory.open(run.path)
    with suppress(ZeroDivisionError), run.lock():
        with run.lock():
            run.write("x", "one")
        with pytest.raises(CheckpointError, match="Another rankone process"):
            second.write("x", "two")
        _ = 1 / 0
    second.write("x", "two")
    assert run.read("x") == b"two"


def test_two_objects_do_not_lose_each_others_records(run):
    second = RunDirectory.open(run.path)
    run.write("x", "one")
    second.write("y", "two")
    run.write("z", "three")
    assert second.names() == ["x", "y", "z"]


def test_many_processes_claim_one_new_directory(tmp_path):
    """Each either gets it or says that another has it; nothing is lost."""
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            for _ in range(200):
                try:
                    run = RunDirectory.claim(tmp_path / "deep" / "run")
                    run.write(f"x{number}", str(number))
                    code = 0
                    break
                except CheckpointError as error:
                    if "Another rankone process" not in str(error):
                        code = 2
                        break
                    time.sleep(random.random() / 50)
            os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    run = RunDirectory.open(tmp_path / "deep" / "run")
    assert [run.read_text(f"x{number}") for number in range(8)] == [str(number) for number in range(8)]


def test_a_lock_file_that_is_not_ours_is_left_alone(run, tmp_path):
    forge(run, files={})
    (run.path / ".lock").write_text("mine")
    with pytest.raises(CheckpointError, match=r"\.lock is not recorded in manifest\.json"):
        run.write("x", "one")
    assert (run.path / ".lock").read_text() == "mine"


def test_locking_neither_truncates_nor_follows(run, tmp_path):
    lock = run.path / ".lock"
    lock.write_text("mine")
    with run.lock():
        assert lock.read_text() == "mine"
    for make in (lambda: lock.symlink_to(tmp_path / "precious"), lambda: os.mkfifo(lock), lock.mkdir):
        lock.unlink()
        make()
        with pytest.raises(CheckpointError, match=r"\.lock is not a regular file"):
            run.write("x", "one")
        assert not (tmp_path / "precious").exists()


# The attack on 0.1.0, once more


NAMES = ["config.yaml", "report.html", "metrics.jsonl", "summary.json", ".lock", ".notes.tmp", "a/.deep.tmp"]
NAMES += ["figures/mine.svg", "figures/losses.svg", "decomposition/components.safetensors"]


def attack(run):
    """All that a run does to its directory; each step may be refused, none may be skipped."""
    for name in ["config.yaml", "report.html", "summary.json", "figures/losses.svg", "checkpoints/1"]:
        for action in (
            lambda n: run.write(n, "ours"),
            lambda n: run.write(n, "ours again"),
            run.seal,
            run.remove,
        ):
            yield lambda action=action, name=name: action(name)
    yield lambda: run.write("decomposition/components.safetensors", checkpoint(1))
    yield lambda: run.appender("metrics.jsonl").write(b"ours")
    yield lambda: run.appender("metrics.jsonl", keep=2).write(b"ours")
    yield lambda: run.seal("metrics.jsonl")
    yield lambda: RunDirectory.claim(run.path)


def refused(steps):
    number = 0
    for step in steps:
        try:
            result = step()
            if hasattr(result, "close"):
                result.close()
        except CheckpointError:
            number += 1
    return number


def everything_at(paths):
    return {str(path): path.read_bytes() for path in paths}


def test_ten_foreign_files_in_a_directory_in_use_survive(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"mine: {name}")
    with pytest.raises(CheckpointError, match="is not empty and not a run directory"):
        RunDirectory.claim(tmp_path)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {tmp_path / name for name in NAMES}
    assert all((tmp_path / name).read_text() == f"mine: {name}" for name in NAMES)


def test_ten_foreign_files_put_into_a_run_directory_survive(run):
    for name in NAMES:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(f"mine: {name}")
    assert refused(attack(run)) > 10
    assert [name for name in NAMES if (run.path / name).read_text() != f"mine: {name}"] == []


@pytest.mark.parametrize("recorded", [False, True], ids=["not recorded", "recorded"])
def test_nine_files_behind_links_in_a_received_run_directory_survive(run, tmp_path, recorded):
    """The sender also writes the manifest, so that every link may be recorded as rankone's."""
    home = tmp_path / "home"
    (home / "figures").mkdir(parents=True)
    token = manifest_of(run)["token"]
    links = ["config.yaml", "report.html", "metrics.jsonl", "summary.json", ".lock", "checkpoints"]
    links += [f".config.yaml.{token}.tmp", f".manifest.json.{token}.tmp"]
    for name in links[:5] + links[6:]:
        (home / name).write_text("mine")
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(home / name)
    (home / "figures" / "losses.svg").write_text("mine")
    (home / "figures" / "1").write_text("mine")
    (run.path / "figures").symlink_to(home / "figures")
    (run.path / "checkpoints").symlink_to(home / "figures")
    if recorded:
        forge(run, files=dict.fromkeys([".lock", *links[:4], "figures/losses.svg", "checkpoints/1"]))
    files_at_home = [path for path in home.rglob("*") if path.is_file()]
    assert len(files_at_home) == 9
    before = everything_at(files_at_home)
    assert refused(attack(run)) > 10
    (run.path / ".lock").unlink()
    assert refused(attack(run)) > 10
    assert everything_at(files_at_home) == before
    assert sorted(home.rglob("*")) == sorted([*files_at_home, home / "figures"])


def test_a_manifest_behind_a_link_is_refused(run, tmp_path):
    (run.path / "manifest.json").rename(tmp_path / "manifest.json")
    (run.path / "manifest.json").symlink_to(tmp_path / "manifest.json")
    before = (tmp_path / "manifest.json").read_bytes()
    for action in (RunDirectory.claim, RunDirectory.open, lambda _: run.write("x", "one")):
        with pytest.raises(CheckpointError, match=r"manifest\.json is a symbolic link"):
            action(run.path)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_link_is_refused_by_name_for_reading_too(run, tmp_path):
    run.write("x", "one")
    (run.path / "x").rename(tmp_path / "x")
    (run.path / "x").symlink_to(tmp_path / "x")
    for action in (run.read, run.has, run.names, run.sub, run.remove):
        with pytest.raises(CheckpointError, match="run/x is a symbolic link and is not followed"):
            action("x")
    assert (tmp_path / "x").read_text() == "one"
