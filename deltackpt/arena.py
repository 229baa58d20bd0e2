"""Memory that torch does not allocate: for a Decompression Engine, with what the driver says of both, and pinned.

An engine reaches only memory that was allocated for it. Whether memory is such is asked of the driver, pointer by
pointer, and so is what the engine can read: nothing is inferred from a GPU's name. Torch's allocators may be set up in
ways that an engine cannot use.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from deltackpt import codec as codecs
from deltackpt.errors import ConfigError
from deltackpt.memory import DeviceBytes

if TYPE_CHECKING:
    import torch

READS = {codecs.DEFLATE: 1, codecs.SNAPPY: 2, codecs.LZ4: 4}
"""Bit of each codec in the driver's mask, CUmemDecompressAlgorithm."""

# By number, since older bindings of the driver lack the names.
_ALGORITHM_MASK, _MAXIMUM_LENGTH, _HOST_NUMA_ID, _HOST_NUMA_MAPPING = 136, 137, 134, 141
_IS_CAPABLE = 21
_FOR_ENGINE = 2


@dataclass(frozen=True)
class Capability:
    """What the driver says of a device's Decompression Engine. mask: 0 where there is none; limit: bytes of a frame."""

    mask: int
    limit: int

    def reads(self, codec: int) -> bool:
        """Return whether the engine decompresses frames of this codec."""
        return bool(self.mask & READS.get(codec, 0))

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that the engine reads."""
        return tuple(codecs.NAMES[c] for c in sorted(READS) if self.reads(c))


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as exc:
        raise ConfigError(
            f"the CUDA driver cannot be asked: {exc}; pip install 'deltackpt[cuda13]' (or cuda12)"
        ) from exc
    return driver


def _require(result: tuple[Any, ...], what: str) -> Any:
    """Return what a driver call returned. Raises ConfigError for its error."""
    driver = _driver()
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        name = getattr(error, "name", error)
        raise ConfigError(f"{what}: the CUDA driver answers {name}; run `deltackpt doctor`, or use another backend")
    return values[0] if values else None


@lru_cache
def _context(index: int) -> Any:
    """Hold on to a device's primary context, which is torch's, for as long as the process lives."""
    driver = _driver()
    try:
        _require(driver.cuInit(0), "cuInit")
    except RuntimeError as exc:
        raise ConfigError(f"no CUDA driver: {exc}; install NVIDIA's driver, or use another backend") from exc
    return _require(driver.cuDevicePrimaryCtxRetain(index), f"context of device {index}")


@contextmanager
def _current(device: torch.device) -> Iterator[Any]:
    """Make a device's primary context this thread's current one; yields the driver."""
    driver = _driver()
    _require(driver.cuCtxPushCurrent(_context(device.index or 0)), f"context of {device}")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()


def _attribute(driver: Any, number: int, device: torch.device) -> int:
    attribute = driver.CUdevice_attribute(number)
    return int(_require(driver.cuDeviceGetAttribute(attribute, device.index or 0), f"attribute {number} of {device}"))


def capability(device: torch.device) -> Capability:
    """Ask the driver what a device's Decompression Engine reads. Raises ConfigError where it cannot be asked."""
    with _current(device) as driver:
        return Capability(_attribute(driver, _ALGORITHM_MASK, device), _attribute(driver, _MAXIMUM_LENGTH, device))


def capable(memory: torch.Tensor, device: torch.device) -> bool:
    """Return whether the driver says that the engine reaches this memory: pointer attribute 21.

    memory: of the device, or host memory of `host_memory`; other host memory is not.
    """
    with _current(device) as driver:
        error, value = _pointer_attribute(_IS_CAPABLE, memory.data_ptr())
        # The driver does not know host memory that it did not allocate.
        return error == int(driver.CUresult.CUDA_SUCCESS) and bool(value)


def _pointer_attribute(number: int, address: int) -> tuple[int, int]:
    """Ask the driver itself: cuda-bindings 13 has no type for this attribute and refuses it."""
    value = ctypes.c_uint64(0)
    ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    ask.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return ask(ctypes.byref(value), number, address), value.value


def device_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate device memory that the engine reaches: u8[nbytes], whatever torch's allocators are set to.

    Its address is a multiple of 256; its bytes are not set. Freed with the last tensor that looks into it, which waits
    for the device. Raises ConfigError where there is too little, or where it is not capable.
    """
    import torch

    with _current(device) as driver:
        address = int(_require(driver.cuMemAlloc(max(1, nbytes)), f"{nbytes} bytes of arena on {device}"))
        held = DeviceBytes(address, nbytes)
        weakref.finalize(held, _free, device, lambda d: d.cuMemFree(address)).atexit = False
    memory = torch.as_tensor(held, device=torch.device("cuda", device.index or 0))
    assert memory.data_ptr() == address, "torch made a copy"
    return _require_capable(memory, device)


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate host memory out of which the engine, and any kernel, reads frames in place: CPU tensor u8[nbytes].

    On the host's memory node next to the device, a whole number of pages, readable by the device at the same address
    and writable by the host alone. Freed with the last tensor or array that looks into it; nothing on the device may
    then still read it. Raises ConfigError where the system has no such memory, or where it is not capable.
    """
    import torch

    with _current(device) as driver, ExitStack() as undo:
        if not _attribute(driver, _HOST_NUMA_MAPPING, device):
            raise ConfigError(
                f"{device} maps no memory of the host's nodes (attribute {_HOST_NUMA_MAPPING} is 0), so that it cannot "
                "read frames there; use device memory"
            )
        place = driver.CUmemAllocationProp()
        place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        # A host that knows of no nodes says -1; all of its memory is node 0.
        place.location.id = max(0, _attribute(driver, _HOST_NUMA_ID, device))
        place.allocFlags.usage = _FOR_ENGINE
        what = f"{nbytes} bytes of host arena for {device}"
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = int(_require(driver.cuMemGetAllocationGranularity(place, minimum), what))
        size = -(-max(1, nbytes) // page) * page
        handle = _require(driver.cuMemCreate(size, place, 0), what)
        undo.callback(driver.cuMemRelease, handle)
        address = int(_require(driver.cuMemAddressReserve(size, 0, 0, 0), what))
        undo.callback(driver.cuMemAddressFree, address, size)
        _require(driver.cuMemMap(address, size, 0, handle, 0), what)
        undo.callback(driver.cuMemUnmap, address, size)
        host, reader = driver.CUmemAccessDesc(), driver.CUmemAccessDesc()
        host.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        host.location.id = place.location.id
        host.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        reader.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        reader.location.id = device.index or 0
        reader.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        _require(driver.cuMemSetAccess(address, size, [host, reader], 2), what)
        held = (ctypes.c_uint8 * size).from_address(address)
        kept = undo.pop_all()
        weakref.finalize(held, _free, device, lambda _: kept.close()).atexit = False
    return _require_capable(torch.frombuffer(held, dtype=torch.uint8, count=max(1, nbytes))[:nbytes], device)


def pinned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate host memory that kernels of the device read and write at the same address: CPU tensor u8[nbytes].

    Torch's own would be rounded up to a power of two. Freed with the last tensor or array that looks into it; nothing
    on the device may then still use it. Raises ConfigError where the host has too little.
    """
    import torch

    with _current(device) as driver:
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(_require(driver.cuMemHostAlloc(max(1, nbytes), flags), f"{nbytes} bytes of pinned memory"))
        held = (ctypes.c_uint8 * max(1, nbytes)).from_address(address)
        weakref.finalize(held, _free, device, lambda d: d.cuMemFreeHost(address)).atexit = False
    return torch.frombuffer(held, dtype=torch.uint8, count=max(1, nbytes))[:nbytes]


def _free(device: torch.device, free: Callable[[Any], object]) -> None:
    with _current(device) as driver:
        free(driver)


def _require_capable(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not capable(memory, device):
        raise ConfigError(
            f"memory allocated for the Decompression Engine of {device} is not capable of it: pointer attribute "
            f"{_IS_CAPABLE} is 0; update the driver, or use the cuda backend"
        )
    return memory
