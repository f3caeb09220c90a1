"""Opens SGLang's gate to FlashInfer's fused all-reduce on compute capability 12.x, where the environment asks for it.

Made by Aerie (patch set flashinfer_fusion_sm120). Without AERIE_FLASHINFER_FUSION_SM120=1, and on any other GPU, nothing changes.
"""

import functools
import logging
import os

logger = logging.getLogger(__name__)

VARIABLE = "AERIE_FLASHINFER_FUSION_SM120"


@functools.lru_cache(maxsize=1)
def is_open() -> bool:
    """Say whether it was asked for, on a GPU that it is about."""
    if os.environ.get(VARIABLE) != "1":
        return False
    from sglang.srt.utils.common import is_sm120_supported

    if not is_sm120_supported():
        logger.warning("%s=1 has no effect: no GPU of compute capability 12.x with CUDA 12.8 or newer", VARIABLE)
        return False
    logger.warning("%s=1: FlashInfer's fused all-reduce is open on compute capability 12.x, an experiment that was seen to crash", VARIABLE)
    return True


def opened(gate: bool) -> bool:
    """Return SGLang's own gate, or True where it was asked for."""
    return gate or is_open()


def takes(backend: str, is_multi_node: bool) -> bool:
    """Say whether the trtllm kernels serve ``backend``, which SGLang would refuse; they are for one node, the others for 9.0 and 10.x."""
    return backend in ("auto", "trtllm") and not is_multi_node and is_open()
