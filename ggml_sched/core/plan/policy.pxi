# Policies: how a plan is made, as a value.
#
# Owns the Python face of gs_policy (include/ggml_sched/plan.h).

cdef dict _PLACEMENTS = {"default": GS_PLACEMENT_DEFAULT, "seed": GS_PLACEMENT_SEED}
cdef dict _OFFSETS = {"packed": GS_OFFSETS_PACKED, "best fit": GS_OFFSETS_BEST_FIT}
cdef dict _REUSES = {"first": GS_REUSE_FIRST, "whole": GS_REUSE_WHOLE, "front": GS_REUSE_FRONT, "all": GS_REUSE_ALL}


cdef class Policy:
    """How a plan is made; immutable, equal by value.

    `placement`: "default" (weights, neighbours, boundaries) or "seed" (ggml's first generation).  `offsets`: "packed",
    all lifetimes seen together, or "best fit", one after the other.  `reuse`: which memory a node may take over in
    place: "first" as the first generation, "whole" only what it fills, "front" the front, the tail given back, "all"
    any part, by a view; of the last three whichever makes an arena smallest, up to the one named.  `leafs_first`:
    leafs are there from the start, not from their first use.  `stream`: weights of other backends take turns in one
    place, and none is kept.  `places`: of each copy that every compute makes anew, used in turn.

    Raises ValueError for a word that is not one of these, or fewer than one place.
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
        self.c.n_places = _index(places)

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
        return self.c.n_places

    def replace(self, **fields):
        """This policy with other values of the fields given."""
        return Policy(**{**self.fields(), **fields})

    def fields(self):
        """{name: value}: what `Policy(**fields)` makes again."""
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
