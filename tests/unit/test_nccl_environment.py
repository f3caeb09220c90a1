"""NCCL's environment: chosen by topology with a reason, refused where it is known to break, one file that servers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.measuring import benchmark
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving import server_plan
from sglang_example import make_host, make_models, make_release, make_request

PROJECT = Path(__file__).parents[2]
DATA = yaml.safe_load((PROJECT / "nccl/profiles.yml").read_text())
TABLE = nccl.Table.of(DATA)
GRAPH = '<graphs version="1"><graph id="0"><channel><gpu dev="0"/><gpu dev="1"/><gpu dev="2"/><gpu dev="3"/></channel></graph></graphs>'


def links(*words: str) -> dict[str, Any]:
    return {"links": {f"0-{number}": word for number, word in enumerate(words, 1)}}


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        (("NV18", "NV18"), "nvlink"),
        (("PIX",), "pcie_switch"),
        (("PIX", "PXB"), "pcie_switch"),
        (("PIX", "PHB"), "pcie_socket"),
        (("PIX", "NODE", "PHB"), "pcie_socket"),
        (("NV4", "NODE", "SYS", "PIX"), "pcie_sockets"),
    ],
)
def test_auto_takes_the_profile_of_the_farthest_pair_and_says_which_it_is(words, profile):
    choice = nccl.choose(TABLE, "auto", links(*words), len(words) + 1)
    assert choice.profile is not None
    assert choice.profile.name == profile
    farthest = max(map(nccl.kind, words), key=nccl.DISTANCE.index)
    assert f"has {farthest} between it" in choice.why


def test_every_word_of_nvidia_smi_has_exactly_one_profile():
    assert sorted(link for profile in TABLE.profiles.values() for link in profile.links) == sorted(nccl.DISTANCE)


def test_one_gpu_needs_nothing_and_an_unknown_topology_is_not_guessed():
    single = nccl.choose(TABLE, "auto", {}, 1)
    assert single.profile is not None
    assert single.profile.environment == {}
    with pytest.raises(AerieError, match=r"nobody knows what lies between the 4 GPUs \(nvidia-smi timed out\).*name one of"):
        nccl.choose(TABLE, "auto", {"links": {}, "reason": "nvidia-smi timed out"}, 4)
    with pytest.raises(AerieError, match="did you mean 'nvlink'"):
        nccl.choose(TABLE, "nvlnk", {}, 2)


@pytest.mark.parametrize("profile", TABLE.profiles.values(), ids=lambda profile: profile.name)
def test_no_profile_breaks_the_rules(profile):
    found = nccl.examine(TABLE, profile.environment, {}, 8)
    assert (found.errors, found.warnings) == ([], [])


@pytest.mark.parametrize(
    ("environment", "rule", "cure"),
    [
        ({"NCCL_GRAPH_FILE": ""}, "graph-file-empty", "leave NCCL_GRAPH_FILE out"),
        ({"NCCL_GRAPH_FILE": f"{__file__}/none.xml"}, "graph-file-missing", "bring the file"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "visible-devices-empty", "sglang_server_instances"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "visible-devices-here", "set gpus of the instance"),
        ({"NCCL_PROTO": "LL128,Fast"}, "proto-unknown", "LL, LL128, Simple"),
        ({"NCCL_ALGO": "Circle"}, "algo-unknown", "Ring or Tree"),
        ({"NCCL_P2P_LEVEL": "NODE"}, "p2p-level-unknown", "write PHB"),
        ({"NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "8"}, "channels-crossed", "raise NCCL_MAX_NCHANNELS"),
    ],
)
def test_what_is_known_to_break_is_refused_with_its_reason_and_cure(environment, rule, cure):
    found = nccl.examine(TABLE, environment, {}, 2, dict.fromkeys(environment, "nccl_environment"))
    assert any(f"({rule})" in told and cure in told and told.startswith("nccl_environment: ") for told in found.errors)


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_PROTO": "^LL"},
        {"NCCL_PROTO": "ll128,simple"},
        {"NCCL_ALGO": "allreduce:tree;broadcast:ring"},
        {"NCCL_P2P_LEVEL": "SYS"},
        {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"},
    ],
)
def test_what_nccl_takes_is_not_refused(environment):
    assert nccl.examine(TABLE, environment, {}, 2).errors == []


def test_ll_alone_is_a_warning_and_not_an_error():
    found = nccl.examine(TABLE, {"NCCL_PROTO": "LL"}, {}, 2)
    assert found.errors == []
    assert "998 tok/s against 1000" in found.warnings[0]


def test_a_graph_for_another_number_of_gpus_is_refused_also_from_nccls_own_file(tmp_path):
    graph = tmp_path / "graph.xml"
    graph.write_text(GRAPH)
    assert nccl.examine(TABLE, {"NCCL_GRAPH_FILE": str(graph)}, {}, 4).errors == []
    assert "is for 4 GPUs, and this host has 8" in nccl.examine(TABLE, {"NCCL_GRAPH_FILE": str(graph)}, {}, 8).errors[0]
    stale = {"/etc/nccl.conf": {"NCCL_GRAPH_FILE": str(graph)}}
    assert nccl.examine(TABLE, {}, stale, 8).errors[0].startswith("/etc/nccl.conf: ")
    # What nccl.env says wins over the file, so that the file's value does no harm.
    assert nccl.examine(TABLE, {"NCCL_GRAPH_FILE": str(graph.with_name("graph.xml"))}, stale, 4).errors == []


def test_the_file_is_read_back_as_it_was_meant(tmp_path):
    wanted = {"NCCL_PROTO": "LL,LL128,Simple", "NCCL_DEBUG_FILE": "/tmp/a b'c", "NCCL_EMPTY": "", "OMP_NUM_THREADS": "8"}
    assert nccl.read(tmp_path) == {}
    nccl.path(tmp_path).write_text(nccl.text(wanted))
    assert nccl.read(tmp_path) == wanted
    nccl.path(tmp_path).write_text("export NCCL PROTO\n")
    with pytest.raises(AerieError, match=r"nccl.env:1: .* is not KEY=VALUE"):
        nccl.read(tmp_path)


class Module:
    """nccl_environment in this process."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def __call__(self, **arguments: Any) -> dict[str, Any]:
        from ansible.module_utils.testing import patch_module_args

        import nccl_environment

        check, diff = arguments.pop("check", False), arguments.pop("diff", True)
        given = {"root": str(self.root), "table": DATA, "gpus": 2, "configurations": [], **arguments}
        with patch_module_args({**given, "_ansible_check_mode": check, "_ansible_diff": diff}), pytest.raises(SystemExit):
            nccl_environment.main()
        result: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return result


@pytest.fixture
def module(tmp_path, capsys):
    return Module(tmp_path, capsys)


def test_the_module_predicts_writes_once_and_takes_away(module, tmp_path):
    asked = {"profile": "auto", "topology": links("SYS"), "environment": {"NCCL_MIN_NCHANNELS": 4, "OMP_NUM_THREADS": None}}
    predicted = module(check=True, **asked)
    assert predicted["changed"] is True
    assert not (tmp_path / "nccl.env").exists()
    made = module(**asked)
    assert made["diff"] == predicted["diff"]
    assert made["diff"]["after"] == (tmp_path / "nccl.env").read_text()
    assert made["profile"] == "pcie_sockets"
    assert "has SYS between it" in made["why"]
    assert made["environment"]["NCCL_MIN_NCHANNELS"] == "4"
    assert made["origins"]["NCCL_MIN_NCHANNELS"] == "nccl_environment"
    assert "OMP_NUM_THREADS" not in made["environment"]
    assert module(**asked)["changed"] is False
    assert module(state="absent", check=True)["changed"] is True
    assert (tmp_path / "nccl.env").exists()
    assert module(state="absent")["changed"] is True
    assert not (tmp_path / "nccl.env").exists()
    assert module(state="absent")["changed"] is False
    assert module()["changed"] is False, "nothing asked for is no file"


def test_the_module_refuses_before_it_touches_the_file(module, tmp_path):
    module(environment={"NCCL_PROTO": "Simple"})
    before = (tmp_path / "nccl.env").read_text()
    refused = module(environment={"NCCL_GRAPH_FILE": "", "CUDA_VISIBLE_DEVICES": "", "NCCL_P2P_LEVEL": "NODE"})
    assert refused["failed"] is True
    assert all(rule in refused["msg"] for rule in ("graph-file-empty", "visible-devices-empty", "p2p-level-unknown", "nothing was touched"))
    assert (tmp_path / "nccl.env").read_text() == before


def test_nccls_own_file_is_looked_at_and_told(module, tmp_path):
    own = tmp_path / "nccl.conf"
    own.write_text("# by hand\nNCCL_GRAPH_FILE=\nNCCL_DEBUG=INFO\n")
    refused = module(configurations=[str(own)])
    assert f"{own}: NCCL_GRAPH_FILE=''" in refused["msg"]
    own.write_text("NCCL_DEBUG=INFO\n")
    told = json.dumps(module(configurations=[str(own)])["warnings"])
    assert "sets NCCL_DEBUG, which NCCL reads beside nccl.env" in told


def test_a_tuned_set_lies_over_the_profile_and_beneath_the_users_own(module):
    tuned = {
        "ranks": 2,
        "backend": "nccl",
        "latency": {"environment": {"NCCL_PROTO": "LL128", "NCCL_MIN_NCHANNELS": None}},
        "throughput": {},
    }
    made = module(profile="pcie_sockets", tuned=tuned, environment={"NCCL_PROTO": "Simple"})
    assert made["environment"]["NCCL_PROTO"] == "Simple"
    assert "NCCL_MIN_NCHANNELS" not in made["environment"]
    made = module(profile="pcie_sockets", tuned=tuned, tuned_for="throughput")
    assert made["environment"]["NCCL_MIN_NCHANNELS"] == "8"
    assert "was found with 8 GPUs, and this host has 2" in module(tuned={**tuned, "ranks": 8})["msg"]
    assert "says nothing about NCCL" in module(tuned={**tuned, "backend": "gloo"})["msg"]


@pytest.fixture
def host(tmp_path):
    make_release(tmp_path)
    make_models(tmp_path)
    return tmp_path


def test_a_server_reads_the_file_beneath_its_own_variables_and_a_change_is_another_definition(host):
    before = server_plan.plan(make_host(host), make_request(host))
    nccl.path(host).write_text(nccl.text({"NCCL_PROTO": "LL128", "NCCL_BUFFSIZE": "1048576", "NCCL_IB_DISABLE": "1"}))
    arm = {"name": "baseline", "environment": {"NCCL_BUFFSIZE": "8388608", "NCCL_IB_DISABLE": None}}
    planned = server_plan.plan(make_host(host), make_request(host, arm, environment={"NCCL_PROTO": "Simple"}))
    assert {name: value for name, value in planned.environment.items() if name.startswith("NCCL_")} == {
        "NCCL_PROTO": "Simple",
        "NCCL_BUFFSIZE": "8388608",
    }
    assert server_plan.plan(make_host(host), make_request(host)).definition != before.definition
    nccl.path(host).unlink()
    assert server_plan.plan(make_host(host), make_request(host)).definition == before.definition


def test_a_damaged_file_refuses_the_start_and_names_the_cure(host):
    nccl.path(host).write_text("NCCL_PROTO: LL128\n")
    with pytest.raises(AerieError, match="make the file again with the role nccl"):
        server_plan.plan(make_host(host), make_request(host))


def test_cells_measured_with_another_file_do_not_count_as_measured(tmp_path):
    nothing = dict.fromkeys(benchmark.Request.__dataclass_fields__)
    asked = benchmark.Request(**{**nothing, "run_id": "r", "settings": {"flags": {}}})
    paths = HostPaths(tmp_path)
    assert benchmark._with_nccl(paths, asked).settings == asked.settings
    nccl.path(tmp_path).write_text(nccl.text({"NCCL_PROTO": "LL128"}))
    assert benchmark._with_nccl(paths, asked).settings == {"flags": {}, "nccl": {"NCCL_PROTO": "LL128"}}


def test_a_fault_in_the_data_is_told_with_its_place():
    with pytest.raises(AerieError) as told:
        nccl.Table.of({"profiles": {"p": {"links": ["XYZ"], "enviroment": {}}}, "known_bad": [{"id": "r", "severity": "error"}]})
    assert all(
        words in str(told.value) for words in ("'XYZ'", "did you mean 'environment'", "r: cure is missing", "says nowhere when it holds")
    )


def test_every_rule_says_where_it_is_known_from():
    assert [rule["id"] for rule in DATA["known_bad"] if not rule.get("source")] == []
    assert len({rule.id for rule in TABLE.rules}) == len(TABLE.rules)
