"""Stores: backends that hold weights where no kernel reads them, and fetch them to other backends in each compute.

    files     reading files, past the page cache where the file system allows it; failures are typed errors
    queue     the threads of a store, its queue and its events
    slots     slots for experts: weights of which only some experts are in memory, read when a node has chosen them
    rows      GET_ROWS of a stored weight, which reads the rows that it needs
    store     Store: weights in host memory
    file      FileStore: weights in files

A store is one of the backends that a scheduler is given, but not the last one.  Weights that it holds are fetched to
the backend that computes with them, while that backend computes earlier nodes (core/plan/fetching.pxi).
"""

from ggml_sched.backends.store.file import FileBuffer, FileStore
from ggml_sched.backends.store.slots import ExpertBank, ExpertSlots, Stored, has_slots, slot_nbytes
from ggml_sched.backends.store.store import Fetched, Store, Traffic

__all__ = ["ExpertBank", "ExpertSlots", "Fetched", "FileBuffer", "FileStore", "Store", "Stored",
           "Traffic", "has_slots", "slot_nbytes"]
