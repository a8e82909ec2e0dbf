"""Files: atomic, sealed, and refused by name when they are not what was written."""

import json
import pickle
import struct

import pytest
import safetensors.torch
import torch
from torch import nn

from rankone import RankoneError
from rankone.files import fingerprint, load_sealed, read_json, save_sealed, write_atomic


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "file.safetensors"
    save_sealed(path, {"a": torch.arange(6.0), "b": torch.tensor(3)}, {"step": 5})
    return path


def test_round_trip(sealed):
    tensors, meta = load_sealed(sealed)
    assert tensors["a"].tolist() == list(range(6))
    assert tensors["b"].item() == 3
    assert meta == {"step": 5}


def test_every_truncation_is_refused_by_name(sealed):
    whole = sealed.read_bytes()
    for size in range(0, len(whole), 7):
        sealed.write_bytes(whole[:size])
        with pytest.raises(RankoneError, match=r"file.safetensors .*not loaded"):
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
        with pytest.raises(RankoneError, match=r"file.safetensors"):
            load_sealed(sealed)


def test_an_edited_step_is_refused(sealed):
    whole = sealed.read_bytes()
    assert b'\\"step\\": 5' in whole
    sealed.write_bytes(whole.replace(b'\\"step\\": 5', b'\\"step\\": 6'))
    with pytest.raises(RankoneError, match="does not match its seal"):
        load_sealed(sealed)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(RankoneError, match="not written by rankone"):
        load_sealed(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(RankoneError, match=r"x.safetensors cannot be read"):
        load_sealed(path)
    with pytest.raises(RankoneError, match="There is no file"):
        load_sealed(tmp_path / "none")


def test_json(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RankoneError, match=r"x.json is not valid JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(RankoneError, match="There is no file"):
        read_json(tmp_path / "y.json")


def test_atomic_write_leaves_nothing_behind(tmp_path):
    write_atomic(tmp_path / "d" / "x", "one")
    write_atomic(tmp_path / "d" / "x", b"two")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["x"]
    assert (tmp_path / "d" / "x").read_text() == "two"


def test_fingerprint_sees_names_shapes_and_bits():
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    first = fingerprint(module)
    assert fingerprint(module) == first
    with torch.no_grad():
        module.weight[0, 0] = torch.nextafter(module.weight[0, 0], torch.tensor(9.0))
    assert fingerprint(module) != first
    assert fingerprint(nn.Sequential(module)) != fingerprint(module)
    assert json.dumps(first)
