"""Texts of the errors that the package raises, read from its code; `...` stands for a value."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

RAISED = re.compile(r"(\w*Error|EndOfData|Problem)$")
VALUE = "..."
DEPTH = 4  # of variables, functions and arguments that are followed to a text
ALTERNATIVES = 4  # of a text; parts with more stay values
Function = ast.FunctionDef | ast.AsyncFunctionDef


def messages(package: Path) -> dict[str, set[str]]:
    """Returns part of the package -> texts of three words or more."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = Module.read(path)
        for node, function in module.calls:
            if RAISED.search(ast.unparse(node.func)) and node.args:
                for text in module.texts(node.args[-1], function):
                    if len(re.findall(r"[a-z]{2,}", text)) > 2:
                        found.setdefault(path.relative_to(package).parts[0].removesuffix(".py"), set()).add(text)
    return found


@dataclass(frozen=True)
class Module:
    """A module's tree, its calls with the functions around them, and its functions of a name of their own."""

    tree: ast.Module
    calls: list[tuple[ast.Call, Function | None]]
    functions: Mapping[str, Function]

    @classmethod
    def read(cls, path: Path) -> Module:
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        count = Counter(node.name for node in functions)
        return cls(tree, list(_calls(tree, None)), {one.name: one for one in functions if count[one.name] == 1})

    def texts(self, node: ast.expr | None, function: Function | None, depth: int = DEPTH) -> set[str]:
        """Returns the texts that an expression of a function may have; none if it is no text that the code shows."""
        match node:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.JoinedStr(values=parts):
                return self._joined(parts, function, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], function, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, function, depth) | self.texts(orelse, function, depth)
            case ast.BoolOp(values=values):
                return {text for value in values for text in self.texts(value, function, depth)}
            case ast.Call(func=ast.Attribute(value=value, attr="removeprefix" | "replace")):
                return self.texts(value, function, depth)
            case ast.Call(func=ast.Name(id=name)) if depth and name in self.functions:
                return self._returned(self.functions[name], depth - 1)
            case ast.Name(id=name) if depth:
                return self._assigned(name, function, depth - 1)
        return set()

    def _joined(self, parts: list[ast.expr], function: Function | None, depth: int) -> set[str]:
        """Returns the texts of parts one after the other; a value that is no sentence stays a value."""
        choices: list[list[str]] = []
        for part in parts:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            texts = self.texts(inner, function, depth)
            is_value = isinstance(part, ast.FormattedValue) and not any(" " in text for text in texts)
            is_many = len(texts) * prod(map(len, choices)) > ALTERNATIVES
            choices.append([VALUE] if is_value or is_many or not texts else sorted(texts))
        joined = {"".join(choice) for choice in itertools.product(*choices)}
        return {re.sub(r"(\.{3}){2,}", VALUE, text) for text in joined}

    def _assigned(self, name: str, function: Function | None, depth: int) -> set[str]:
        """Returns the texts that a variable, a constant of the module, or a parameter has."""
        found: set[str] = set()
        for node in ast.walk(function) if function else self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            is_assignment = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            if is_assignment and name in names and not _reads(node.value, name):
                found |= self.texts(node.value, function, depth)
        if function is None:
            return found
        parameters = [one.arg for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
        if name not in parameters or function.name not in self.functions:
            return found or self._assigned(name, None, depth)
        index = parameters.index(name) - (parameters[0] in ("self", "cls"))
        for call, around in self.calls:
            if getattr(call.func, "id", getattr(call.func, "attr", "")) == function.name:
                given = {one.arg: one.value for one in call.keywords}
                argument = call.args[index] if index < len(call.args) else given.get(name)
                found |= self.texts(argument, around, depth)
        return found

    def _returned(self, function: Function, depth: int) -> set[str]:
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        return {text for value in returns for text in self.texts(value, function, depth)}


def _reads(node: ast.AST | None, name: str) -> bool:
    return node is not None and any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _calls(node: ast.AST, function: Function | None) -> Iterator[tuple[ast.Call, Function | None]]:
    """Yields every call with the innermost function around it."""
    if isinstance(node, ast.Call):
        yield node, function
    inner = node if isinstance(node, Function) else function
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, inner)
