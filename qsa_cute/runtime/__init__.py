"""Finds, checks and loads built artifacts, and launches kernels. Importing it touches no driver."""

from qsa_cute.runtime.artifacts import Store, Wanted
from qsa_cute.runtime.launch import Kernel
from qsa_cute.runtime.loader import DeviceReport, Loader, available, default_loader, missing_reason

__all__ = ["DeviceReport", "Kernel", "Loader", "Store", "Wanted", "available", "default_loader", "missing_reason"]
