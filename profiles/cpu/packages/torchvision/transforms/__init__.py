"""Stand-in for torchvision.transforms."""

from .._missing import klass as __getattr__  # noqa: F401
from . import functional, v2
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional", "v2"]
