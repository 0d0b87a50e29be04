"""Refuse words that docs/glossary.md replaces, in code, comments, docs, tests and error texts.

    python tools/check_words.py [FILE...]

Without arguments it reads every file of the repository that git knows.  `BANISHED` says what to write instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANISHED = {
    r"whoever|whosoever": "name the caller, the reader or the owner",
    r"somebody|someone|nobody|everybody": "name the function, the thread or the user",
    r"(is|are|was|were) told|be told": "is called with, is notified, receives",
    r"who asks|who asked": "the caller",
    r"in vain": "without effect, unused",
    r"hears? of": "receives, reads",
    r"comes? of it": "results",
    r"brought over|brings? over": "streamed, stream",
    r"shelf|shelves|gh_shelf\w*|gh_shelves\w*": "released-cache pool",
    r"moody": "flaky",
    r"is_told|is_asked|let_hold": "has_init_tensor, has_alloc_size, raise_max_size",
    r"n_places|place_copy": "n_copies, cur_copy",
    r"left_to|why_lost": "deferred, failure",
    r"weigh_reuse|GS_STATE_TOOK_OVER|took over": "try reuse modes, GS_STATE_INPLACE, reused in place",
    r"class Placing|placing_of": "AllocationPass",
    r"(?-i:Home)|PlaceVersions|_places_of|gs_place(?!;| \*former)":
        "ContextState, LocationVersions, _locations_of, gs_location",
    r"facts\.home": "arena_of",
    r"(?:step|one|s|facts)\.keeps|(?-i:program\.turns)|step\.places": "if_changed, kept, copy_slots, locations",
    r"(?:was_|lease\.)displaced(?!:)": "rebound",
    r"lent": "temporary",
    r"one(?: \w+)? behind the other": "one after another",
    r"(?-i:offered)|fusion_offers": "groups, fusion_groups",
    r"gs_plan_arrays|gs_asked|asked_alike|loads_alone|make_alone": "gs_plan, gs_request, make_program",
}
"""{pattern of whole words: what to write instead}."""
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".cpp", ".cu", ".cuh", ".md", ".toml", ".yaml", ".yml"}
OWN = {"tools/check_words.py", "tests/package/test_glossary.py", "tests/planning/test_former_names.py", "CHANGELOG.md"}
"""Files that name the words in order to replace them."""
PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?P<w{i}>{words})' for i, words in enumerate(BANISHED))})\b", re.I)


def repository() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def is_read(name: str) -> bool:
    return (Path(name).suffix in SUFFIXES and name not in OWN and (ROOT / name).is_file()
            and not name.startswith("tests/data/"))


def faults(text: str) -> list[tuple[int, str, str]]:
    """(line, word, what to write instead) of each banished word."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for match in PATTERN.finditer(line):
            instead = list(BANISHED.values())[int(match.lastgroup[1:])]
            found.append((number, match[0], instead))
    return found


def main(names: list[str]) -> int:
    bad = 0
    for name in filter(is_read, names or repository()):
        for number, word, instead in faults((ROOT / name).read_text(encoding="utf-8")):
            print(f"{name}:{number}: {word!r}: {instead}", file=sys.stderr)
            bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
