#!/usr/bin/python3
"""One program for all fake tools of a test host, told apart by the name it is called by. Standard library only.

It answers from /var/lib/fake-host/recording.json, keeps what it was told in /var/lib/fake-host/state.json until the next boot, and
writes every call as one line, quoted as for a shell, to /var/lib/fake-host/calls.log.
"""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

PLACE = Path("/var/lib/fake-host")
LIBRARY_VERSION = Path("/usr/share/fake-host/driver-version")  # of the driver that is installed
LOADED_VERSION = Path("/proc/driver/nvidia/version")
BOOT = "/usr/lib/fake-host/boot.py"
ACS_BITS = {"SrcValid": 1, "TransBlk": 2, "ReqRedir": 4, "CmpltRedir": 8, "UpstreamFwd": 16, "EgressCtrl": 32, "DirectTrans": 64}
GPU_FIELDS = {
    "index": None,
    "name": "product_name",
    "uuid": "uuid",
    "driver_version": None,
    "memory.total": "fb_memory_usage/total",
    "memory.used": "fb_memory_usage/used",
    "compute_cap": None,
    "pci.bus_id": "pci/pci_bus_id",
    "persistence_mode": "persistence_mode",
    "power.limit": "gpu_power_readings/current_power_limit",
    "power.min_limit": "gpu_power_readings/min_power_limit",
    "power.max_limit": "gpu_power_readings/max_power_limit",
    "power.default_limit": "gpu_power_readings/default_power_limit",
    "power.draw": "gpu_power_readings/instant_power_draw",
    "pcie.link.gen.current": "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
}


def fail(status: int, message: str) -> NoReturn:
    print(message)
    sys.exit(status)


def read(name: str) -> dict[str, Any]:
    try:
        return json.loads((PLACE / name).read_text())
    except FileNotFoundError:
        return {}


@contextmanager
def state() -> Iterator[dict[str, Any]]:
    """What the tools were told since the boot; changes are kept."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        values = read("state.json")
        before = json.dumps(values, sort_keys=True)
        yield values
        if json.dumps(values, sort_keys=True) != before:
            temporary = PLACE / ".state.json"
            temporary.write_text(json.dumps(values, sort_keys=True, indent=1))
            temporary.replace(PLACE / "state.json")


def answer(command: str) -> dict[str, Any] | None:
    return read("recording.json").get("commands", {}).get(command)


def loaded_version() -> str | None:
    try:
        found = re.search(r"(\d+\.\d+(?:\.\d+)?)\s+Release Build", LOADED_VERSION.read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def give(recorded: dict[str, Any], change: Any = None) -> NoReturn:
    text = recorded["stdout"]
    sys.stdout.write(change(text) if change else text)
    if recorded.get("reason"):
        print(recorded["reason"], file=sys.stderr)
    sys.exit(recorded["rc"] if recorded["rc"] is not None else 124)


def unknown(argv: list[str]) -> NoReturn:
    fail(2, f"fake {argv[0]}: no answer to `{' '.join(argv)}` in {PLACE / 'recording.json'}")


# -- nvidia-smi


def cuda_version(driver: str) -> str:
    return {"580": "13.0", "590": "13.1", "595": "13.2", "610": "13.3"}.get(driver.split(".")[0], "12.8")


def smi_text(text: str) -> str:
    driver = loaded_version() or ""
    return text.replace("@DRIVER@", driver).replace("@CUDA@", cuda_version(driver))


def smi_xml() -> str:
    """The recorded XML with what was set since the boot."""
    recorded = answer("nvidia-smi -q -x")
    if recorded is None or recorded["rc"] != 0:
        unknown(["nvidia-smi", "-q", "-x"])
    kept = read("state.json")
    parts = re.split(r"(?=\t<gpu id=)", smi_text(recorded["stdout"]))
    for index, part in enumerate(parts[1:]):
        limit = kept.get("power_limit_w", {}).get(str(index))
        if limit is not None:
            for name in ("current_power_limit", "requested_power_limit"):
                part = re.sub(rf"(<gpu_power_readings>.*?<{name}>)[^<]*", rf"\g<1>{limit:.2f} W", part, count=1, flags=re.DOTALL)
        persistence = kept.get("persistence", {}).get(str(index))
        if persistence is not None:
            part = re.sub(r"(<persistence_mode>)[^<]*", rf"\g<1>{'Enabled' if persistence else 'Disabled'}", part, count=1)
        parts[index + 1] = part
    return "".join(parts)


def smi_gpus() -> list[str]:
    return re.split(r"\t<gpu id=", smi_xml())[1:]


def smi_value(gpu: str, path: str) -> str:
    for name in path.split("/"):
        found = re.search(rf"<{name}>(.*?)</{name}>", gpu, re.DOTALL)
        if found is None:
            return "[N/A]"
        gpu = found.group(1)
    return gpu.strip()


def smi_query(fields: list[str], formatted: set[str]) -> str:
    rows = [] if "noheader" in formatted else [", ".join(fields)]
    for index, gpu in enumerate(smi_gpus()):
        cells = []
        for field in fields:
            if field not in GPU_FIELDS:
                fail(2, f'Field "{field}" is not a valid field to query.')
            path = GPU_FIELDS[field]
            fixed = {"index": str(index), "driver_version": loaded_version() or "", "compute_cap": "12.0"}
            cell = fixed[field] if path is None else smi_value(gpu, path)
            cells.append(re.sub(r" (MiB|W|C|MHz|%)$", "", cell) if "nounits" in formatted else cell)
        rows.append(", ".join(cells))
    return "\n".join(rows) + "\n"


def nvidia_smi(argv: list[str]) -> None:
    loaded = loaded_version()
    recorded = answer(" ".join(argv))
    if recorded is not None and recorded["rc"] != 0:  # a recorded failure is the scenario's
        give(recorded)
    if loaded is None:
        fail(
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is "
            "installed and running.\n",
        )
    if LIBRARY_VERSION.exists() and (library := LIBRARY_VERSION.read_text().strip()) != loaded:
        fail(18, f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {'.'.join(library.split('.')[:2])}")
    words = argv[1:]
    options = {
        name: words[place + 1]
        for place, name in enumerate(words[:-1])
        if name in ("-pl", "-pm", "-i", "--power-limit", "--persistence-mode", "--id")
    }
    chosen = options.get("-i", options.get("--id"))
    gpus = smi_gpus()
    indices = [int(chosen)] if chosen is not None else list(range(len(gpus)))
    limit = options.get("-pl", options.get("--power-limit"))
    mode = options.get("-pm", options.get("--persistence-mode"))
    if limit is not None:
        for index in indices:
            lowest, highest = (
                float(smi_value(gpus[index], f"gpu_power_readings/{name}_power_limit").split()[0]) for name in ("min", "max")
            )
            address = smi_value(gpus[index], "pci/pci_bus_id")
            if not lowest <= float(limit) <= highest:
                fail(
                    3,
                    f"Provided power limit {float(limit):.2f} W is not a valid power limit which should be between {lowest:.2f} W and "
                    f"{highest:.2f} W for GPU {address}\nTerminating early due to previous errors.",
                )
        with state() as kept:
            for index in indices:
                kept.setdefault("power_limit_w", {})[str(index)] = float(limit)
                print(f"Power limit for GPU {smi_value(gpus[index], 'pci/pci_bus_id')} was set to {float(limit):.2f} W.")
        print("All done.")
    elif mode is not None:
        with state() as kept:
            for index in indices:
                kept.setdefault("persistence", {})[str(index)] = mode.lower() in ("1", "enabled")
        print("All done.")
    elif words == ["-q", "-x"]:
        sys.stdout.write(smi_xml())
    elif words == ["-L"]:
        for index, gpu in enumerate(gpus):
            print(f"GPU {index}: {smi_value(gpu, 'product_name')} (UUID: {smi_value(gpu, 'uuid')})")
    elif words and words[0].startswith("--query-gpu=") and recorded is None:
        formatted = next((word.removeprefix("--format=").split(",") for word in words if word.startswith("--format=")), [])
        sys.stdout.write(smi_query(words[0].removeprefix("--query-gpu=").split(","), set(formatted)))
    elif words and words[0].startswith("--query-compute-apps=") and recorded is None:
        sys.stdout.write("")
    elif recorded is not None:
        give(recorded, smi_text)
    else:
        unknown(argv)


# -- PCI


def devices() -> dict[str, str]:
    """Address with domain → what lspci shows of it at its most verbose, with the ACS bits as they are now."""
    recorded = answer("lspci -Dvvvnn")
    text = recorded["stdout"] if recorded else ""
    bits = read("state.json").get("acs", {})
    found = {}
    for block in filter(None, text.strip("\n").split("\n\n")):
        address = block.split(" ", 1)[0]
        if address in bits:
            flags = " ".join(f"{name}{'+' if bits[address] & bit else '-'}" for name, bit in ACS_BITS.items())
            block = re.sub(r"ACSCtl:\t.*", f"ACSCtl:\t{flags}", block)
        found[address] = block
    return found


def full_address(address: str) -> str:
    return address if address.count(":") == 2 else f"0000:{address}"


def lspci(argv: list[str]) -> None:
    words = argv[1:]
    recorded = answer(" ".join(argv))
    if recorded is not None and argv[1:] != ["-Dvvvnn"]:
        give(recorded)
    letters = "".join(word[1:] for word in words if word.startswith("-") and not word.startswith("-s") and not word.startswith("-d"))
    selected = next((words[place + 1] for place, word in enumerate(words[:-1]) if word == "-s"), None)
    vendor = next((words[place + 1].rstrip(":").lower() for place, word in enumerate(words[:-1]) if word == "-d"), None)
    shown = []
    for address, block in devices().items():
        if selected is not None and full_address(selected) != address:
            continue
        if vendor is not None and f"[{vendor}:" not in block.splitlines()[0]:
            continue
        text = block if "v" in letters else block.splitlines()[0]
        if "n" not in letters:
            text = re.sub(r" \[[0-9a-f]{4}(:[0-9a-f]{4})?\]", "", text)
        shown.append(text if "D" in letters else re.sub(r"^0000:", "", text))
    print(("\n\n" if "v" in letters else "\n").join(shown))


def setpci(argv: list[str]) -> None:
    words = [word for word in argv[1:] if word not in ("-v", "-f")]
    if len(words) < 3 or words[0] != "-s":
        unknown(argv)
    address = full_address(words[1])
    block = devices().get(address)
    if block is None:
        fail(1, f'setpci: Warning: No devices selected for "{" ".join(words)}".')
    for register in words[2:]:
        found = re.fullmatch(r"ECAP_ACS\+(?:0x)?0*6\.w(?:=([0-9a-fA-F]+)(?::([0-9a-fA-F]+))?)?", register)
        if found is None:
            unknown(argv)
        flags = re.search(r"ACSCtl:\t(.*)", block)
        if flags is None:
            fail(1, f"setpci: {address}: Instance #0 of Extended capability 000d not found - there are no capabilities with that id.")
        now = sum(bit for name, bit in ACS_BITS.items() if f"{name}+" in flags.group(1).split())
        if found.group(1) is None:
            print(f"{now:04x}")
            continue
        mask = int(found.group(2) or "ffff", 16)
        with state() as kept:
            kept.setdefault("acs", {})[address] = (now & ~mask) | (int(found.group(1), 16) & mask)


# -- modules, boot loader, first root file system


def modprobe(argv: list[str]) -> None:
    words = [word for word in argv[1:] if not word.startswith("-")]
    options = {word for word in argv[1:] if word.startswith("-")}
    if options & {"-c", "--showconfig"}:
        for path in sorted(Path("/etc/modprobe.d").glob("*.conf")):
            sys.stdout.write(path.read_text())
    elif words and words[0].startswith("nvidia") and not options & {"-n", "--dry-run"}:
        sys.exit(subprocess.run([BOOT, "unload" if options & {"-r", "--remove"} else "load"], check=False).returncode)


def lsmod(_: list[str]) -> None:
    print("Module                  Size  Used by")
    if loaded_version():
        print("nvidia_uvm           2068480  0\nnvidia              14376960  1 nvidia_uvm")


def modinfo(argv: list[str]) -> None:
    if not LIBRARY_VERSION.exists():
        print(f"modinfo: ERROR: Module {argv[-1]} not found.", file=sys.stderr)
        sys.exit(1)
    values = {"license": "Dual MIT/GPL", "version": LIBRARY_VERSION.read_text().strip()}
    if len(argv) == 4 and argv[1] == "-F":
        print(values.get(argv[2], ""))
    else:
        print("\n".join(f"{name + ':':16}{value}" for name, value in values.items()))


def update_grub(_: list[str]) -> None:
    """As grub-mkconfig: the settings are shell, the drop-ins follow in order of name."""
    script = (
        "GRUB_CMDLINE_LINUX=; GRUB_CMDLINE_LINUX_DEFAULT=;"
        ' for file in /etc/default/grub /etc/default/grub.d/*.cfg; do [ ! -e "$file" ] || . "$file"; done;'
        ' printf %s "$GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT"'
    )
    done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fail(1, done.stderr)
    configuration = Path("/boot/grub/grub.cfg")
    configuration.parent.mkdir(parents=True, exist_ok=True)
    configuration.write_text(f"\tlinux\t/boot/vmlinuz root=UUID=0 ro {' '.join(done.stdout.split())}\n")
    print("Generating grub configuration file ...\ndone", file=sys.stderr)


def nvidia_persistenced(_: list[str]) -> None:
    if loaded_version() is None:
        fail(1, "nvidia-persistenced failed to initialize. Check syslog for more details.")
    with state() as kept:
        kept["persistence"] = {
            str(index): True for index in range(len(re.findall("<gpu id=", (answer("nvidia-smi -q -x") or {"stdout": ""})["stdout"])))
        }


def nothing(_: list[str]) -> None:
    """Being called is all that matters: the log has it."""


TOOLS = {
    "nvidia-smi": nvidia_smi,
    "lspci": lspci,
    "setpci": setpci,
    "modprobe": modprobe,
    "rmmod": nothing,
    "lsmod": lsmod,
    "modinfo": modinfo,
    "update-grub": update_grub,
    "update-initramfs": nothing,
    "nvidia-persistenced": nvidia_persistenced,
}


def main() -> None:
    argv = [Path(sys.argv[0]).name, *sys.argv[1:]]
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "calls.log").open("a") as log:
        log.write(f"{shlex.join(argv)}\n")
    TOOLS[argv[0]](argv)


if __name__ == "__main__":
    main()
