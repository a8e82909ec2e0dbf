"""Whatever is read from outside gives a result or a RankoneError: never another exception, never a
hang.

A few thousand cases over YAML, overrides, JSON and sealed files, the same in every run. Each may take
2 seconds (of this process, however busy the machine is); those that are known to have taken a machine
down also run in a process with 500 MB to spare.
"""

import json
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankone.config import DecompositionConfig
from rankone.errors import CheckpointError, ConfigError
from rankone.files import load_sealed, read_json, save_sealed
from rankone.runs.config import RunConfig
from rankone.settings import fields, from_yaml, override, to_yaml, validated

RIGHT = {"experiment": "x", "layers": {"*": 3}, "target": {"kind": "tms"}}
VALUES = validated(RunConfig, RIGHT, source="x").model_dump(mode="json")
PATHS = [path for path, _, _ in fields(RunConfig, VALUES)]
FEW_PATHS = [
    "seed", "steps", "init", "engine", "losses", "losses.faithfulness.coefficient",
    "importance.options.d_gate", "optimizer.grad_clip", "tied", "overrides", "title", "layers",
    "target", "target.kind", "target.weights",
]  # fmt: skip

fuzz = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=300,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


@contextmanager
def answered(error):
    """A result or this error, soon, in a message that is short and harmless."""
    start = time.process_time()
    try:
        yield
    except error as refusal:
        message = str(refusal)
        assert 10 < len(message) < 20_000
        assert all(c.isprintable() or c == "\n" for c in message)
    assert time.process_time() - start < 2


BOMBS = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{c}: &{c} [{','.join(['*' + chr(ord(c) - 1)] * 9)}]\n" for c in "bcdefghijklm"),
    "recursive alias": "&a [*a]",
    "recursive mapping": "&a {seed: *a}",
    "merge": "a: &a {b: 1}\nc: {<<: *a}",
    "lists": "[" * 100_000,
    "closed lists": "[" * 5000 + "]" * 5000,
    "mappings": "{a: " * 50_000,
    "block lists": "- " * 50_000,
    "block keys": "? " * 50_000,
    "indented": "\n".join(" " * i + "a:" for i in range(600)),
    "many keys": "".join(f"k{i}: 1\n" for i in range(20_000)),
    "many items": "[" + "1," * 99_000 + "]",
    "words": "a: " + "b " * 99_000,
    "blank lines": "a: |\n" + "\n" * 199_000,
    "long text": "a" * 3_000_000,
    "directives": "".join(f"%TAG !a{i}! b\n" for i in range(10_000)),
    "5,000 digits": "seed: " + "9" * 5000,
    "100,000 digits": "seed: " + "9" * 100_000 + ".5",
    "100,000 underscores": "seed: 1" + "_" * 100_000 + "!",
    "exponent": "seed: 1e" + "9" * 1000,
    "long key": "k" * 100_000 + ": 1",
    "long kind": "target: {kind: " + "k" * 100_000 + "}",
    "version": "%YAML 1." + "1" * 5000 + "\n--- a",
    "identities": "target: {kind: tms, n_identity: 10000000000}",
    "samples": "losses: {stochastic_recon: {samples: 1000000000}}",
    "steps": "steps: 1e30",
}
ODD = [
    "2024-99-99", "2024-01-31", "0x_", "0b_", "0o9", "1:99", "!!int abc", "!!float x", "!!bool x",
    "!!timestamp x", "!!binary x", "!!python/name:os.system", "!!set {a}", "!!omap [a]", "! a",
    "!<x> a", "!x!y a", "&a", "*a", "&a *a", "<<", "=", "~", ".nan", "-.INF", "1e999", "-0", "+", ".",
    "1_", "_1", "9" * 40, "9" * 5000, "1e-400", "0.1.2", "\0", "\ud800", "\ufeff", "\x1b[31m", "\x85",
    "\u2028", "\u202e", "\U0010ffff", '"\\ud800"', '"\\0"', '"\\x1b[2J"', '"\\UFFFFFFFF"', '"\\xZZ"',
    "? [a]: b", "{[a]: b}", "{{}: b}", "{1: 2}", "{null: 2}", "{a: 1, a: 2}", "- - - a", "a: b: c",
    "\t- a", "|", ">-\n a", "%YAML 9.9", "---", "...", "--- a\n--- b", "@", "`", "'", '"', "[", "]",
    "{", "}", "[/x]", "kind: tms", "yes", "{}", "[]", "null", "true", "3", "-1", "1e9", "1e19", "2.5",
    "''",
]  # fmt: skip

names = st.sampled_from([*ODD, *PATHS, "target", "losses", "optimizer", "kind", "tms", "mlp", "a"])
words = names | st.text(max_size=5)


def structured(inner):
    """YAML of the right form, more or less, with anything in its places."""
    pairs = st.lists(st.tuples(words, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        pairs.map(lambda items: "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"),
        pairs.map(lambda items: "".join(f"{k}: {v}\n" for k, v in items)),
        st.lists(inner, max_size=3).map(lambda items: "".join(f"- {v}\n" for v in items)),
        st.tuples(words, inner).map(lambda pair: f"{pair[0]}:\n  " + pair[1].replace("\n", "\n  ")),
    )


yaml_text = st.recursive(words, structured, max_leaves=8) | st.text(max_size=40)


def read(text):
    return validated(RunConfig, from_yaml(text, source="here"), source="here")


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_bombs(text):
    with answered(ConfigError):
        read(text)
    with answered(ConfigError):
        validated(RunConfig, override(VALUES, RunConfig, [f"seed={text}"]), source="here")
    with answered(ConfigError):
        override(VALUES, RunConfig, [f"{text}=1"])


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_odd_values(text):
    for document in (text, f"seed: {text}", f"{text}: 3", f"layers: {{a: {text}}}", f"target: {text}"):
        with answered(ConfigError):
            read(document)
    for path in FEW_PATHS:
        with answered(ConfigError):
            validated(RunConfig, override(VALUES, RunConfig, [f"{path}={text}"]), source="here")


@pytest.mark.parametrize(
    "assignment",
    [
        "steps=10_000_000_000", "seed=9223372036854775808", "log_every=1e10",
        "batch_size=1e12", "threads=1e6", "layers.a=10_000_000",
        "losses.stochastic_recon.samples=1000000000", "losses.faithfulness.coefficient=1e30",
        "optimizer.lr=1e38", "target.n_identity=10000000", "target.n_hidden=1e9", "target.n_features=1e9",
        "target.training.steps=1e12",
    ],
)  # fmt: skip
def test_numbers_are_bounded(assignment):
    key = assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{key}: Input should be less than"):
        validated(RunConfig, override(VALUES, RunConfig, [assignment]), source="here")


@fuzz
@given(yaml_text)
def test_yaml(text):
    with answered(ConfigError):
        values = from_yaml(text, source="here")
        json.dumps(values)
        if isinstance(values, dict):
            values = RIGHT | values
        validated(RunConfig, values, source="here")


@fuzz
@given(st.lists(st.tuples(st.sampled_from(PATHS), words, yaml_text), min_size=1, max_size=3), st.data())
def test_overrides(parts, data):
    form = st.sampled_from(["{0}={2}", "{0}.{1}={2}", "{1}={2}", "{0}{1}", "{1}.{0}={2}", "layers.{1}={2}"])
    assignments = [data.draw(form).format(*part) for part in parts]
    config = None
    with answered(ConfigError):
        config = validated(RunConfig, override(VALUES, RunConfig, assignments), source="here")
    if config is not None:
        assert read(to_yaml(config)) == config


@fuzz
@given(st.text(st.characters() | st.sampled_from("\n\t\x85\u2028\ufeff '\"#:-")), words)
def test_text_that_settings_accept_reads_back(text, word):
    config = None
    with answered(ConfigError):
        config = DecompositionConfig(tied={f"a{text}": text or "a", word or "b": word or "b"})
    if config is not None:
        assert validated(DecompositionConfig, from_yaml(to_yaml(config), source="x"), source="x") == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["seed", "losses", "optimizer", "lr", "init"]) | st.text(max_size=4), inner
        )
    ),
    max_leaves=8,
)


@fuzz
@given(json_values)
def test_plain_values(values):
    """What stands in a JSON file reaches the settings without YAML."""
    for cls in (DecompositionConfig, RunConfig):
        with answered(ConfigError):
            validated(cls, values, source="here")
        if isinstance(values, dict):
            with answered(ConfigError):
                cls(**{str(key): value for key, value in values.items()})


@fuzz
@given(
    json_values.map(json.dumps).map(str.encode), st.binary(max_size=6), st.integers(0, 60), st.integers(0, 3)
)
@example(b"[" * 200_000, b"", 0, 0)
@example(b'{"a":' * 100_000, b"", 0, 0)
@example(b"9" * 5000, b"", 0, 0)
@example(b"-" + b"9" * 1_000_000, b"", 0, 0)
@example(b'"\\ud800"', b"", 0, 0)
@example(b"1e999", b"", 0, 0)
@example(b"\xef\xbb\xbf{}", b"", 0, 0)
@example(b"\xff\xfe{\x00}\x00", b"", 0, 0)
@example(b"\x00", b"", 0, 0)
@example(b"", b"", 0, 0)
def test_json(tmp_path, content, damage, place, cut):
    path = tmp_path / "x.json"
    path.write_bytes(content[:place] + damage + content[place + cut :])
    with answered(CheckpointError):
        read_json(path)


def header_of(entries) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def sealed(tmp_path) -> bytes:
    path = tmp_path / "right.safetensors"
    if not path.exists():
        save_sealed(
            path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int64)}, {"step": 3}
        )
    return path.read_bytes()


HEADERS = [
    b"",
    b"\0" * 7,
    struct.pack("<Q", 2**63),
    struct.pack("<Q", 10**8) + b"{}",
    header_of({}),
    header_of([]),
    header_of(b"[" * 100_000),
    header_of(b'{"a":' * 100_000),
    header_of(b"{" + b" " * 1_000_000 + b"}"),
    header_of(b"\xff"),
    header_of({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + b"\0" * 4,
    header_of({"a": {"dtype": "F32", "shape": [10**10], "data_offsets": [0, 4 * 10**10]}}) + b"\0" * 4,
    header_of({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
    header_of({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}) + b"\0" * 4,
    header_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}) + b"\0" * 4,
    header_of({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}) + b"\0" * 4,
    header_of({"__metadata__": {"rankone": 3}}),
    header_of({"__metadata__": {"rankone": "3"}}),
    header_of({"__metadata__": {"rankone": "[" * 100_000}}),
    header_of({"__metadata__": {"rankone": "9" * 5000}}),
    header_of({"__metadata__": {"rankone": '{"meta": {"\\ud800": "\\ud800"}, "seal": "x"}'}}),
    header_of({"__metadata__": {"rankone": '{"meta": {}, "seal": null}'}}),
    header_of({"__metadata__": {"rankone": '{"meta": 1e999, "seal": {}}'}}),
]


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_headers_of_sealed_files(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with answered(CheckpointError):
        load_sealed(path)
        pytest.fail("it has no valid seal")


@fuzz
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4), st.integers(0, 4)), min_size=1, max_size=3))
def test_damaged_sealed_files(tmp_path, damages):
    right = sealed(tmp_path)
    content = right
    for where, damage, cut in damages:
        place = int(where * len(content))
        content = content[:place] + damage + content[place + cut :]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with answered(CheckpointError):
        load_sealed(path)
        assert content == right


header_values = st.recursive(
    st.sampled_from(["F32", "I64", "BOOL", "F8_E4M3", 0, 1, 4, 24, -1, 2**62, 2**64, None, "rankone", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a", "rankone"]), inner
        )
    ),
    max_leaves=8,
)


@fuzz
@given(header_values, st.integers(0, 32))
def test_made_up_headers(tmp_path, header, size):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_of(header) + b"\1" * size)
    with answered(CheckpointError):
        load_sealed(path)
        pytest.fail("it has no valid seal")


IN_LITTLE_MEMORY = """
import json, sys
from rankone.errors import RankoneError
from rankone.files import load_sealed, read_json
from rankone.runs.config import RunConfig
from rankone.settings import from_yaml, validated
from pathlib import Path

if sys.platform == "linux":
    import resource

    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    most = used * 1024 + 500 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
refused = 0
for text in json.load(open(sys.argv[1])):
    try:
        validated(RunConfig, from_yaml(text, source="here"), source="here")
    except RankoneError:
        refused += 1
for name in sys.argv[2:]:
    try:
        (load_sealed if name.endswith("safetensors") else read_json)(Path(name))
    except RankoneError:
        refused += 1
print(refused)
"""


def test_bombs_in_little_memory(tmp_path):
    texts = tmp_path / "bombs.json"
    texts.write_text(json.dumps(list(BOMBS.values())))
    files = [tmp_path / f"{i}.safetensors" for i in range(len(HEADERS))] + [tmp_path / "deep.json"]
    for file, content in zip(files, [*HEADERS, b"[" * 200_000], strict=True):
        file.write_bytes(content)
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(texts), *map(str, files)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert int(outcome.stdout) == len(BOMBS) + len(files)
