"""A trace of decode steps says what the GPU did, in which phase, and where the host waited; no kernel is dropped."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.profiling import trace_summary

RECORDED = Path(__file__).parents[1] / "fixtures/traces/eagle3-cpu.trace.json.gz"

KERNELS = {
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(MaskMode)2, 64u>>(Params)": "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0, 2u, 8u, 16u>(Params)": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "_fwd_kernel": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>(Params)": "attention",
    "nvjet_tst_128x64_64x8_4x1_v_bz_coopA_TNT": "gemm, dense",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_ldg8_f2f_stages_64x3_tn_align8>(Params)": "gemm, dense",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)": "gemm, dense",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel": "gemm, dense",
    "fused_moe_kernel": "gemm, moe",
    "void moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int, int, unsigned long)": "moe routing",
    "void topkGatingSoftmax<__nv_bfloat16, 8, 256, 4, 16, 32, int>(...)": "moe routing",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(sglang::RankData*)": "communication",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)": "norm, rope, activation",
    "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 128u>(...)": "norm, rope, activation",
    "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(__nv_bfloat16*)": "norm, rope, activation",
    "create_flashinfer_kv_indices_triton": "kv and metadata",
    "void flashinfer::quantization::SegmentPackBitsKernel<(BitOrder)1, int>(bool*, unsigned char*)": "kv and metadata",
    "assign_req_to_token_pool": "kv and metadata",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(...)": "sampling and tree",
    "void VerifyTreeGreedy<long, long>(long*, long*)": "sampling and tree",
    "build_tree_efficient(long*, long*, long*)": "sampling and tree",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)": "elementwise",
    "triton_poi_fused_add_0": "elementwise",
    "frobnicate_v3": "other",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items(), ids=[name[:40] for name in KERNELS])
def test_kernels_are_known_by_their_names(name, kind):
    assert trace_summary.category(name) == kind


def test_copies_are_known_by_their_kind():
    assert trace_summary.category("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy") == "memcpy"
    assert trace_summary.category("Memset (Device)", "gpu_memset") == "memset"


class Trace:
    """A trace as torch 2.11 writes it, built by hand: a step is 1,000 µs on the host, and the GPU runs 200 µs behind."""

    def __init__(self) -> None:
        self.events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        self.correlation = 0

    def host(self, cat: str, name: str, ts: float, dur: float, **args) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": ts, "dur": dur, "args": args})

    def gpu(self, name: str, launch: float, ts: float, dur: float, cat: str = "kernel", call: str = "cudaLaunchKernel") -> None:
        self.correlation += 1
        self.host("cuda_runtime", call, launch, 5, correlation=self.correlation)
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": ts,
                "dur": dur,
                "args": {"correlation": self.correlation, "stream": 7},
            }
        )
        self.events.append({"ph": "s", "id": self.correlation, "cat": "ac2g", "name": "ac2g", "pid": 100, "tid": 100, "ts": launch})

    def step(self, start: float, prefill: bool = False) -> None:
        """A cycle: verify (500 µs attention, 200 gemm), draft (100), 100 idle, 100 unknown; the host waits 300 µs in .item()."""
        self.host("user_annotation", "step[TARGET_VERIFY bs=8]", start, 200)
        self.host("user_annotation", "aerie:target_verify", start, 300)
        self.gpu("void flashinfer::BatchPrefillWithPagedKVCacheKernel<>()", start + 10, start + 200, 500)
        self.gpu("nvjet_tst_64x8", start + 20, start + 700, 200, call="cudaGraphLaunch")
        self.events.append({"ph": "X", "cat": "gpu_user_annotation", "name": "step", "pid": 0, "tid": 7, "ts": start + 200, "dur": 700})
        self.host("user_annotation", "aerie:tree_and_acceptance", start + 300, 400)
        self.host("cpu_op", "aten::item", start + 310, 305)
        self.host("cpu_op", "aten::_local_scalar_dense", start + 311, 303)
        self.host("cuda_runtime", "cudaStreamSynchronize", start + 312, 300)
        self.host("user_annotation", "aerie:draft", start + 700, 200)
        self.gpu("triton_poi_fused_0", start + 710, start + 900, 100)
        self.gpu("frobnicate_v3", start + 720, start + 1100, 100)
        if prefill:
            self.host("user_annotation", "step[EXTEND bs=1 toks=128]", start + 950, 20)


@pytest.fixture
def trace() -> Trace:
    made = Trace()
    for number in range(8):
        made.step(1e6 + 1000.0 * number, prefill=number == 4)
    return made


def test_every_moment_of_a_step_is_one_kind_of_work_or_idle(trace):
    found = trace_summary.summarise(trace_summary.events(trace.events))
    assert found["device"] == "gpu"
    assert found["step_ms"] == pytest.approx(1.0)
    assert {name: round(part["ms"], 6) for name, part in found["categories"].items()} == {
        "attention": 0.5,
        "gemm, dense": 0.2,
        "elementwise": 0.1,
        "other": 0.1,
        "idle": 0.1,
    }
    assert sum(part["share"] for part in found["categories"].values()) == pytest.approx(1)


def test_work_is_cut_by_the_phase_that_launched_it_not_by_when_the_gpu_got_to_it(trace):
    phases = trace_summary.summarise(trace_summary.events(trace.events))["phases"]
    assert phases["target_verify"]["ms"] == pytest.approx(0.7)
    assert phases["target_verify"]["categories"]["attention"] == pytest.approx(0.5)
    assert phases["draft"]["ms"] == pytest.approx(0.3)
    assert phases["draft"]["categories"] == {"elementwise": pytest.approx(0.1), "other": pytest.approx(0.1), "idle": pytest.approx(0.1)}


def test_the_first_step_and_one_with_a_prefill_do_not_count(trace):
    found = trace_summary.summarise(trace_summary.events(trace.events))
    assert (found["steps_seen"], found["steps"], found["without_prefill"]) == (8, 5, True)


def test_an_unknown_kernel_is_listed_by_name_with_its_share(trace):
    found = trace_summary.summarise(trace_summary.events(trace.events))
    assert [(entry["name"], round(entry["share"], 3)) for entry in found["unknown"]] == [("frobnicate_v3", 0.1)]


def test_the_hosts_waits_are_told_with_the_place_they_were_made_at(trace):
    host = trace_summary.summarise(trace_summary.events(trace.events))["host"]
    assert (host["syncs"], host["items"], host["launches"]) == (1, 1, 4)
    assert host["sync_ms"] == pytest.approx(0.3)
    assert host["step_ms"] == pytest.approx(host["sync_ms"] + host["launch_ms"] + host["other_ms"])
    assert [(site["where"], site["name"]) for site in host["sync_sites"]] == [
        ("tree_and_acceptance > aten::_local_scalar_dense", "cudaStreamSynchronize")
    ]


def test_an_arm_without_speculation_is_cut_at_its_decode_steps():
    made = Trace()
    for number in range(6):
        start = 1e6 + 500.0 * number
        made.host("user_annotation", "step[DECODE bs=8]", start, 100)
        made.gpu("nvjet_tst_64x8", start + 10, start + 50, 400, call="cudaGraphLaunch")
        made.gpu("Memcpy DtoH (Device -> Pinned)", start + 20, start + 450, 10, cat="gpu_memcpy", call="cudaMemcpyAsync")
    found = trace_summary.summarise(trace_summary.events(made.events))
    assert found["step_ms"] == pytest.approx(0.5)
    assert found["phases"] == {}
    assert found["host"]["copies_to_host"] == 1
    assert {name: round(part["ms"], 3) for name, part in found["categories"].items()} == {"gemm, dense": 0.4, "memcpy": 0.01, "idle": 0.09}


def test_overlapping_streams_are_not_counted_twice():
    made = Trace()
    for number in range(6):
        start = 1e6 + 500.0 * number
        made.host("user_annotation", "step[DECODE bs=8]", start, 100)
        made.gpu("nvjet_tst_64x8", start + 10, start + 50, 400)
        made.gpu("ncclDevKernel_AllReduce_Sum", start + 20, start + 350, 200)
    found = trace_summary.summarise(trace_summary.events(made.events))
    assert found["step_ms"] == pytest.approx(0.5)
    assert found["categories"]["communication"]["ms"] == pytest.approx(0.1)


def test_a_trace_of_real_sglang_on_the_cpu_sums_up():
    found = trace_summary.summarise(trace_summary.load(RECORDED))
    assert found["device"] == "cpu"
    assert found["steps"] >= 2
    assert sum(part["share"] for part in found["categories"].values()) == pytest.approx(1)
    assert found["step_ms"] == pytest.approx(found["host"]["step_ms"], rel=0.01)
    assert found["categories"]["attention"]["ms"] > 0
    assert found["categories"]["gemm, dense"]["ms"] > 0
    assert found["categories"].get("other", {"share": 0})["share"] < 0.02


def test_what_is_no_trace_is_refused_with_its_name(tmp_path):
    cut = tmp_path / "cut.trace.json.gz"
    cut.write_bytes(gzip.compress(b'{"traceEvents": [')[:-8])
    with pytest.raises(AerieError, match=r"cut\.trace\.json\.gz is no torch trace"):
        trace_summary.load(cut)
    idle = tmp_path / "idle.trace.json"
    idle.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(AerieError, match="no annotation of a decode step"):
        trace_summary.summarise(trace_summary.load(idle))
