"""Operators for cosmic-ray that its own lack: what can go wrong in code that calls torch and has no operator to be replaced.

statement    a call, an accumulation or a write to an attribute is left out
argument     a keyword argument is left out, so that the default holds
call         x.abs() becomes x, x.T becomes x, for the calls and attributes of UNDONE
name         min becomes max, inside becomes outside, "A" becomes "B", for the names of SWAPPED
"""

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Name

UNDONE = {"T", "mT", "abs", "sign", "sqrt", "square", "clone", "copy", "detach", "contiguous", "whole", "thinned"}
SWAPPED = {"min": "max", "inside": "outside", "any": "all", '"A"': '"B"'}
SWAPPED |= {new: old for old, new in SWAPPED.items()}

Position = tuple[tuple[int, int], tuple[int, int]]


class RemoveStatement(Operator):
    """Leaves out a statement that only has an effect: a call, an accumulation, a write to an attribute or to an entry."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type != "simple_stmt":
            return
        statement = node.children[0]
        acts = statement.type == "atom_expr"
        if statement.type == "expr_stmt":
            target, sign = statement.children[:2]
            acts = sign.type == "operator" and (target.type == "atom_expr" or sign.value != "=")
        if acts:
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.get_first_leaf()
        node.children[0] = Name("pass", first.start_pos, prefix=first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"), Example("a += b\n", "pass\n"), Example("a.b = c\n", "pass\n"))


class RemoveArgument(Operator):
    """Leaves out a keyword argument, but for True and False: where those are not the default, the other is."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        yield from [(argument.start_pos, argument.end_pos) for argument in self._arguments(node)]

    def mutate(self, node: Any, index: int) -> Any:
        argument = self._arguments(node)[index]
        within = argument.parent
        at = next(i for i, child in enumerate(within.children) if child is argument)
        if within.type != "arglist":
            del within.children[at]
        elif at:
            del within.children[at - 1 : at + 1]
        else:
            del within.children[:2]
        return node

    @staticmethod
    def _arguments(node: Any) -> list[Any]:
        """The keyword arguments of a call, `f(a, b=1)`."""
        if node.type != "trailer" or node.children[0].value != "(" or len(node.children) != 3:
            return []
        inside = node.children[1]
        given = inside.children if inside.type == "arglist" else [inside]
        named = [each for each in given if each.type == "argument" and getattr(each.children[1], "value", "") == "="]
        return [each for each in named if each.get_last_leaf().value not in ("True", "False")]

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(a, b=1)", "f(a)"), Example("f(b=1)", "f()"), Example("f(b=1, c=2)", "f( c=2)"))


class RemoveCall(Operator):
    """Leaves out a method without arguments, or a transposition."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        # all at once: the node is mutated before the iteration ends
        yield from [(node.children[first].start_pos, node.children[last].end_pos) for first, last in self._calls(node)]

    def mutate(self, node: Any, index: int) -> Any:
        first, last = self._calls(node)[index]
        del node.children[first : last + 1]
        return node

    @staticmethod
    def _calls(node: Any) -> list[tuple[int, int]]:
        """First and last trailer of each."""
        found = []
        if node.type == "atom_expr":
            for i, trailer in enumerate(node.children):
                if trailer.type == "trailer" and trailer.children[0].value == "." and trailer.children[1].value in UNDONE:
                    called = node.children[i + 1].get_code() == "()" if i + 1 < len(node.children) else False
                    if called or trailer.children[1].value in ("T", "mT"):
                        found.append((i, i + called))
        return found

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x.abs().sum()", "x.sum()"), Example("(x @ y.T)", "(x @ y)"))


class SwapName(Operator):
    """Puts a name in place of the one it is taken for."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type in ("name", "string") and node.value in SWAPPED and not (node.type == "name" and node.is_definition()):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = SWAPPED[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("min(a, b)", "max(a, b)"), Example('f("A")', 'f("B")'))


OPERATORS = {each.__name__: each for each in (RemoveStatement, RemoveArgument, RemoveCall, SwapName)}
