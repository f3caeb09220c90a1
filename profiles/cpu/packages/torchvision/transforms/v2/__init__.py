"""Stand-in for torchvision.transforms.v2."""

from ..._missing import klass as __getattr__  # noqa: F401
from .. import functional
from ..functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
