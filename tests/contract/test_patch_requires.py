"""What our patch sets require of other packages is told from the real wheels of those."""

from __future__ import annotations

from pathlib import Path

import pytest
import wheels
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_requires

from aerie_controller import patch_sets

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("flashinfer", "has_it"), [("0.6.12", False), ("0.6.15.post1", False), ("0.6.17", True), ("0.6.18", True), ("0.7.2", True)]
)
def test_flashinfer_says_what_its_fused_all_reduce_is_compiled_for(flashinfer: str, has_it: bool, tmp_path: Path) -> None:
    place = wheels.unpack("flashinfer_python", flashinfer, tmp_path)
    sets = patch_sets.load(["flashinfer_fusion_sm120"])
    if has_it:
        patch_requires.check(sets, [place])
        return
    with pytest.raises(AerieError) as caught:
        patch_requires.check(sets, [place])
    assert f"flashinfer {flashinfer} in {place} has 9 and 10 as supported_major_versions of gen_trtllm_comm_module" in str(caught.value)
    assert "FlashInfer 0.6.17 or newer" in str(caught.value)
