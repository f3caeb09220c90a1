"""A damaged store is noticed wherever it is needed, named, and never made worse; the tree is not touched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import stepping
from ansible.module_utils.aerie.errors import AerieError
from package import ANEW, FILES, WIDE, Site, ideal


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit flipped": lambda data: flip(data, len(data) // 2),
    "truncated": lambda data: data[:-1],
    "emptied": lambda data: b"",
}


def damage(path: Path, how: str) -> bytes:
    path.chmod(0o644)
    path.write_bytes(damaged := DAMAGES[how](path.read_bytes()))
    return damaged


def original(site: Site, name: str = "pkg/a.py") -> Path:
    return site.store.object_path(hashlib.sha256(FILES[name]).hexdigest())


def refused(site: Site, path: Path, *sets, match: str = "damaged") -> None:
    tree, kept = site.content, path.read_bytes()
    with pytest.raises(AerieError, match=match) as refusal:
        site.apply(*sets)
    assert str(path) in str(refusal.value)
    assert site.content == tree
    assert path.read_bytes() == kept


@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_damaged_original_is_named_and_not_overwritten(site, how):
    site.apply(WIDE)
    site.apply()
    damage(original(site), how)
    refused(site, original(site), WIDE)
    site.assert_clean()


@pytest.mark.parametrize("sets", [(), (ANEW,)], ids=["remove", "apply another"])
@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_damaged_original_is_not_put_back(site, how, sets):
    site.apply(WIDE)
    damage(original(site), how)
    refused(site, original(site), *sets)
    site.assert_clean(WIDE)


@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_damaged_original_is_not_used_to_undo(site, how):
    stepping.run(lambda: site.apply(WIDE, verify=lambda: os._exit(0)))
    path = original(site)
    data = path.read_bytes()
    damage(path, how)
    refused(site, path, WIDE)
    path.write_bytes(data)
    site.assert_goes_on(WIDE)


@pytest.mark.parametrize("how", list(DAMAGES))
def test_a_run_that_fails_needs_no_intact_original_to_put_back_what_it_replaced(site, way, how):
    def fail() -> None:
        damage(original(site), how)
        raise AerieError("the verifier says no")

    with pytest.raises(AerieError, match=r"says no(.|\n)*was put back as it was"):
        site.apply(WIDE, verify=fail)
    site.assert_clean()


@pytest.mark.parametrize("which", ["manifest", "journal"])
def test_any_bit_flipped_and_any_cut_of_what_the_store_knows_is_noticed(site, which, everything, count):
    site.apply(WIDE)
    if which == "journal":
        stepping.run(lambda: site.apply(ANEW, verify=lambda: os._exit(0)))
    path = site.store.manifest_path if which == "manifest" else site.store.journal_path
    read = site.store.manifest if which == "manifest" else site.store.journal
    data, value, tree = path.read_bytes(), read(), site.content
    damages, harmless = 0, 0
    every = 1 if everything else 29
    for at in range(0, len(data), every):
        for damaged in (flip(data, at), data[:at]):
            path.write_bytes(damaged)
            try:
                found = read()
            except AerieError as error:
                damages += str(path) in str(error)
            else:  # a flip in white space, or in the name of the seal
                assert found == value | {key: found[key] for key in found.keys() - value.keys()}
                harmless += 1
    assert damages + harmless == len(range(0, len(data), every)) * 2 and damages > harmless
    path.write_bytes(flip(data, data.index(b'"before": "') + 15))
    refused(site, path)
    path.write_bytes(data)
    site.assert_goes_on(ANEW)
    assert tree in (ideal((WIDE,))[0], ideal((ANEW,))[0])
    count |= {"damages": damages}
