"""The typed view of planning._c_program."""

KINDS: dict[str, int]

def write_program(graph: int, plan: int, resident: int, concurrent: tuple[bool, ...], program: int) -> int: ...
