"""What is asked of a device by its kind: which one "auto" is, its name, its memory, its generators, where float64 is done."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from anchorlora import Subspace, devices
from anchorlora.config import BaseModelSettings
from anchorlora.continual.seeds import dropout_from
from anchorlora.continual.sequence import peak_memory
from anchorlora.models.load import device_of, dtype_of
from anchorlora.runs.provenance import computing

CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """An accelerator of a kind, with what its torch module says."""

    def made(kind, **module):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**module))

    return made


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_is_the_accelerator_that_torch_finds(kind, pretend):
    pretend(kind)
    assert device_of(BaseModelSettings(device="auto")) == torch.device(kind)
    assert device_of(BaseModelSettings(device="cpu")) == CPU


def test_auto_is_the_cpu_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert device_of(BaseModelSettings(device="auto")) == CPU


def test_an_unknown_device_is_refused_with_those_that_can_be_given():
    with pytest.raises(ValueError, match="no device is called 'nowhere'; give cpu, cuda, cuda:0, xpu, mps or auto"):
        device_of(BaseModelSettings(device="nowhere"))


@pytest.mark.parametrize(
    ("kind", "module", "dtype"),
    [
        ("cuda", {"is_bf16_supported": lambda: True}, torch.bfloat16),
        ("cuda", {"is_bf16_supported": lambda: False}, torch.float32),
        ("xpu", {"is_bf16_supported": lambda: True}, torch.bfloat16),
        ("mps", {}, torch.float32),  # says nothing of it
    ],
)
def test_the_base_is_bfloat16_where_the_accelerator_says_that_it_has_it(kind, module, dtype, pretend):
    pretend(kind, **module)
    assert dtype_of(BaseModelSettings(device="auto", dtype="auto")) == dtype
    assert dtype_of(BaseModelSettings(device="auto", dtype="float16")) == torch.float16


def test_a_gpu_is_named_and_counts_its_memory_on_the_device_of_the_run(pretend):
    pretend("xpu", get_device_name=lambda device: f"Max {device.index}", max_memory_allocated=lambda device: 7 + device.index)
    gpu = torch.device("xpu:1")
    assert computing(gpu)["device"] == "Max 1"
    assert "instructions" not in computing(gpu)
    assert peak_memory(gpu) == 8


def test_a_run_on_the_cpu_names_the_cpu_whatever_else_there_is(pretend):
    pretend("cuda")
    assert computing(CPU)["device"] == "cpu"
    assert computing(CPU)["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert peak_memory(CPU) > 1e6


def test_a_device_that_counts_no_memory_leaves_the_resident_one(pretend):
    pretend("mps")
    assert peak_memory(torch.device("mps")) == peak_memory(CPU)


def test_apples_gpu_has_no_name_in_torch_2_7_and_its_memory_is_the_machines(monkeypatch):
    monkeypatch.delattr(torch.backends.mps, "get_name", raising=False)
    assert devices.device_name(torch.device("mps")) == "mps"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    monkeypatch.setattr(devices, "_text_of", {devices.LIMITS[0]: "max\n", devices.LIMITS[1]: "9\n"}.get)
    assert devices.free_memory(torch.device("mps")) == devices.free_memory(CPU) == 7
    monkeypatch.setattr(devices, "_text_of", {devices.LIMITS[0]: "3\n", devices.LIMITS[1]: ""}.get)
    assert devices.free_memory(CPU) == 3  # of a container


def test_the_generator_of_the_runs_own_device_is_kept_and_put_back(pretend):
    states = {0: torch.tensor([0]), 1: torch.tensor([1])}
    pretend(
        "cuda",
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.update({device.index: state}),
    )
    second = torch.device("cuda:1")
    kept = devices.generator_states(second)
    assert kept["cuda"].tolist() == [1]
    assert torch.equal(kept["cpu"], torch.get_rng_state())
    states[1] = torch.tensor([5])
    torch.rand(3)
    devices.set_generator_states(second, kept)
    assert {i: state.tolist() for i, state in states.items()} == {0: [0], 1: [1]}
    assert torch.equal(kept["cpu"], torch.get_rng_state())


def test_dropout_puts_the_generators_of_all_devices_of_the_accelerator_back(monkeypatch):
    asked = []

    def forked(indices, *, device_type):
        asked.append((list(indices), device_type))
        return torch.no_grad()

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with dropout_from(1, "x"):
        pass
    assert asked == [([0, 1, 2], "xpu")]


def test_float64_is_done_where_a_tensor_is_and_costs_no_copy_there():
    x, y = torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert devices.in_float64(x).dtype == torch.float64
    assert devices.in_float64(y) is y
    assert devices.float64_device(CPU) == CPU
    assert devices.float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
    core = Subspace(torch.eye(3, 2, dtype=torch.float64))
    assert core.to(dtype=torch.float64, device="cpu") is core


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_that_is_freed_is_not_mapped_again():
    code = """
import resource, torch
from anchorlora.devices import reuse_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        some = [torch.ones(2**20 + i) for i in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = faults()
reuse_freed_memory()
faults()
print(usual, faults())
"""
    usual, now = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split())
    assert now < usual / 10


@pytest.mark.parametrize("threads", [1, 2])
def test_numpy_computes_on_as_many_threads_as_torch(threads, monkeypatch):
    """What a recipe's `threads` and a resumed run set for torch holds for products and eigenvectors that NumPy computes, too."""
    seen, before, eigh = [], torch.get_num_threads(), np.linalg.eigh

    def counting(matrix):
        seen.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return eigh(matrix)

    monkeypatch.setattr(np.linalg, "eigh", counting)
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(3 - threads, user_api="blas"):
            values, vectors = devices.eigenvectors(devices.second_moment(torch.randn(64, 8, dtype=torch.float64)))
            after = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {threads}
    assert after == {3 - threads}  # as it was
    assert vectors.shape == (8, 8)
    assert bool((values > 0).all())
