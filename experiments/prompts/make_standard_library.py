#!/usr/bin/env python3
"""Write standard-library.json: excerpts of Python's own standard library, in the ShareGPT form that SGLang's clients read.

    python experiments/prompts/make_standard_library.py experiments/prompts/standard-library.json

The CPU profile's tiny models were trained on this kind of text, so their EAGLE-3 draft guesses it as well as real drafts guess chat. Each
entry is one place in one file: the prompt is what stands before it, the answer what stands after. The client sends the prompt only; the
answer must be there, since it leaves out conversations of fewer than two turns. Run again under another Python, the text differs a
little, and so does the data set's hash in each record: figures from two texts are never mixed unseen.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

ENTRIES = 640  # ten for each of 64 clients
FIRST_FILES = 150  # train.py of the tiny pair read the first 150 in order of name
SHORTEST, LONGEST = 150, 400  # characters of a prompt: some 50 to 150 tokens of the tiny vocabulary
ANSWER = 300
SEED = 20


def excerpt(text: str, chance: random.Random) -> tuple[str, str] | None:
    """One prompt that begins and ends at a line, and the text that follows it; None where the file is too short or not plain ASCII."""
    if not text.isascii() or len(text) < 8 * LONGEST:
        return None
    start = text.find("\n", chance.randrange(len(text) // 4, len(text) * 3 // 4)) + 1
    end = text.rfind("\n", start + SHORTEST, start + LONGEST) + 1
    prompt, answer = text[start:end], text[end : end + ANSWER]
    return (prompt, answer) if SHORTEST <= len(prompt) <= LONGEST and prompt.strip() and answer.strip() else None


def main() -> None:
    """Write the entries to the file named on the command line."""
    chance = random.Random(SEED)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FIRST_FILES]
    # _sysconfigdata holds the paths of the machine that Python was built on
    texts = {path.name: path.read_text(encoding="utf-8", errors="ignore") for path in files if not path.name.startswith("_sysconfigdata")}
    entries: list[dict[str, object]] = []
    seen = set()
    for _ in range(ENTRIES):  # rounds over all files; far fewer are needed
        for name in chance.sample(sorted(texts), len(texts)):
            found = excerpt(texts[name], chance)
            if found and found[0] not in seen and len(entries) < ENTRIES:
                seen.add(found[0])
                turns = [{"from": "human", "value": found[0]}, {"from": "gpt", "value": found[1]}]
                entries.append({"id": f"{name}-{len(entries)}", "conversations": turns})
        if len(entries) == ENTRIES:
            break
    if len(entries) < ENTRIES:
        sys.exit(f"only {len(entries)} of {ENTRIES} excerpts found below {sysconfig.get_paths()['stdlib']}: is this a full Python?")
    Path(sys.argv[1]).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
