"""The mutants of a source file: one small edit each, which a test should notice.

Python is parsed; Cython and C are read as text in which comments and strings are blank.  Operators: a comparison that
admits or excludes its bound, or is the opposite; a negated condition; `and` for `or`; `+` for `-`; a number that is
one more; True for False; a statement that is not there.  Invariant: a mutant replaces one span of a file, and nothing
in a comment, a string, an annotation or an import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".py", ".pyx", ".pxi", ".c", ".h", ".cu", ".cuh")


class Mutant(NamedTuple):
    """Bytes `start` to `end` of a file become `text`."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    function: str
    """The function around it, or ""."""
    was: str
    """The original text, shortened."""

    def applied(self, source: bytes) -> bytes:
        return source[:self.start] + self.text.encode() + source[self.end:]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.operator}: {self.was} -> {_shortened(self.text)}"


def _shortened(text: str) -> str:
    return " ".join(text.split())[:60]


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """All mutants of a file, by position."""
    source = (root / path).read_bytes()
    found = _Python(path, source) if path.endswith(".py") else _Text(path, source)
    return sorted(set(found.mutants()), key=lambda mutant: (mutant.start, mutant.end, mutant.text))


# -- Python ----------------------------------------------------------------------------------------

COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
            ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
            ast.NotIn: ("not in", "in")}
UNTOUCHED = (ast.JoinedStr, ast.Import, ast.ImportFrom)


class _Python:
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]

    def mutants(self) -> Iterator[Mutant]:
        yield from self._visit(ast.parse(self.source), "")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset)

    def _mutant(self, operator: str, span: tuple[int, int], text: str, function: str) -> Mutant:
        line = self.source.count(b"\n", 0, span[0]) + 1
        was = _shortened(self.source[slice(*span)].decode())
        return Mutant(self.path, line, operator, *span, text, function, was)

    def _between(self, left: ast.AST, right: ast.AST, word: str) -> tuple[int, int]:
        """Where an operator stands between its operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        pattern = rb"\s+".join(re.escape(part).encode() for part in word.split())
        match = re.search(pattern, self.source[start:end])
        return start + match.start(), start + match.end()

    def _visit(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, UNTOUCHED):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for operator, span, text in self._edits(node):
            yield self._mutant(operator, span, text, function)
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from self._visit(child, function)

    def _edits(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str]]:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
                    word, other = COMPARED[type(op)]
                    yield "comparison", self._between(left, right, word), other
            case ast.BoolOp():
                word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield "logic", self._between(left, right, word), other
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not any(map(_is_text, (node.left, node.right))):
                word, other = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
                yield "arithmetic", self._between(node.left, node.right, word), other
            case ast.Constant(value=bool()):
                yield "constant", self._span(node), str(not node.value)
            case ast.Constant(value=int()):
                yield "constant", self._span(node), str(node.value + 1)
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield "condition", self._span(node.test), f"not ({self._text(node.test)})"
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "condition", self._span(test), f"not ({self._text(test)})"
        if _is_removable(node):
            yield "statement", self._span(node), "pass"

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_removable(node: ast.AST) -> bool:
    """Whether a statement can be removed without leaving names undefined."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Return, ast.Continue, ast.Break))


# -- Cython and C ----------------------------------------------------------------------------------

SPACED = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " + ": " - ",
          " - ": " + "}
LOGIC = {"c": {" && ": " || ", " || ": " && "}, "cython": {" and ": " or ", " or ": " and "}}
BLANKED = {
    "c": re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*',
                    re.DOTALL | re.MULTILINE),
    "cython": re.compile(r'#[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL),
}
DECLARES = re.compile(r"\s*(?:cdef|cpdef|def|class|ctypedef|cimport|import|from|include|enum|struct|typedef|@)\b|\s*@")
FUNCTIONS = {"c": re.compile(r"^[A-Za-z_][^;={}()]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE),
             "cython": re.compile(r"^[ \t]*(?:cdef|cpdef|def)\b[^\n=]*?\b(\w+)\(", re.MULTILINE)}
STATEMENTS = {"c": re.compile(r"^[ \t]*((?:return\b[^;\n]*|continue|break|goto \w+|[\w.\[\]>*()-]+ [-+|&^*/]?= [^;\n]*"
                              r"|\w+\([^;\n]*\)|[\w.\[\]>-]+(?:\+\+|--));)[ \t]*$", re.MULTILINE),
              "cython": re.compile(r"^[ \t]*(return\b[^\n]*|raise\b[^\n]*|continue|break"
                                   r"|[\w.\[\]]+[.\[][\w.\[\]() +-]* = [^\n]*|[\w.\[\]]+ [-+|&^*/]= [^\n]*"
                                   r"|[\w.]+\([^\n]*\))[ \t]*$", re.MULTILINE)}
CONDITIONS = {"c": re.compile(r"\b(?:if|while) \("), "cython": re.compile(r"^[ \t]*(?:if|elif|while) ", re.MULTILINE)}


class _Text:
    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.language = "cython" if path.endswith((".pyx", ".pxi")) else "c"
        self.source = source.decode()
        self.code = BLANKED[self.language].sub(lambda match: re.sub(r"[^\n]", " ", match[0]), self.source)
        self.functions = [(match.start(), match[1]) for match in FUNCTIONS[self.language].finditer(self.code)]

    def mutants(self) -> Iterator[Mutant]:
        for operator, start, end, text in self._edits():
            line = self.source.count("\n", 0, start) + 1
            function = next((name for at, name in reversed(self.functions) if at <= start), "")
            before, inside = len(self.source[:start].encode()), len(self.source[start:end].encode())
            was = _shortened(self.source[start:end])
            yield Mutant(self.path, line, operator, before, before + inside, text, function, was)

    def _edits(self) -> Iterator[tuple[str, int, int, str]]:
        for words, operator in ((SPACED, None), (LOGIC[self.language], "logic")):
            for match in re.finditer("|".join(map(re.escape, words)), self.code):
                kind = operator or ("arithmetic" if match[0] in (" + ", " - ") else "comparison")
                yield kind, *match.span(), words[match[0]]
        for match in re.finditer(r"(?<![\w.\]])\d+(?![\w.])", self.code):
            start = self.code.rfind("\n", 0, match.start()) + 1
            if not DECLARES.match(self.code, start):
                yield "constant", *match.span(), str(int(match[0]) + 1)
        for match in CONDITIONS[self.language].finditer(self.code):
            if (span := self._condition(match)) is not None:
                text = self.source[slice(*span)]
                yield "condition", *span, f"!({text})" if self.language == "c" else f"not ({text})"
        nothing = ";" if self.language == "c" else "pass"
        for match in STATEMENTS[self.language].finditer(self.code):
            if _is_balanced(match[1]) and not DECLARES.match(match[0]):
                yield "statement", *match.span(1), nothing

    def _condition(self, match: re.Match) -> tuple[int, int] | None:
        """The span of the condition that begins behind `match`, or None if its end is unclear."""
        if self.language == "cython":
            end = self.code.find("\n", match.end())
            colon = self.code.rstrip("\n")[:end].rstrip().rfind(":")
            text = self.code[match.end():colon]
            return (match.end(), colon) if self.code[colon:end].strip() == ":" and _is_balanced(text) else None
        depth = 1
        for at in range(match.end(), len(self.code)):
            depth += {"(": 1, ")": -1}.get(self.code[at], 0)
            if depth == 0:
                return match.end(), at
        return None


def _is_balanced(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))
