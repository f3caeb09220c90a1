"""Each client is called so that it measures what was asked for, and what it says is told in one form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_file
from ansible.module_utils.aerie.measuring import bench_clients

SHAREGPT = {"dataset": "sharegpt", "output_len": 48, "input_len": None}
RANDOM = {"dataset": "random-ids", "output_len": 48, "input_len": 64}
# One line of each client, 0.5.23 and 0.5.15.post1; lists and server_info left out.
RUST = {
    "completed": 16, "duration": 1.956, "total_input_tokens": 2480, "total_output_tokens": 768, "request_throughput": 8.18,
    "input_throughput": 1267.9, "output_throughput": 392.64, "total_throughput": 1660.54, "concurrency": 3.645,
    "mean_ttft_ms": 67.16, "median_ttft_ms": 33.74, "std_ttft_ms": 58.8, "p99_ttft_ms": 178.9,
    "mean_tpot_ms": 8.05, "median_tpot_ms": 7.57, "std_tpot_ms": 2.36, "p99_tpot_ms": 11.83,
    "mean_itl_ms": 8.04, "median_itl_ms": 5.45, "std_itl_ms": 7.06, "p99_itl_ms": 29.95,
    "mean_e2e_latency_ms": 445.6, "median_e2e_latency_ms": 449.7, "std_e2e_latency_ms": 125.4, "p99_e2e_latency_ms": 650.6,
}  # fmt: skip


def release(tmp_path: Path, *files: str) -> Path:
    package = tmp_path / "lib/python3.11/site-packages/sglang"
    package.mkdir(parents=True)
    for name in files:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    return tmp_path


def load(workload: dict, dataset: Path | None) -> bench_clients.Load:
    return bench_clients.Load("127.0.0.1", 30000, None, workload, dataset, 4, 16, 7, Path("/out.jsonl"))


def flags(argv: list[str]) -> dict[str, str]:
    return {word: argv[place + 1] for place, word in enumerate(argv[:-1]) if word.startswith("--")}


def test_the_rust_client_is_taken_where_the_release_ships_it(tmp_path):
    files = ("srt/rust_extensions/_bench.cpython-311-x86_64-linux-gnu.so", "benchmark/serving.py", "bench_serving.py")
    client = bench_clients.find(release(tmp_path, *files), "0.5.23")
    assert client.name == "sglang-rust" and client.sha256
    assert client.command[0] == str(tmp_path / "bin/python") and client.command[-1].endswith(files[0])


def test_a_chosen_client_is_taken_whatever_the_release_ships(tmp_path):
    made = release(tmp_path, "bench_serving.py")
    chosen = tmp_path / "_bench.so"
    chosen.write_text("client")
    client = bench_clients.find(made, "0.5.15.post1", chosen=chosen)
    assert (client.name, client.version, client.command[-1]) == ("sglang-rust", "another release's", str(chosen))
    assert client.sha256 == sha256_file(chosen)


def test_a_chosen_client_that_cannot_serve_is_refused(tmp_path):
    made = release(tmp_path, "bench_serving.py")
    with pytest.raises(AerieError, match="is not on this host"):
        bench_clients.find(made, "0.5.15.post1", chosen=tmp_path / "_bench.so")
    other = tmp_path / "_bench.cpython-312-x86_64-linux-gnu.so"
    other.touch()
    (tmp_path / "python3.11").touch()
    (made / "bin").mkdir()
    (made / "bin/python").symlink_to(tmp_path / "python3.11")
    with pytest.raises(AerieError, match=r"built for CPython 312, and .* is 311"):
        bench_clients.find(made, "0.5.15.post1", chosen=other)
    (tmp_path / "model").mkdir()
    with pytest.raises(AerieError, match=r"reads tokenizer\.json only"):
        bench_clients.find(made, "0.5.15.post1", tmp_path / "model", chosen=other)


def test_the_client_of_a_tree_that_is_used_in_place_is_found_there(tmp_path):
    made = release(tmp_path / "tree", "bench_serving.py") / "lib/python3.11/site-packages/sglang"
    (tmp_path / "release").mkdir()
    assert bench_clients.find(tmp_path / "release", "0.5.9", package=made).name == "sglang.bench_serving"


@pytest.mark.parametrize(
    ("files", "module"),
    [(("benchmark/serving.py", "bench_serving.py"), "sglang.benchmark.serving"), (("bench_serving.py",), "sglang.bench_serving")],
)
def test_older_releases_give_their_python_client(tmp_path, files, module):
    assert bench_clients.find(release(tmp_path, *files), "0.5.9").command[1:] == ("-m", module)


def test_a_model_without_tokenizer_json_gets_the_python_client(tmp_path):
    made = release(tmp_path / "r", "srt/rust_extensions/_bench.cpython-311-x86_64-linux-gnu.so", "benchmark/serving.py")
    (tmp_path / "model").mkdir()
    assert bench_clients.find(made, "0.5.23", tmp_path / "model").name == "sglang.benchmark.serving"
    (tmp_path / "model" / "tokenizer.json").touch()
    assert bench_clients.find(made, "0.5.23", tmp_path / "model").name == "sglang-rust"


def test_the_tokenizer_is_the_models_own_whatever_name_the_server_goes_by():
    client = bench_clients.Client("c", "1", ("client",))
    argv = bench_clients.argv(client, replace(load(SHAREGPT, None), tokenizer=Path("/models/target")))
    assert flags(argv)["--tokenizer"] == "/models/target"


def test_a_release_without_a_client_is_refused(tmp_path):
    with pytest.raises(AerieError, match="ships no load client"):
        bench_clients.find(release(tmp_path), "0.5.9")
    with pytest.raises(AerieError, match="no sglang package"):
        bench_clients.find(tmp_path / "elsewhere", "0.5.9")


def test_lengths_are_fixed_and_the_clients_own_warm_up_is_off():
    client = bench_clients.Client("c", "1", ("client",))
    random = flags(bench_clients.argv(client, load(RANDOM, None)))
    assert (random["--random-input-len"], random["--random-output-len"], random["--random-range-ratio"]) == ("64", "48", "1.0")
    assert "--dataset-path" not in random
    sharegpt = flags(bench_clients.argv(client, load(SHAREGPT, Path("/set.json"))))
    assert (sharegpt["--sharegpt-output-len"], sharegpt["--dataset-path"]) == ("48", "/set.json")
    for found in (random, sharegpt):
        assert (found["--warmup-requests"], found["--seed"], found["--num-prompts"], found["--max-concurrency"]) == ("0", "7", "16", "4")
        assert found["--output-file"] == "/out.jsonl"


def test_figures_have_one_name_and_one_unit_whoever_measured_them():
    found = bench_clients.metrics(RUST)
    assert (found["output_throughput_tok_s"], found["total_throughput_tok_s"], found["duration_s"]) == (392.64, 1660.54, 1.956)
    assert found["ttft_ms"]["median"] == 33.74 and found["e2e_ms"]["mean"] == 445.6
    older = {key: value for key, value in RUST.items() if key != "total_throughput"}
    assert bench_clients.metrics(older)["total_throughput_tok_s"] == pytest.approx(1660.54)


def test_a_99th_percentile_of_few_requests_is_not_told():
    assert bench_clients.metrics(RUST)["ttft_ms"]["p99"] is None
    assert bench_clients.metrics(RUST | {"completed": 1000})["ttft_ms"]["p99"] == 178.9


def test_the_last_line_is_the_result_and_a_broken_one_is_refused(tmp_path):
    path = tmp_path / "client.jsonl"
    with pytest.raises(AerieError, match="wrote no result"):
        bench_clients.read_result(path)
    for text in ("", '{"completed": 1', "[1]\n"):
        path.write_text(text)
        with pytest.raises(AerieError, match="result"):
            bench_clients.read_result(path)
    path.write_text(json.dumps({"completed": 1}) + "\n" + json.dumps({"completed": 2}) + "\n")
    assert bench_clients.read_result(path)["completed"] == 2
