"""Stand-in for torchvision.io."""

import enum

from .._missing import function as __getattr__  # noqa: F401


class ImageReadMode(enum.Enum):
    """How an image file would be decoded."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
