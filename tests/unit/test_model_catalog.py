"""Each source of a model takes what it needs and nothing else, and what it is given can be meant in one way only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import model_catalog
from ansible.module_utils.aerie.releases.model_catalog import Place

COMMIT = "0f3a51c2b9d80f3a51c2b9d80f3a51c2b9d80f3a"
IDENTITY = "3f0c5e2b9d77ab01c4de551f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b"
RSYNC = {"source": "rsync", "from": "ops@gpu-01:/srv/models/x"}
HUB = {"source": "hub", "repository": "lab/tiny", "revision": COMMIT}


def problems(entry: Any, **others: Any) -> list[str]:
    return list(model_catalog.problems({"x": entry, **others}))


@pytest.mark.parametrize(
    "entry",
    [
        {"source": "host", "path": "/m", "weights": False},
        {"source": "controller", "path": "/m"},
        {"source": "host", "path": "/m", "identity": IDENTITY},
        {"source": "controller", "path": "/m", "identity": IDENTITY},
        RSYNC | {"identity": IDENTITY},
        HUB | {"identity": IDENTITY},
        HUB | {"identity": None},
        RSYNC,
        RSYNC | {"from": "gpu-01:/srv/models/with space", "path": "/data/models/x", "port": 2222, "identity_file": "/home/ops/.ssh/models"},
        RSYNC | {"host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAB root@gpu-01"},
        RSYNC | {"from": "ops@[2001:db8::1]:/srv/models/x"},
        HUB | {"exclude": ["consolidated*.safetensors"], "path": "/data/models/x"},
    ],
)
def test_what_a_source_takes_is_taken(entry):
    assert problems(entry) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("/m", "x is '/m': it must be a mapping with source (host, controller, rsync or hub)"),
        ({"path": "/m"}, "x.source is missing"),
        ({"source": "hubs", "path": "/m"}, "x.source is 'hubs': it must be host, controller, rsync or hub; did you mean 'hub'?"),
        ({"source": "host"}, "x.path is missing"),
        ({"source": "rsync"}, "x.from is missing"),
        ({"source": "hub", "repository": "lab/tiny"}, "x.revision is missing"),
        ({"source": "host", "path": "/m", "revision": COMMIT}, "x.revision: source host does not take it, hub does"),
        (RSYNC | {"identityfile": "/k"}, "x.identityfile: no such setting; did you mean 'identity_file'"),
        ({"source": "host", "path": "/m", "identity": IDENTITY[:12]}, "x.identity is '3f0c5e2b9d77': it must be 64 hexadecimal digits"),
        (HUB | {"identity": IDENTITY.upper()}, "in small letters, as playbooks/capture.yml writes them"),
        (RSYNC | {"identity": 1234}, "x.identity is 1234: it must be 64 hexadecimal digits"),
        (RSYNC | {"identity": "/home/ops/.ssh/models"}, "x.identity is '/home/ops/.ssh/models': it must be 64 hexadecimal digits"),
        ({"source": "host", "path": "m"}, "x.path is 'm': it must be an absolute path"),
        ({"source": "host", "path": "/m", "weights": "no"}, "x.weights is 'no': it must be true or false"),
        (RSYNC | {"from": "/srv/models/x"}, "x.from is '/srv/models/x': it must be user@host:/directory"),
        (RSYNC | {"from": "-oProxyCommand=x:/m"}, "x.from is '-oProxyCommand=x:/m'"),
        (RSYNC | {"from": "gpu-01:models"}, "x.from is 'gpu-01:models'"),
        (RSYNC | {"port": "ssh"}, "x.port is 'ssh': it must be a number"),
        (
            RSYNC | {"identity_file": "models"},
            "x.identity_file is 'models': it must be the absolute path of a private key on the host that fetches",
        ),
        (RSYNC | {"host_key": "SHA256:abc"}, "x.host_key is 'SHA256:abc': it must be a line as in ssh_host_ed25519_key.pub"),
        (RSYNC | {"path": "/data/../m"}, "x.path is '/data/../m': the model is put there, so it must be a directory of its own"),
        (RSYNC | {"path": "/data"}, "x.path is '/data': the model is put there"),
        (RSYNC | {"path": "/data/x.partial"}, "names in .partial are those of models that are not whole"),
        (HUB | {"repository": "tiny"}, "x.repository is 'tiny': it must be owner/name"),
        (HUB | {"revision": "main"}, "x.revision is 'main': a branch or tag may move, so it must be a commit of 40 hexadecimal digits"),
        (HUB | {"revision": COMMIT[:12]}, "x.revision is '0f3a51c2b9d8'"),
        (HUB | {"exclude": "*.bin"}, "x.exclude is '*.bin': it must be a list"),
    ],
)
def test_what_can_not_be_meant_is_refused_with_the_cure(entry, message):
    (problem,) = problems(entry)
    assert message in problem


def test_a_branch_is_refused_with_the_commit_that_it_is_where_the_hub_tells():
    asked = []

    def resolve(repository: str, revision: str) -> str | None:
        asked.append((repository, revision))
        return COMMIT

    (problem,) = model_catalog.problems({"x": HUB | {"revision": "main"}, "y": HUB}, resolve)
    assert problem.endswith(f"it is {COMMIT} now: write that")
    assert asked == [("lab/tiny", "main")]


@pytest.mark.parametrize("name", ["../x", "identities", "x/y", "x.partial"])
def test_a_name_that_is_no_good_directory_needs_a_path(name):
    assert len(list(model_catalog.problems({name: HUB}))) == 1
    assert list(model_catalog.problems({name: HUB | {"path": "/data/models/x"}})) == []


def test_two_models_never_share_a_directory_on_the_host():
    entries = {"x": {"path": "/a/target", "source": "controller"}, "y": {"path": "/b/target", "source": "controller"}}
    assert list(model_catalog.problems(entries)) == [
        "y: /b/target and /a/target (x) would go to the same directory on the host: rename one"
    ]
    assert "would go to the same directory" in problems(HUB, y=RSYNC | {"path": "/models/x"})[0]
    assert problems(HUB, target={"path": "/a/x", "source": "controller"}) != []
    same = {"path": "/a/target", "source": "controller"}
    assert problems(same, y=same) == []


def test_a_model_goes_where_the_catalog_says_or_below_the_root():
    paths = HostPaths(Path("/opt/aerie"))
    assert model_catalog.destination(paths, "x", HUB) == Path("/opt/aerie/models/x")
    assert model_catalog.destination(paths, "x", RSYNC | {"path": "/data/x"}) == Path("/data/x")
    assert model_catalog.destination(paths, "x", {"source": "controller", "path": "/a/target"}) == Path("/opt/aerie/models/target")


def test_where_models_are_is_known_for_every_source():
    here, sent = {"source": "host", "path": "/m/here", "weights": False}, {"source": "controller", "path": "/a/sent"}
    catalog = {"here": here, "sent": sent, "x": HUB}
    places = {str(place.path): (place.weights, place.brought) for place in model_catalog.placed(Path("/opt/aerie"), catalog)}
    assert places == {"/m/here": (False, False), "/opt/aerie/models/sent": (True, True), "/opt/aerie/models/x": (True, True)}
    assert [str(place.path) for place in model_catalog.placed(None, catalog)] == ["/m/here"]


def test_a_place_is_a_user_a_host_and_a_directory():
    assert Place.of("ops@gpu-01:/srv/models/x/") == Place("ops", "gpu-01", "/srv/models/x")
    assert Place.of("[::1]:/m") == Place(None, "::1", "/m")
    assert Place.of(None) is None
