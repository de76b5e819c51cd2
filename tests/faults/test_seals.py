"""What lies beside a sealed folder is said by who reads it, never by the seal."""

import json

import pytest

from anchorlora.store.seal import damage, seal, sha256


@pytest.fixture
def sealed(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "facts.json").write_text("{}")
    (tmp_path / "cores").write_text("c")
    (tmp_path / "outside").write_text("x")
    seal(state, beside={"cores": tmp_path / "cores"})
    return state


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "facts.json", "..", "a\0b", "other"])
def test_a_seal_that_names_other_files_beside_its_folder_is_damaged(name, sealed, tmp_path):
    """Even where the hash fits."""
    content = json.loads((sealed / "SEAL.json").read_text())
    place = sealed / name
    content["beside"][name] = sha256(place) if "\0" not in name and place.is_file() else "0" * 64
    (sealed / "SEAL.json").write_text(json.dumps(content))
    said = damage(sealed, beside={"cores": tmp_path / "cores"})
    assert said == f"{sealed / 'SEAL.json'} names {name!r} beside its folder, which is not a file that belongs to it"


def test_a_seal_may_lack_what_is_looked_for_beside_its_folder(sealed, tmp_path):
    beside = {"cores": tmp_path / "cores", "before": tmp_path / "nowhere"}
    assert damage(sealed, beside=beside) is None
    (tmp_path / "cores").write_text("other")
    assert "is not what was written" in damage(sealed, beside=beside)
    assert "names 'cores' beside its folder" in damage(sealed)
