"""Backends of other processes and machines, which a scheduler uses like any other; see docs/remote.md."""

from __future__ import annotations

from ggml_sched.remote.backend import RemoteBackend, RemoteWorker
from ggml_sched.remote.cluster import Cluster, cluster_of, connect
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.transport import StartingTransport, Transport, WorkerOptions
from ggml_sched.remote.worker import Worker

__all__ = ["Cluster", "Faults", "RemoteBackend", "RemoteWorker", "SimulatedNetwork", "StartingTransport", "Transport",
           "Worker", "WorkerOptions", "cluster_of", "connect"]
