"""Files of cores: what is written comes back as it was, and what protects nothing is neither written nor read."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from anchorlora import Subspace
from anchorlora.cli.app import main
from anchorlora.features import read_cores, write_cores
from anchorlora.features.files import read_origin
from anchorlora.geometry import LayerCore
from anchorlora.geometry.subspace import TokenRows
from audited import write_pair


def drawn(d=12, k=3, seed=0):
    return Subspace(torch.linalg.qr(torch.randn(d, k, generator=torch.Generator().manual_seed(seed))).Q)


def test_cores_come_back_by_layer_and_layers_that_share_one_share_its_tensor(tmp_path):
    both, alone = drawn(), Subspace(drawn(seed=1).basis.double())
    write_cores(tmp_path / "cores", {"q": both, "v": both, "out": alone}, origin={"made": "by hand", "layers": {"q": 3}})
    back = read_cores(str(tmp_path / "cores"))
    assert list(back) == ["q", "v", "out"]
    assert back["q"] is back["v"]
    assert torch.equal(back["q"].basis, both.basis)
    assert torch.equal(back["out"].basis, alone.basis.float())
    assert read_origin(tmp_path / "cores") == {"made": "by hand", "layers": {"q": 3}}
    with safe_open(tmp_path / "cores", framework="pt") as file:
        assert sorted(file.keys()) == ["out", "q"]
        assert set(file.metadata()) == {"layers", "origin"}
    write_cores(str(tmp_path / "plain"), {"q": both})
    assert read_origin(tmp_path / "plain") == {}
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["cores", "plain"]


@pytest.mark.parametrize(
    ("cores", "origin", "said"),
    [
        ({}, None, "holds a Subspace for each adapted layer, but there is none"),
        ({"q": torch.eye(3)}, None, "but q has a Tensor; make one with Subspace"),
        ({"q": drawn(), "embed": TokenRows(torch.tensor([3]), d=8)}, None, "embed has numbers of tokens, and .* leave it out"),
        ({"q": drawn()}, {"when": object()}, "the origin of cores cannot be written as JSON"),
        ({"q": drawn()}, {"energy": float("nan")}, "the origin of cores cannot be written as JSON"),
    ],
)
def test_what_makes_no_file_of_cores_is_refused_and_nothing_is_written(cores, origin, said, tmp_path):
    with pytest.raises((TypeError, ValueError), match=said):
        write_cores(tmp_path / "cores", cores, origin=origin)
    assert not list(tmp_path.iterdir())


def test_cores_as_a_constraint_chooses_them_are_written_as_their_directions(tmp_path):
    chosen, shared = LayerCore(drawn(), drawn(), 3, 0.9, 8), drawn()
    write_cores(tmp_path / "cores", {"q": chosen, "k": LayerCore(shared, shared, None, 1.0, 3), "v": shared})
    found = read_cores(tmp_path / "cores")
    assert torch.equal(found["q"].basis, chosen.core.basis.float())
    assert found["k"] is found["v"]


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "cores").write_text("mine")
    with pytest.raises(ValueError, match="cores exists already and is not overwritten"):
        write_cores(tmp_path / "cores", {"q": drawn()})
    assert (tmp_path / "cores").read_text() == "mine"


@pytest.mark.parametrize("command", ["audit", "measure"])
def test_a_core_without_directions_protects_nothing_and_is_refused(command, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"this basis \(12, 0\) has no directions, so it would protect nothing"):
        Subspace(torch.empty(12, 0))
    before, after, file = write_pair(tmp_path)
    layers = list(read_cores(file))
    empty = {layer: torch.empty(read_cores(file)[layer].d, 0) for layer in layers}
    save_file(empty, file, metadata={"layers": json.dumps({layer: layer for layer in layers})})
    assert main([command, str(before), str(after), "--cores", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{file}: the core of " in said
    assert "has no directions, so it would protect nothing" in said
    assert len(said.splitlines()) == 1


def test_a_file_of_cores_with_the_former_name_of_its_layers_is_read(tmp_path):
    core = drawn()
    save_file({"a": core.basis.contiguous()}, tmp_path / "cores.safetensors", metadata={"sites": json.dumps({"a": "a", "b": "a"})})
    assert all(torch.equal(found.basis, core.basis) for found in read_cores(tmp_path / "cores.safetensors").values())
    assert set(read_cores(tmp_path / "cores.safetensors")) == {"a", "b"}
