"""Stand-in for torchvision.transforms.functional."""

import enum

from .._missing import function as __getattr__  # noqa: F401


class InterpolationMode(enum.Enum):
    """How an image would be resized."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
