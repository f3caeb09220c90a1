"""Stand-in for torchvision.transforms.v2.functional."""

from torchvision.transforms.functional import InterpolationMode

from ..._missing import function as __getattr__  # noqa: F401

__all__ = ["InterpolationMode"]
