"""A second device for a machine that has none: tensors that say "sim", lie in CPU memory and compute there.

An operation that mixes them with tensors of the CPU raises, as on a GPU. Without float64, as on Apple's MPS, every float64 tensor
on the device raises too, and so does a copy from it that becomes float64 on its way. Dropout draws from a generator of the
device's own. So what is misplaced is found. What is not misplaced computes what the CPU computes, bit for bit; wrong kernels of a
real device are not found.

`install` changes torch for the whole process, so it belongs into a process of its own. It stands on torch's backends in Python
(PrivateUse1), which torch calls experimental.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

NAME = "sim"
MAKER = "simulated"  # its name as a product
BYTES = 123_456_789  # what it says of its memory
COPIES = ("aten::copy_", "aten::_to_copy")  # one tensor may be here and one on the CPU
WIDE = (torch.float64, torch.complex128)
NUMBERS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2")


class Module(backend_registration._DummyBackendModule):
    """torch.sim, which torch and its users ask about the device: there is one, number 0."""

    def __init__(self):
        self.generator = torch.Generator()

    def get_device_name(self, device=None):
        return MAKER

    def max_memory_allocated(self, device=None):
        return BYTES

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    @contextmanager
    def drawing(self):
        """CPU kernels draw from the CPU's generator, so that one is lent the state of this device's."""
        kept = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept)


class SimTensor(torch.Tensor):
    """A tensor without memory that stands before `raw`, a tensor of the CPU."""

    @staticmethod
    def __new__(cls, raw):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        with torch._C._InferenceMode(False):  # torch makes no view of such a tensor that was made in inference mode
            tensor = torch.Tensor._make_wrapper_subclass(cls, raw.size(), device=torch.device(NAME, 0), **layout)
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # operations come in below autograd, and only there

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return cls.device_of_all.run(op, *args, **(kwargs or {}))

    def tolist(self):  # torch would read the memory that is not there
        self.device_of_all.synchronized += 1
        return self.raw.tolist()


class Device:
    """Runs an operation on what stands behind the device's tensors, and puts a tensor before each that comes of it."""

    def __init__(self, module, *, float64):
        self.module, self.float64 = module, float64
        self.copied = 0  # tensors of more than one number that went to the CPU
        self.launched = 0  # operations that a GPU would run a kernel for: all but those that give a view
        self.synchronized = 0  # operations that a GPU must end all others for, since the process asks for numbers or how many

    def run(self, op, *args, **kwargs):
        name, tensors = op._schema.name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours, others = ([x for x in tensors if isinstance(x, SimTensor) == here] for here in (True, False))
        if ours and any(x.dim() for x in others) and name not in COPIES:  # a number may be anywhere
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {NAME}:0 and cpu")
        if name in COPIES and not self.float64:
            self.refuse_widening(*args, **kwargs)
        views = any(each.alias_info and not each.alias_info.is_write for each in op._schema.arguments)
        self.launched += bool(ours) and not views
        self.synchronized += bool(ours) and self.waits(name, args, kwargs)
        with self.module.drawing() if torch.Tag.nondeterministic_seeded in op.tags else nullcontext():
            found = op(*tree_map(behind, args), **tree_map(behind, kwargs))
        if name == "aten::_local_scalar_dense":
            return found
        if name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu"):
            self.copied += found.numel() > 1
            return found
        given = {id(x.raw): x for x in ours} | {id(x): x for x in others}  # what works in place returns what it was given
        return tree_map(partial(self.before, given), found)

    def before(self, given, value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype in WIDE and not self.float64 and id(value) not in given:
            raise TypeError(f"there is no {value.dtype} on {NAME}; use float32 instead")
        return given[id(value)] if id(value) in given else SimTensor(value)

    @staticmethod
    def waits(name, args, kwargs):
        """An index of booleans is first turned into places, of which nobody knows how many there are."""
        if name == "aten::copy_":
            return not isinstance(args[0], SimTensor)
        if name == "aten::_to_copy":
            return kwargs.get("device") == torch.device("cpu")
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        return name in NUMBERS or (name in ("aten::index", "aten::index_put", "aten::index_put_") and bool(masks))

    def refuse_widening(self, one, other=None, *_, dtype=None, **__):
        """MPS converts what it copies to the CPU on its own side.  one, other: as `copy_` and `_to_copy` take them."""
        source, to = (one, dtype) if other is None else (other, one.dtype)
        if isinstance(source, SimTensor) and to in WIDE:
            raise TypeError(f"{source.dtype} on {NAME} cannot become {to} while it is copied; copy it to the CPU first")


def behind(value):
    if isinstance(value, SimTensor):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def install(*, float64=True):
    """Give this process the device, as the one accelerator that torch finds."""
    module = Module()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    SimTensor.device_of_all = device = Device(module, float64=float64)
    everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(device.run, "PrivateUse1")  # for what makes tensors of none
    own.impl(
        "silu_backward", partial(device.run, torch.ops.aten.silu_backward.default), "PrivateUse1"
    )  # in parts it rounds otherwise
    device.registered = everything, own  # for as long as these live
    _accept_numbers()
    torch.inference_mode = torch.no_grad  # a tensor that stands before another is no inference tensor


def _accept_numbers():
    """Make tensors from Python numbers on the CPU and move them: torch does it where no backend in Python is asked."""
    _device_constructors()  # remembers now what `with torch.device("meta")` acts on, which is torch's own torch.tensor
    make = torch.tensor

    def tensor(data, *, device=None, **settings):
        made = make(data, **settings)
        return made if device is None else made.to(device)

    def new_tensor(self, data, *, dtype=None, device=None):
        return make(data, dtype=dtype or self.dtype).to(device or self.device)

    torch.tensor, torch.Tensor.new_tensor = tensor, new_tensor
