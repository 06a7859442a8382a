# SPDX-License-Identifier: Apache-2.0
"""A "cuda:0" for machines without a GPU: its tensors wrap tensors of the CPU, and refuse to be mixed with such.

While `pretend_gpu` is active, PyTorch has one GPU. What is created there or moved there is a `GpuTensor`; every
operation runs on the tensors inside, after a check that a GPU would take these operands:

    torch.ones(3, device="cuda") + torch.ones(3)   # raises MixedDevicesError, as CUDA raises
    torch.ones(3, device="cuda") + torch.tensor(2.0)   # a CPU tensor without dimensions is a number to CUDA, too

It shows: operands, indices and generators on the wrong device; `.cpu()`, `.to(device)` and `device=` that are missing,
or there in vain; paths of the package that are taken on CUDA tensors alone; random numbers drawn from the GPU's
generator. Autograd runs the backward of its tensors in the thread that it has for that device.

It cannot show: races (everything is done when it is launched, on one stream), times, the memory a GPU would need,
numbers that kernels of CUDA round otherwise, what DGL's build for CUDA or NCCL do. Some refusals of CUDA are not known
here (dtypes that its kernels lack), and wherever code looks into a tensor in C++, as `DistributedDataParallel` does,
it finds no memory: `ranks.py` has a stand-in for that one.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch import __future__ as future
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

GPU = torch.device("cuda", 0)
FREE_BYTES, TOTAL_BYTES = 1 << 30, 8 << 30
"""Little free memory: what is measured on GPUs is then measured on few rows."""

_PROPERTIES = SimpleNamespace(name="pretended GPU", uuid="GPU-pretended", major=9, minor=0, total_memory=TOTAL_BYTES)

_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
_INDEXING = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of the CPU and of the GPU that CUDA would not take together."""


class GpuTensor(Tensor):
    """A tensor of the pretended GPU."""

    on_cpu: Tensor
    """The tensor of the CPU that stands for the GPU's memory."""

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=GPU,
        )
        assert isinstance(tensor, GpuTensor)
        tensor.on_cpu = on_cpu
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GpuTensor({self.on_cpu!r})"

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuTensor:
        if id(self) not in memo:
            copied = memo[id(self)] = GpuTensor(self.on_cpu.clone()).requires_grad_(self.requires_grad)
            copied.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
            copied.__dict__.update({key: value for key, value in self.__dict__.items() if key != "on_cpu"})
        copied = memo[id(self)]
        assert isinstance(copied, GpuTensor)
        return copied


class _GpuMode(TorchDispatchMode):
    """Sees the operations without a tensor of the GPU, too: those that create one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def pretend_gpu(library: Path) -> Iterator[None]:
    """Gives this process a GPU. It cannot be taken away altogether: PyTorch's own code sees one until the process ends.

    Args:
        library: Made by `build_library`.
    """
    ctypes.CDLL(str(library)).pretend_gpu_install()
    with contextlib.ExitStack() as stack:
        for name, function in _cuda_functions().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        # A parameter cannot become a tensor of another class: `model.to("cuda")` has to make new ones.
        stack.callback(future.set_overwrite_module_params_on_conversion, False)
        future.set_overwrite_module_params_on_conversion(True)
        # Otherwise `torch.tensor(..., device="cuda")` copies to the device without asking modes.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(_GpuMode())
        yield


# ---------------------------------------------------------------- operations


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "pin_memory" in kwargs:  # no memory here is pinned
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    has_gpu_tensor = any(isinstance(tensor, GpuTensor) for tensor in _tensors((*args, *kwargs.values())))
    if not has_gpu_tensor and not _is_gpu(kwargs.get("device")):
        return func(*args, **kwargs)
    name = func._schema.name
    if func.namespace == "dgl_hybrid":  # some take their few numbers on the CPU; what they run is seen here again
        with _GpuMode():
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
    if name == "aten::_pin_memory":
        return args[0]
    if name in _INDEXING:
        _refuse_mixed_index(func, *args)
    elif name not in _COPIES:
        _refuse_mixed(func, args, kwargs)
    # A copy, or a new tensor like one of the GPU (`new_zeros`).
    goes_to_cpu = kwargs.get("device") is not None and not _is_gpu(kwargs["device"])
    goes_to_cpu |= name in _INDEXING and not isinstance(args[0], GpuTensor)
    inner_args = [_map(_on_cpu, value) for value in args]
    inner_kwargs = {key: _map(_on_cpu, value) for key, value in kwargs.items()}
    with _gpu_random_numbers(func, inner_kwargs):
        out = func(*inner_args, **inner_kwargs)
    if goes_to_cpu or not any(True for _ in _tensors((out,))):
        return out
    if name == "aten::copy_" and not isinstance(args[0], GpuTensor):
        return args[0]
    if name == "aten::to":  # inside of a registered op; its schema says that it may return what it is given
        return _map(_on_gpu, out)
    return return_and_correct_aliasing(func, args, kwargs, _map(_on_gpu, out))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """What of arguments or results are tensors: themselves, or in a list or tuple."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(function(item) for item in value) if isinstance(value, (list, tuple)) else function(value)


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_cpu(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.on_cpu
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_gpu(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) else value


def _refuse_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of the CPU's tensors, pointwise operations take those without dimensions, unless they are written to."""
    parameters = {parameter.name: parameter for parameter in func._schema.arguments}
    given = [*zip(func._schema.arguments, args), *((parameters[key], value) for key, value in kwargs.items())]
    wrong = [
        tuple(tensor.shape)
        for parameter, value in given
        for tensor in _tensors([value])
        if not isinstance(tensor, GpuTensor)
        and (tensor.dim() > 0 or not _takes_numbers(func) or _is_written(parameter))
    ]
    generator = kwargs.get("generator")
    if wrong:
        raise MixedDevicesError(f"{func}: expected all tensors on {GPU} (got tensors of shape {wrong} on cpu)")
    if generator is not None and generator.device != GPU:
        raise MixedDevicesError(f"{func}: expected a generator of {GPU} (got one of {generator.device})")


def _takes_numbers(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.startswith(("aten::fill", "aten::_foreach"))


def _is_written(parameter: Any) -> bool:
    return parameter.alias_info is not None and parameter.alias_info.is_write


def _refuse_mixed_index(
    func: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor | None = None, *rest: Any
) -> None:
    """Indices may be on the CPU where what they index is on the GPU; values, either way, if they are one number."""
    is_on_gpu = isinstance(x, GpuTensor)
    if not is_on_gpu and any(isinstance(index, GpuTensor) for index in indices):
        raise MixedDevicesError(f"{func}: indices must be on the CPU, where the indexed tensor is (got one on {GPU})")
    if values is not None and isinstance(values, GpuTensor) != is_on_gpu and values.dim() > 0:
        raise MixedDevicesError(f"{func}: expected values on {x.device} (got them on {values.device})")


# ---------------------------------------------------------------- random numbers


_default_generator = torch.Generator().manual_seed(0)
"""What the GPU draws from where no generator is given."""


@contextlib.contextmanager
def _gpu_random_numbers(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Has an operation on the CPU draw from a generator of the GPU: the one in `kwargs`, else the default one."""
    given: torch.Generator | None = kwargs.get("generator")
    if given is not None:
        lent = kwargs["generator"] = torch.Generator()
        lent.set_state(given.get_state())
        yield
        given.set_state(lent.get_state())
    elif torch.Tag.nondeterministic_seeded in func.tags:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(_default_generator.get_state())
        try:
            yield
        finally:
            _default_generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)
    else:
        yield


# ---------------------------------------------------------------- torch.cuda


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    """What takes the place of functions of `torch.cuda` that would look for a driver."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": _default_generator.get_state(),
        "set_rng_state": lambda state, device="cuda": _default_generator.set_state(state),
        "manual_seed": _default_generator.manual_seed,
        "manual_seed_all": _default_generator.manual_seed,
    }
