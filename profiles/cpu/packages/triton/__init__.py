"""Import-only stand-in for Triton on a machine without a GPU: kernels are defined, and never run.

Any attribute and any submodule exists: a name with a capital is a class that can be subclassed, any other a module that
is also a decorator and gives its function back unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

__aerie_stand_in__ = True
__version__ = "3.9.0"


class _Base:
    """What every class of the stand-in derives from."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


class _Anything(types.ModuleType):
    """A module, a namespace and a decorator at once; it is empty and false."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = type(name, (_Base,), {}) if name[:1].isupper() else sys.modules.setdefault(full, _Anything(full))
        setattr(self, name, value)
        return value

    def __contains__(self, item: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]  # used as @decorator
        return lambda function: function  # used as @decorator(...)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of ``triton``."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith("triton.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


class Config:
    """A kernel's tuning configuration: SGLang makes lists of them when it is imported."""

    def __init__(self, kwargs: dict[str, Any] | None = None, num_warps: int = 4, num_stages: int = 2, **extra: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


jit = autotune = heuristics = _Anything("triton.jit")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything.__getattr__(sys.modules["triton"], name)  # type: ignore[arg-type]
