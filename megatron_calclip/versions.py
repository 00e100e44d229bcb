"""Versions of what a run's numbers depend on, for its folder.

Left out on purpose: the machine, which `plan` knows, and every other package, which `pip freeze` lists.
"""

from __future__ import annotations

import importlib.metadata
import platform

import megatron_calclip

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "vllm")


def versions() -> dict[str, str]:
    """By name: this package, Python, and the installed ones of those that compute."""
    found = {"megatron_calclip": megatron_calclip.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
