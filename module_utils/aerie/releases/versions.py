"""Which SGLang can be deployed, from what, and what it was verified on: reads ``versions.yml``. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.words import listing, near

PROFILES = ("cpu", "cuda")
VERIFIED_ON = ("cpu", "sm90", "sm120", "wheel")
_BUILD_KEYS = {"lock", "torch", "torch_in_lock", "stand_ins", "sglang_sha256", "disk_gib", "verified_on"}
_REQUIRED_BUILD_KEYS = _BUILD_KEYS - {"stand_ins"}


@dataclass(frozen=True)
class Build:
    """One SGLang version for one profile: all that decides what its environment holds.

    ``sglang_sha256`` is the hash of SGLang's own wheel for each Python that it can be deployed with; ``stand_ins`` is a
    directory of packages that replace what only a GPU host has.
    """

    version: str
    profile: str
    kernel: str
    lock: str
    torch: str
    torch_in_lock: bool
    stand_ins: str | None
    sglang_sha256: Mapping[str, str]
    disk_gib: float
    verified_on: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the build as a module takes it."""
        return asdict(self) | {"sglang_sha256": dict(self.sglang_sha256), "verified_on": list(self.verified_on)}


def resolve(data: Mapping[str, Any], profile: str, version: str | None = None) -> Build:
    """Return the build of ``version`` (None: the default) for ``profile``; ``data`` is what ``versions.yml`` holds."""
    validate(data)
    if profile not in PROFILES:
        raise AerieError(f"there is no profile {profile!r}: choose {listing(PROFILES, last='or')}")
    wanted = str(version) if version is not None else str(data["default"][profile])
    known = {str(name): entry for name, entry in data["versions"].items()}
    offered = [name for name, entry in known.items() if profile in entry["builds"]]
    if wanted not in offered:
        other = f" (it has one for {listing(known[wanted]['builds'])})" if wanted in known else ""
        raise AerieError(
            f"SGLang {wanted} has no lock for profile {profile}{other}{near(wanted, offered) or ':'} "
            f"versions.yml has {listing(offered)}: set sglang_release_version to one of them, or make a lock "
            "(docs/reference/versions.md tells how)"
        )
    return _build(wanted, profile, known[wanted])


def _build(version: str, profile: str, entry: Mapping[str, Any]) -> Build:
    build = entry["builds"][profile]
    return Build(
        version=version,
        profile=profile,
        kernel=str(entry["kernel"]),
        lock=str(build["lock"]),
        torch=str(build["torch"]),
        torch_in_lock=bool(build["torch_in_lock"]),
        stand_ins=build.get("stand_ins"),
        sglang_sha256={str(python): str(digest) for python, digest in build["sglang_sha256"].items()},
        disk_gib=float(build["disk_gib"]),
        verified_on=tuple(build["verified_on"]),
    )


def unverified(build: Build, architectures: Collection[str] = ()) -> str | None:
    """Return what a deploy must say when ``build`` was not verified on the host's GPUs, or None.

    ``architectures`` are like ``sm120``; without them, those that Aerie is made for are asked about.
    """
    asked = sorted(set(architectures) or {"cpu" if build.profile == "cpu" else "sm120"})
    missing = [architecture for architecture in asked if architecture not in build.verified_on]
    if not missing:
        return None
    return (
        f"SGLang {build.version} was verified on {listing(build.verified_on)}, not on {listing(missing, last='or')}: "
        "rehearse it on one host before a fleet, and compare a benchmark with the release that it replaces"
    )


def adopted(data: Mapping[str, Any], profile: str, version: str, torch: str) -> tuple[tuple[str, ...], str]:
    """Return what the lock of an adopted ``version`` was verified on, and what a deploy must say of it.

    What a host brings is not what a lock holds, so that there is always something to say.
    """
    plain = version.partition("+")[0]
    entry = {str(name): entry for name, entry in data["versions"].items()}.get(plain)
    if entry is None or profile not in entry["builds"]:
        return (), (
            f"SGLang {version}, adopted as it is on the host, was not verified anywhere, as versions.yml has no lock of it for profile "
            f"{profile}: rehearse it on one host before a fleet"
        )
    build = _build(plain, profile, entry)
    other = "" if torch.partition("+")[0] == build.torch else f", with torch {build.torch} and not {torch}"
    return build.verified_on, (
        f"SGLang {version} is adopted as it is on the host; what was verified on {listing(build.verified_on)} is the lock of "
        f"this version{other}: compare a benchmark with the release that it replaces"
    )


def validate(data: Mapping[str, Any]) -> None:
    """Raise one AerieError with all that is wrong in ``versions.yml``."""
    problems: list[str] = [f"{key} is missing" for key in ("default", "supervisor", "versions") if not data.get(key)]
    raise_all(problems, "versions.yml")
    for version, entry in data["versions"].items():
        problems += [f"versions.{version}.{key} is missing" for key in ("kernel", "builds") if not entry.get(key)]
        for profile, build in (entry.get("builds") or {}).items():
            problems += [f"versions.{version}.builds.{profile}: {problem}" for problem in _problems(profile, build)]
    for profile, version in data["default"].items():
        if profile not in (data["versions"].get(version) or {}).get("builds", {}):
            problems.append(f"default.{profile} is {version}, which has no lock for {profile}")
    problems += [f"default.{profile} is missing" for profile in PROFILES if profile not in data["default"]]
    raise_all(problems, "versions.yml")


def _problems(profile: str, build: Mapping[str, Any]) -> list[str]:
    problems = [] if profile in PROFILES else [f"no profile is called {profile!r}{near(profile, PROFILES)}"]
    problems += [f"{key} is missing" for key in sorted(_REQUIRED_BUILD_KEYS - set(build))]
    problems += [f"unknown key {key!r}{near(key, _BUILD_KEYS)}" for key in sorted(set(build) - _BUILD_KEYS)]
    problems += [
        f"verified_on: {word!r} is none of {listing(VERIFIED_ON)}" for word in build.get("verified_on", []) if word not in VERIFIED_ON
    ]
    if profile == "cuda" and build.get("stand_ins"):
        problems.append("stand_ins must never reach a GPU host")
    problems += [
        f"sglang_sha256: {python!r} needs quotes and a sha256 of 64 digits"
        for python, digest in build.get("sglang_sha256", {}).items()
        if not isinstance(python, str) or not isinstance(digest, str) or len(digest) != 64
    ]
    return problems
