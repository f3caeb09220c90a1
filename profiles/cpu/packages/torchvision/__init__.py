"""Stand-in for torchvision: SGLang imports names of it for image models when it starts; the cpu profile serves text."""

from . import io, transforms

__aerie_stand_in__ = True
__version__ = "0.0.0+standin"
__all__ = ["io", "transforms"]
