"""The CUDA driver calls that loading and launching need, as one object with plain integers in and out.

The only module that imports cuda.bindings; a test puts an object with the same methods in its place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qsa_cute.errors import DriverError

Handle = Any  # a cuda.bindings handle: CUlibrary, CUkernel, CUfunction or CUcontext

_MISSING = (
    "the CUDA driver cannot be loaded ({error}); install the NVIDIA driver (libcuda.so.1) on this machine. "
    "Building artifacts and `can_implement` need none"
)
_NO_BINDINGS = "cuda.bindings cannot be imported ({error}); install it: pip install 'cuda-bindings>=13,<14'"


class Driver:
    """Checked driver calls. Every method raises DriverError, which names the call and the driver's error.

    Attributes:
        context_id: `cuCtxGetId` itself, unchecked, for the launch path.
        launch: `cuLaunchKernelEx` itself, unchecked, for the launch path.
    """

    def __init__(self) -> None:
        try:
            import cuda.bindings.driver as cuda
        except ImportError as error:
            raise DriverError(_NO_BINDINGS.format(error=error)) from error
        self._cuda = cuda
        try:
            self._call("cuInit", 0)
        except DriverError:
            raise
        except RuntimeError as error:
            raise DriverError(_MISSING.format(error=error)) from error
        self.context_id = cuda.cuCtxGetId
        self.launch = cuda.cuLaunchKernelEx

    def _call(self, name: str, *args: Any) -> Any:
        error, *values = getattr(self._cuda, name)(*args)
        if error:
            raise DriverError(f"{name} failed: {self.error_text(error)}")
        return values[0] if len(values) == 1 else tuple(values)

    def error_text(self, error: Any) -> str:
        """An error code as "CUDA_ERROR_NAME (what the driver says of it)"."""
        _, text = self._cuda.cuGetErrorString(error)
        return f"{getattr(error, 'name', error)} ({text.decode() if text else 'no description'})"

    # Devices and contexts.

    def version(self) -> int:
        """The driver's CUDA version: 13010 for 13.1."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        name: bytes = self._call("cuDeviceGetName", 128, device)
        return name.split(b"\0")[0].decode()

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return (
            self._device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", device),
            self._device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", device),
        )

    def smem_optin(self, device: int) -> int:
        """Bytes of shared memory that one block may opt in to."""
        return self._device_attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)

    def _device_attribute(self, name: str, device: int) -> int:
        return int(self._call("cuDeviceGetAttribute", getattr(self._cuda.CUdevice_attribute, name), device))

    def current_context(self) -> int:
        """The calling thread's context as an id that is never used again, 0 for none."""
        error, number = self.context_id(None)
        return 0 if error else int(number)

    def current_device(self) -> int:
        """Device of the current context."""
        return int(self._call("cuCtxGetDevice"))

    def retain_primary(self, device: int) -> Handle:
        """The device's primary context, retained: to be called once a device."""
        return self._call("cuDevicePrimaryCtxRetain", device)

    @contextmanager
    def pushed(self, context: Handle) -> Iterator[None]:
        """`context` is current within; the one before is current again after."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    # Capture.

    def is_capturing(self, stream: int) -> bool:
        """Whether `stream` is being captured. The legacy stream counts as captured while it must not be used."""
        cuda = self._cuda
        error, status = cuda.cuStreamIsCapturing(stream)
        if error == cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        if error:
            raise DriverError(f"cuStreamIsCapturing failed: {self.error_text(error)}")
        return bool(status != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    @contextmanager
    def capture_relaxed(self) -> Iterator[None]:
        """Calls within do not invalidate a capture that another thread has under way."""
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    # Libraries and kernels.

    def load_library(self, cubin: bytes) -> Handle:
        return self._call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)

    def unload_library(self, library: Handle) -> None:
        self._call("cuLibraryUnload", library)

    def get_kernel(self, library: Handle, symbol: str) -> Handle:
        return self._call("cuLibraryGetKernel", library, symbol.encode())

    def get_function(self, kernel: Handle) -> Handle:
        """The kernel's function in the current context, loading its code there."""
        return self._call("cuKernelGetFunction", kernel)

    def params(self, kernel: Handle) -> list[tuple[int, int]]:
        """(offset, size) in bytes of every parameter, as the cubin itself has them."""
        found: list[tuple[int, int]] = []
        while True:
            error, offset, size = self._cuda.cuKernelGetParamInfo(kernel, len(found))
            if error == self._cuda.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last one
                return found
            if error:
                raise DriverError(f"cuKernelGetParamInfo failed: {self.error_text(error)}")
            found.append((int(offset), int(size)))

    def max_threads(self, kernel: Handle, device: int) -> int:
        """Threads a block may have, given the kernel's registers."""
        return self._kernel_attribute("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK", kernel, device)

    def static_smem(self, kernel: Handle, device: int) -> int:
        return self._kernel_attribute("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES", kernel, device)

    def _kernel_attribute(self, name: str, kernel: Handle, device: int) -> int:
        attribute = getattr(self._cuda.CUfunction_attribute, name)
        return int(self._call("cuKernelGetAttribute", attribute, kernel, device))

    def allow_smem(self, kernel: Handle, device: int, size: int) -> None:
        """Let launches ask for `size` bytes of dynamic shared memory."""
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuKernelSetAttribute", attribute, size, kernel, device)

    def prefer_smem(self, kernel: Handle, device: int) -> None:
        """Give the kernel's blocks all of the SM's shared memory: how many fit is part of its tuning."""
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._call("cuKernelSetAttribute", attribute, 100, kernel, device)

    def allow_large_clusters(self, kernel: Handle, device: int) -> None:
        """Let launches ask for clusters of more than 8 blocks."""
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._call("cuKernelSetAttribute", attribute, 1, kernel, device)

    def zero(self, address: int, words: int, stream: int) -> None:
        """Set 32-bit words to zero, in stream order."""
        self._call("cuMemsetD32Async", address, 0, words, stream)

    # Memory of the current context, for self-tests: a host has its own.

    def allocate(self, size: int) -> int:
        return int(self._call("cuMemAlloc", size))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def upload(self, address: int, data: bytes) -> None:
        """Copy from the host, and wait for it."""
        held = (ctypes.c_char * len(data)).from_buffer_copy(data)
        self._call("cuMemcpyHtoD", address, ctypes.addressof(held), len(data))

    def download(self, address: int, size: int) -> bytes:
        """Wait for the device, and copy to the host. A kernel's fault is reported here."""
        self._call("cuCtxSynchronize")
        held = (ctypes.c_char * size)()
        self._call("cuMemcpyDtoH", ctypes.addressof(held), address, size)
        return held.raw

    def encode_map(
        self, dtype: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> tuple[int, ...]:
        """A tensor map with the 128-byte swizzle, as 16 signed words; touches no device, but a context must be current.

        Args:
            sizes, box: elements, innermost first. strides: bytes, of all dimensions but the innermost.
        """
        cuda = self._cuda
        types = cuda.CUtensorMapDataType
        element = {
            "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "fp8_e4m3": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        }[dtype]
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            element,
            len(sizes),
            address,
            [cuda.cuuint64_t(size) for size in sizes],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1)] * len(sizes),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return tuple(int(word) - (int(word) >> 63 << 64) for word in encoded.opaque)

    def launch_config(self, address: int) -> Any:
        """A CUlaunchConfig that lies at `address`."""
        return self._cuda.CUlaunchConfig(address)


@functools.cache
def default_driver() -> Driver:
    """The process's driver, initialised at the first call; a failure is not kept."""
    return Driver()
