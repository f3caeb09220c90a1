"""Stand-in for the data set library: SGLang's benchmark imports the name, and no data set of Aerie's needs it."""

from __future__ import annotations

from typing import Any, NoReturn

__aerie_stand_in__ = True


def load_dataset(*arguments: Any, **options: Any) -> NoReturn:
    """Refuse: nothing is downloaded on the cpu profile."""
    raise RuntimeError("the cpu profile has no data set library: use a local file, random or random-ids")
