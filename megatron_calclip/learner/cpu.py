"""Megatron-Core on CPU and gloo: the one place that knows about the missing device. A no-op with CUDA.

Megatron-Core 0.16 to 0.19 runs on CPU but for a few assumptions: it allocates with `device="cuda"` or
`torch.cuda.current_device()`, compares `Tensor.type()` with strings such as `torch.cuda.BFloat16Tensor`, and draws
from the CUDA generator. `install()` gives Megatron's own modules a view of `torch` in which the device is the CPU.
Nothing outside Megatron sees it, and no call is intercepted at run time: a `TorchFunctionMode` would wrap every
operation of the model.

Left out on purpose: anything that changes what is computed. Fusions that need CUDA kernels are switched off in
`learner/model.py`, by configuration.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_calclip.learner.versions import IMPORTED_LATE

CPU = torch.device("cpu")

# Of glibc's malloc.h: parameters of mallopt, and bytes up to which freed memory stays with the process.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1

# Factories that Megatron calls with an explicit CUDA device.
_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "rand",
    "randn",
)

# Modules that must be loaded before they are patched; whatever they import is patched with them.
_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
)


def needed() -> bool:
    """Whether this process has no CUDA device."""
    return not torch.cuda.is_available()


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


class _Stream:
    """What ordering work on a stream means where everything is synchronous: nothing."""

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _View(types.ModuleType):
    """A module that answers some names itself and passes all others through."""

    def __init__(self, module: types.ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(answers)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _torch_on_cpu() -> _View:
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: CPU,
            "current_stream": lambda *_: _Stream(),
            "default_stream": lambda *_: _Stream(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "manual_seed": lambda _: None,
        },
    )
    return _View(torch, {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES} | {"cuda": cuda})


def _install_rng_tracker() -> None:
    """Megatron's random states, held by CPU generators instead of CUDA's."""
    from megatron.core.tensor_parallel import random as mrandom

    class CpuRngStatesTracker(mrandom.CudaRNGStatesTracker):
        """The same named states for the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            """Register a state under a name that is not taken yet."""
            self._is_initialized = True
            assert seed not in self.seeds_ and name not in self.states_
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = mrandom._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the named state inside the block."""
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    # Recomputation puts the device's generator back to where forward found it: here that is the CPU's.
    mrandom._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    mrandom._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)
    mrandom._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    mrandom._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


@contextlib.contextmanager
def _compiler_not_loaded() -> Iterator[None]:
    """Leave operations that `torch.compile` would decorate as they are.

    Megatron decorates its fused operations when it is imported, and that alone loads the compiler: seconds in every
    process, for operations that are switched off without CUDA.
    """

    def undecorated(function: Any = None, **_: Any) -> Any:
        return (lambda later: later) if function is None else function

    compiler = torch.compile
    torch.compile = undecorated  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


def _keep_freed_memory() -> None:
    """Let the allocator hand freed activations out again instead of giving them back to the system.

    glibc maps every tensor of more than 32 MiB anew, and trims its heap between micro-batches; each step then pays for
    the page faults. Other C libraries have no such settings and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _KEPT_BYTES)


@functools.cache
def install() -> None:
    """Make Megatron-Core usable without CUDA; call once per process before anything of it is built."""
    if not needed():
        return
    _keep_freed_memory()
    with _compiler_not_loaded():
        for name in (*_MODULES, *IMPORTED_LATE):
            importlib.import_module(name)
    view = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _install_rng_tracker()


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let `Tensor.type()` name CUDA types, which Megatron's optimizer compares with when it is built."""
    if not needed():
        yield
        return
    plain = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = plain  # type: ignore[method-assign]
