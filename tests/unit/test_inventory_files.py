"""A file of the inventory that Ansible could not read is named with its line, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie_controller import inventory_files


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "host_vars/gpu-01").mkdir(parents=True)
    (tmp_path / "group_vars/all.yml").write_text("aerie_root: /opt/aerie\n")
    return tmp_path


def problems(inventory: Path) -> list[str]:
    return inventory_files.problems([inventory])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n b: 2\n", "2:3: mapping values are not allowed here"),
        ("a: b: c\n", "1:5: mapping values are not allowed here: quote a value that contains a colon"),
        ("a:\n\t- b\n", "2:1: found character '\\t' that cannot start any token: indent with spaces"),
        ("a: 1\nb: [1, 2\n", "2:4: "),
        ("a: {x: 1\n", "1:4: "),
        ("a: 'x\n", "1:4: "),
        ("a: 1\nb\nc: 2\n", "could not find expected ':'"),
        ("a: *nobody\n", "1:4: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
    ],
)
def test_what_is_no_yaml_is_named_with_file_line_and_column(inventory, text, problem):
    file = inventory / "group_vars/gpu_hosts.yml"
    file.write_text(text)
    assert len(problems(inventory)) == 1
    assert problems(inventory)[0].startswith(f"{file}:")
    assert problem in problems(inventory)[0]


def test_a_key_that_is_there_twice_is_named_with_both_lines(inventory):
    file = inventory / "host_vars/gpu-01/main.yml"
    file.write_text("flags: &flags\n  tp_size: 2\n  list:\n  - {a: 1, a: 2}\n  tp_size: 8\nothers: *flags\n")
    assert problems(inventory) == [
        f"{file}:5:3: 'tp_size' is there twice, the first time in line 2: keep one of them",
        f"{file}:4:12: 'a' is there twice, the first time in line 4: keep one of them",
    ]


def test_an_alias_within_its_own_anchor_is_read_to_its_end(inventory):
    (inventory / "group_vars/gpu_hosts.yml").write_text("a: &a\n  b: *a\n")
    assert problems(inventory) == []


def test_all_files_are_told_at_once(inventory):
    (inventory / "group_vars/gpu_hosts.yaml").write_text("a: b: c\n")
    (inventory / "host_vars/gpu-01/secret").write_bytes(b"\xff\xfe")
    (inventory / "host_vars/gpu-02.json").write_text("{")
    names = [problem.partition(":")[0].rpartition("/")[2] for problem in problems(inventory)]
    assert names == ["gpu_hosts.yaml", "secret", "gpu-02.json"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("group_vars/vault.yml", "$ANSIBLE_VAULT;1.1;AES256\n6162\n"),
        ("group_vars/gpu_hosts.yml", "key: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6162\nunsafe: !unsafe '{{ x }}'\n"),
        ("group_vars/gpu_hosts.yml", "# nothing but words\n"),
        ("group_vars/gpu_hosts.yml", "base: &base {a: 1}\nmore:\n  <<: *base\n  a: 2\n"),
        ("group_vars/notes.txt", "a: b: c"),
        ("group_vars/README", "a: b: c"),
        ("host_vars/gpu-01/.main.yml.swp", "a: b: c"),
        ("host_vars/gpu-01/main.yml~", "a: b: c"),
    ],
)
def test_what_ansible_reads_or_does_not_look_at_is_no_problem(inventory, name, content):
    (inventory / name).write_text(content)
    assert problems(inventory) == []


@pytest.mark.parametrize(
    ("files", "hidden", "advice"),
    [
        (("gpu_hosts.yml", "gpu_hosts/vault.yml"), "gpu_hosts.yml", "the directory gpu_hosts/ hides it: move it to"),
        (("gpu_hosts.yml", "gpu_hosts.yaml"), "gpu_hosts.yaml", "keep one of gpu_hosts.yml and gpu_hosts.yaml"),
        (("gpu_hosts", "gpu_hosts.json"), "gpu_hosts.json", "keep one of gpu_hosts and gpu_hosts.json"),
    ],
)
def test_a_file_that_another_hides_is_named_with_the_way_out(inventory, files, hidden, advice):
    for name in files:
        (inventory / "group_vars" / name).parent.mkdir(exist_ok=True)
        (inventory / "group_vars" / name).write_text("a: 1\n")
    sentences = inventory_files.hidden_files([inventory])
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{inventory / 'group_vars' / hidden} is not read, since ")
    assert advice in sentences[0]


def test_a_host_whose_name_has_dots_hides_nothing(inventory):
    for name in ("gpu-01.example.org.yml", "gpu-01.yml", "gpu-02.example.org.yml"):
        (inventory / "group_vars" / name).write_text("a: 1\n")
    assert inventory_files.hidden_files([inventory]) == []


def test_sources_are_directories_files_or_lists_of_hosts(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/hosts.yml").touch()
    sources = ["mine", "mine/hosts.yml", "gpu-01,gpu-02", "nowhere"]
    assert inventory_files.source_directories(sources, tmp_path) == [tmp_path / "mine"]
