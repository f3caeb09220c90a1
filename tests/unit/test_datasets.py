"""A data set that could end a server, or give fewer requests than it seems to, is refused before a host is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import datasets

PROJECT = Path(__file__).parents[2]


def entry(prompt: str = "def f():", answer: str = "return 1") -> dict:
    return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def written(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "not JSON"),
        ("[", "not JSON"),
        ([], "an empty list"),
        ({"conversations": []}, "a dict"),
        ([entry(), entry("  \n")], "entry 1: its prompt is empty"),
        ([entry(), "text"], "entry 1: no list 'conversations'"),
        ([entry(), {"prompt": "x"}], "entry 1: no list 'conversations'"),
        ([{"conversations": [{"value": "x"}, {"text": "y"}]}], "entry 0, turn 1: no text 'value'"),
        ([entry(), {"conversations": [{"value": "x"}]}], "1 of its 2 entries have two turns, and a cell sends 2"),
    ],
)
def test_a_bad_data_set_is_refused_with_the_place_of_its_fault(tmp_path, value, message):
    with pytest.raises(AerieError, match=message):
        datasets.check(written(tmp_path / "set.json", value), 2)


def test_a_missing_file_says_where_paths_begin(tmp_path):
    with pytest.raises(AerieError, match="relative to the project's directory"):
        datasets.check(tmp_path / "none.json", 1)


def test_conversations_of_one_turn_are_not_counted_as_prompts(tmp_path):
    found = datasets.check(written(tmp_path / "set.json", [entry(), {"conversation": entry()["conversations"]}, {"conversations": []}]), 2)
    assert (found.entries, found.usable) == (3, 2)


def test_the_demo_has_prompts_enough_for_its_largest_cell():
    from ansible.module_utils.aerie.measuring import experiment

    data = yaml.safe_load((PROJECT / "experiments/demo.yml").read_text())
    demo = experiment.validate(data, ["baseline", "eagle3"])
    assert demo.workload.path
    found = datasets.check(PROJECT / demo.workload.path, demo.most_requests)
    prompts = [item["conversations"][0]["value"] for item in json.loads(found.path.read_text())]
    assert len(set(prompts)) == found.entries, "equal prompts would find each other's prefix in the cache"
    assert all(150 <= len(prompt) <= 400 for prompt in prompts)


def test_the_campaign_is_a_sound_experiment():
    from ansible.module_utils.aerie.measuring import experiment

    data = yaml.safe_load((PROJECT / "experiments/campaign.yml").read_text())
    assert experiment.validate(data, data["arms"]).workload.concurrency[-1] == 64
