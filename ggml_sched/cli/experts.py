"""Replay a recording of experts: hits and bytes read, by policy and number of slots.

The file is one that `ggml-sched run --record-experts FILE` has written.  `bound` is what Belady's algorithm reads,
which knows the future; the last column is bytes / bound.  With --ahead the table says instead what reading the likely
experts of the next layer ahead would gain: experts read ahead, the part of them that the next layer used, and bytes and
times / those without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggml_sched.experts import Policy, Routing

POLICIES = ("lru", "lfu", "mixture")
"""The names that `policy_named` accepts, listed here because importing that function imports NumPy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording")
    parser.add_argument("--slots", type=int, nargs="+", metavar="N",
                        help="numbers of slots (default: a quarter, half and three quarters of all experts)")
    parser.add_argument("--policy", nargs="+", choices=(*POLICIES, "static"), default=[*POLICIES, "static"],
                        help="policies; static keeps the experts that --profile, or the first half of the recording, "
                             "uses most (default: all)")
    parser.add_argument("--profile", metavar="FILE", help="another recording of the same model, for static")
    parser.add_argument("--ahead", type=float, nargs="+", metavar="X",
                        help="replay with experts read ahead, under the first policy, where computing from one choice "
                             "of experts to the next takes X times as long as reading one expert")


def run(args: argparse.Namespace) -> int:
    """Print the table.  Raises FileFormatError, OSError, or ValueError for fewer slots than 1 or than a visit needs."""
    from ggml_sched.experts import Routing, Static, bound, policy_named, replay
    from ggml_sched.planning.tables import table

    if args.slots and min(args.slots) < 1:
        raise ValueError(f"--slots {min(args.slots)}: not a number of slots")
    recording = Routing.load(args.file)
    if not recording.banks:
        print(f"{args.file}: the model has no experts")
        return 0
    total = sum(bank.n_experts for bank in recording.banks)
    least = max((len(visit.used) for visit in recording.visits), default=1)
    profile = (Routing.load(args.profile).profile if args.profile else
               Routing(recording.banks, recording.visits[: len(recording.visits) // 2]).profile)
    policies: dict[str, Policy] = {name: Static(profile) if name == "static" else policy_named(name)
                                   for name in args.policy}
    counts = args.slots or sorted({max(total * k // 4, least) for k in (1, 2, 3)})
    print(f"{args.file}: {len(recording.visits)} visits of {len(recording.banks)} layers with {total} experts "
          f"together, at most {least} used at once\n")
    if args.ahead:
        print(_ahead(recording, *next(iter(policies.items())), counts, args.ahead))
        return 0
    rows: list[tuple[object, ...]] = [("slots", "policy", "hits", "misses", "bytes read", "/ bound")]
    for n_slots in counts:
        best = bound(recording, n_slots)
        rows.append((n_slots, "bound", f"{best.rate:.1%}", best.misses, f"{best.nbytes:,}", "1.00"))
        for name, policy in policies.items():
            found = replay(recording, policy, n_slots)
            rows.append(("", name, f"{found.rate:.1%}", found.misses, f"{found.nbytes:,}",
                         f"{found.nbytes / max(best.nbytes, 1):.2f}"))
    print(table(rows))
    return 0


def _ahead(recording: Routing, name: str, policy: Policy, counts: Sequence[int], computing: Sequence[float]) -> str:
    """The table of --ahead."""
    from ggml_sched.experts import PREDICTIONS, replay_ahead
    from ggml_sched.planning.tables import table

    for ratio in computing:
        if not 0 < ratio < math.inf:
            raise ValueError(f"--ahead {ratio:g}: computing takes time, and ends")
    rows: list[tuple[object, ...]] = [("slots", "policy", "computing", "prediction", "read ahead", "used", "bytes",
                                       "time")]
    for n_slots in counts:
        for ratio in computing:
            without = replay_ahead(recording, policy, n_slots, None, ratio)
            for prediction, value in PREDICTIONS.items():
                found = replay_ahead(recording, policy, n_slots, value, ratio)
                rows.append((n_slots, name, f"{ratio:g}", prediction, found.reads, f"{found.precision:.0%}",
                             f"{found.nbytes / max(without.nbytes, 1):.2f}",
                             f"{found.time / without.time if without.time else 1:.2f}"))
    return table(rows)
