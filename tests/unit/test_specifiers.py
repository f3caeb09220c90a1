"""specifiers orders versions and reads specifiers as the packaging library does."""

from __future__ import annotations

import itertools

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.specifiers import Specifier, Version
from packaging.specifiers import SpecifierSet
from packaging.version import Version as Reference

VERSIONS = (
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.12",
    "0.5.12.post1",
    "0.5.12.post2",
    "0.5.15rc1",
    "0.5.15rc2",
    "0.5.15.dev3",
    "0.5.15a1",
    "0.5.15a1.dev1",
    "0.5.15",
    "0.5.15.post1.dev1",
    "0.5.15.post1",
    "0.5.15.0",
    "0.6",
    "1",
)
SPECIFIERS = (
    "",
    ">=0.5.12",
    ">0.5.12",
    "<0.5.15",
    "<=0.5.15",
    ">=0.5.12.post1,<0.5.15.post1",
    "==0.5.*",
    "!=0.5.12",
    "!=0.5.15.*",
    "==0.5.15.post1",
    ">0.5.12.post1",
    "<0.5.15rc2",
)


def test_versions_are_ordered_as_packaging_orders_them():
    for one, other in itertools.product(VERSIONS, repeat=2):
        assert (Version.parse(one) < Version.parse(other)) == (Reference(one) < Reference(other)), (one, other)
        assert (Version.parse(one) == Version.parse(other)) == (Reference(one) == Reference(other)), (one, other)


def test_equal_versions_have_equal_hashes():
    assert len({Version.parse("0.5.15"), Version.parse("0.5.15.0")}) == 1


@pytest.mark.parametrize("text", SPECIFIERS)
def test_specifiers_mean_what_packaging_says(text):
    reference = SpecifierSet(text)
    for version in VERSIONS:
        assert (Version.parse(version) in Specifier.parse(text)) == reference.contains(version, prereleases=True), version


@pytest.mark.parametrize(
    ("text", "message"),
    [("0.5.16", "needs one of"), (">=new", "is not a version"), (">=0.5.*", "goes with == and !="), ("~=0.5", "needs one of")],
)
def test_what_is_no_specifier_is_refused(text, message):
    with pytest.raises(AerieError, match=message):
        Specifier.parse(text)


def test_what_is_no_version_is_refused():
    with pytest.raises(AerieError, match="'newest' is not a version"):
        Version.parse("newest")
