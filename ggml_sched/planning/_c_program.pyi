"""The type hints of the compiled module planning._c_program, written by hand."""

KINDS: dict[str, int]

def write_program(graph: int, plan: int, resident: int, concurrent: tuple[bool, ...], program: int) -> int: ...
