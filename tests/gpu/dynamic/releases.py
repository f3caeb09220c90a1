"""Makes the environment that it runs in one in which an SGLang older than the CPU profile's serves EAGLE-3 on a CPU. releases.sh calls it.

    ENVIRONMENT/bin/python releases.py VERSION

What is installed is the CPU profile's lock, with what that release pins otherwise. What is changed of the release is its CPU attention
alone, and nothing that the overlay touches: a verification's lengths, which two lines overwrite up to 0.5.18 (with them EAGLE-3 itself
gives other tokens than the baseline), and the choice of another attention where a CPU has no AMX.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
STAND_INS = PROJECT / "profiles/cpu/packages"
LOCK = PROJECT / "locks/cpu-0.5.23.in"
TORCH = "torch==2.13.0"
OLDER = {
    (16, 21): ["transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "openai==2.6.1"],
    (16, 20): ["xgrammar==0.2.1"],
}
"""By the last part of the first and of the last version: what these pin otherwise than 0.5.23."""
NO_SCALES = 20
"""The first in which CPU attention knows scales of K and V."""
OVERWRITTEN = re.compile(r"^        seq_lens = forward_batch\.seq_lens\n(?=        if seq_lens\.dtype)", re.MULTILINE)
FALLBACK = re.compile(r'(\.attention_backend == "intel_amx)("\s+and (?:view|self)\.device == "cpu"\s+and not)')
SCALES = re.compile(r"(def (?:decode|extend)_attention_cpu\((?:\n    .*?)*?)\n    k_scale: float,\n    v_scale: float,")


def install(*wanted: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", *wanted], check=True)


def change(path: Path, pattern: re.Pattern[str], replacement: str) -> int:
    text, count = pattern.subn(replacement, path.read_text())
    path.write_text(text)
    return count


def main() -> None:
    version = sys.argv[1]
    number = int(version.rpartition(".")[2])
    packages = Path(sysconfig.get_path("purelib"))
    install("-r", str(LOCK), TORCH)
    install(f"sglang=={version}", *(one for (first, last), some in OLDER.items() if first <= number <= last for one in some))
    shutil.copytree(STAND_INS, packages, dirs_exist_ok=True)
    if number < NO_SCALES and change(packages / "sgl_kernel/__init__.py", SCALES, r"\1") != 2:
        sys.exit("the stand-in's attention has other parameters than expected")
    sglang = packages / "sglang/srt"
    overwritten = change(sglang / "layers/attention/intel_amx_backend.py", OVERWRITTEN, "")
    files = [path for path in (sglang / "arg_groups/overrides.py", sglang / "server_args.py") if path.exists()]
    fallbacks = sum(change(path, FALLBACK, r"\1 is kept\2") for path in files)
    print(f"{version}: {overwritten} lines that overwrite lengths, {fallbacks} choices of another attention taken out")
    if fallbacks != 1 or (overwritten == 2) != (number <= 18):
        sys.exit(f"{version} is not as those that this was made for")


if __name__ == "__main__":
    main()
