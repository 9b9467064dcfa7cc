"""Whole-number formulas of the rule table: names, numbers, + - * // %, comparisons, and / or / not."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.Eq: operator.eq,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}


class Formula:
    """A formula, checked when it is read: what is not listed in the module text is a ValueError."""

    def __init__(self, text: str | int) -> None:
        self.text = str(text)
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"formula {self.text!r}: {error.msg}") from None
        self.names = frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name))
        self._value(self._tree, dict.fromkeys(self.names, 1))

    def __call__(self, values: Mapping[str, int]) -> int:
        """The value. Raises KeyError for a name without one; ``and`` and ``or`` stop early, so a name
        behind a condition that decides may be absent."""
        return int(self._value(self._tree, values))

    def _value(self, node: ast.AST, values: Mapping[str, int]) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.BoolOp):
            want = isinstance(node.op, ast.Or)
            found = not want
            for part in node.values:
                found = bool(self._value(part, values))
                if found is want:
                    break
            return found
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left, values), self._value(node.right, values)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self._value(node.operand, values))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            left, right = self._value(node.left, values), self._value(node.comparators[0], values)
            return _OPERATORS[type(node.ops[0])](left, right)
        raise ValueError(f"formula {self.text!r}: {ast.unparse(node)!r} is not allowed")
