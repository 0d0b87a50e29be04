"""Experts by the slot: policies, recordings of which experts tokens used, and replays of recordings under policies.

`LeastRecentlyUsed`, `LeastFrequentlyUsed`, `Mixture` and `Static` are policies, values that say which experts of a
model stay in memory when there are more than slots.  `Routing` is what `Model.record_experts` makes and
`ggml-sched experts` reads; `replay` counts hits under a policy, `bound` those of Belady's algorithm, which knows the
future.  `replay_ahead` counts what reading the likely experts of the next layer ahead would gain.
"""

from ggml_sched.experts.ahead import PREDICTIONS, Ahead, replay_ahead
from ggml_sched.experts.policies import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Mixture,
    Policy,
    Static,
    policy_named,
)
from ggml_sched.experts.replay import bound, replay
from ggml_sched.experts.routing import Bank, Routing, Visit
from ggml_sched.experts.table import Hits

__all__ = ["PREDICTIONS", "Ahead", "Bank", "Hits", "LeastFrequentlyUsed", "LeastRecentlyUsed", "Mixture", "Policy",
           "Routing", "Static", "Visit", "bound", "policy_named", "replay", "replay_ahead"]
