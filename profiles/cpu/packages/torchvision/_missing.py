"""Names that exist and do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def function(name: str) -> Callable[..., NoReturn]:
    """Return a function of that name that refuses to be called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"torchvision.{name} is not there on the cpu profile: it serves text models only")

    return missing


def klass(name: str) -> type:
    """Return an empty class of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
