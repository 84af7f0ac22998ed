"""recavsr: streaming video super-resolution by one-step diffusion."""

from __future__ import annotations

__version__ = "0.1.0"
