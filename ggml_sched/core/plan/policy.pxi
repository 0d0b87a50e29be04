# Policies: the Python class over gs_policy (include/ggml_sched/policy.h).

cdef dict _PLACEMENTS = {"default": GS_PLACEMENT_DEFAULT, "seed": GS_PLACEMENT_SEED}
cdef dict _OFFSETS = {"packed": GS_OFFSETS_PACKED, "best fit": GS_OFFSETS_BEST_FIT}
cdef dict _REUSES = {"first": GS_REUSE_FIRST, "whole": GS_REUSE_WHOLE, "front": GS_REUSE_FRONT, "all": GS_REUSE_ALL}


cdef class Policy:
    """The rules by which a plan is made; immutable, equal by value.

    `placement`: "default" (by weights, then neighbours, then split boundaries) or "seed" (ggml's first generation).
    `offsets`: "packed" (all lifetimes of an arena together) or "best fit" (one after the other, in execution order).
    `reuse`: which part of a source's memory a node may reuse in place: "first", as ggml's first generation; "whole",
    only all of it; "front", also its front, and the tail is freed; "all", also a part at an offset, through a view.
    With "front" and "all", lower modes from "whole" on are tried, too, and each arena keeps the smallest result.
    `leafs_first`: leafs are allocated from the start, not from their first use.  `stream`: copies of weights share
    memory, one after the other, and none is kept.  `places`: the number of copy slots of each copy that every compute
    makes again; consecutive computes use them in turn.

    Raises ValueError for another word, or fewer than one copy slot.
    """

    def __cinit__(self, *, str placement="default", str offsets="packed", str reuse="all", leafs_first=True, stream=False,
                  places=1):
        self.c.placement = _one_of(_PLACEMENTS, placement, "placement")
        self.c.offsets = _one_of(_OFFSETS, offsets, "offsets")
        self.c.reuse = _one_of(_REUSES, reuse, "reuse")
        self.c.leafs_first = bool(leafs_first)
        self.c.stream = bool(stream)
        if not 1 <= _index(places) <= 0xffff:
            raise ValueError(f"places = {places} is not in 1 .. {0xffff}")
        self.c.n_copies = _index(places)

    @property
    def placement(self):
        return _name_of(_PLACEMENTS, self.c.placement)

    @property
    def offsets(self):
        return _name_of(_OFFSETS, self.c.offsets)

    @property
    def reuse(self):
        return _name_of(_REUSES, self.c.reuse)

    @property
    def leafs_first(self):
        return bool(self.c.leafs_first)

    @property
    def stream(self):
        return bool(self.c.stream)

    @property
    def places(self):
        return self.c.n_copies

    def replace(self, **fields):
        """A copy of this policy with new values for the given fields."""
        return Policy(**{**self.fields(), **fields})

    def fields(self):
        """{name: value}, such that `Policy(**fields)` equals this policy."""
        return {"placement": self.placement, "offsets": self.offsets, "reuse": self.reuse,
                "leafs_first": self.leafs_first, "stream": self.stream, "places": self.places}

    def __reduce__(self):
        return _make_policy, (self.fields(),)

    def __eq__(self, other):
        if not isinstance(other, Policy):
            return NotImplemented
        return memcmp(&self.c, &(<Policy>other).c, sizeof(gs_policy)) == 0

    def __hash__(self):
        return hash(tuple(self.fields().values()))

    def __repr__(self):
        words = []
        for name, value in self.fields().items():
            words.append(f"{name}={value!r}")
        return f"Policy({', '.join(words)})"


def _make_policy(fields):
    return Policy(**fields)


cdef int _one_of(dict known, str word, str field) except -1:
    if word not in known:
        raise ValueError(f"{field} {word!r} is not one of {', '.join(known)}")
    return known[word]


cdef str _name_of(dict known, int number):
    for name, value in known.items():
        if value == number:
            return name
