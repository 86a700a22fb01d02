"""One root, five kinds of error and a case of one of them. Each says what was wrong, what was found, what to do."""


class QsaError(Exception):
    """Root of every exception that qsa_cute raises on purpose."""


class ArgumentError(QsaError, ValueError):
    """A caller's value is wrong: shape, type, device, stride, alignment or range. Nothing was launched."""


class OverlapError(ArgumentError):
    """An output shares memory with another tensor: where the tensors lie is wrong, not what they are."""


class UnsupportedError(QsaError):
    """No kernel covers this shape, type or device; `can_implement` says so beforehand with the same reason."""


class ArtifactError(QsaError):
    """An artifact is missing, truncated, altered, foreign or of another version. Names the mending command."""


class CaptureError(QsaError, RuntimeError):
    """First use under CUDA graph capture. Names the `preflight` call to make before capturing."""


class DriverError(QsaError, RuntimeError):
    """A CUDA driver call failed; carries the call and the driver's own error name."""
