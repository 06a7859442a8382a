# SPDX-License-Identifier: Apache-2.0
"""Switches the fixes of DistDGL's behaviour on and off in the modules that are loaded.

A fix whose header says `When: enabled` is not applied as DGL is imported. `switch_on` compiles the mended text of each
module and gives every function that differs its mended code, in the function object that is there already: whoever
holds it by name, in a class or behind a wrapper, then runs the mended code, and `switch_off` puts the old code back.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType

from dgl_hybrid.compat.hook import FINDER
from dgl_hybrid.errors import CompatError

Definition = ast.FunctionDef | ast.AsyncFunctionDef
Undo = Callable[[], None]
Change = Callable[[], Undo]

_undo: list[Undo] | None = None


def is_on() -> bool:
    """Tells whether the fixes are switched on."""
    return _undo is not None


def switch_on() -> None:
    """Switches on every fix whose header says `When: enabled`; imports the modules that they mend. Idempotent.

    Raises:
        CompatError: when the installed DGL is not a supported one, a file of it is not as released, it was imported
            before this package and lacks what is mended at import, or somebody replaced a function that is to be
            mended; names the file. Nothing is switched on then.
    """
    global _undo
    if _undo is not None:
        return
    from dgl_hybrid.compat import require_supported_dgl

    require_supported_dgl()
    changes: list[Change] = []
    states: dict[str, str] = {}
    for name, patches in FINDER.switchable().items():
        there = _plan_module(import_module(name), changes)
        for fix, _ in patches:
            states[fix.name] = "in DGL's files already" if there else "on"
    undo: list[Undo] = []
    try:
        for change in changes:
            undo.append(change())
    except BaseException:
        _take_back(undo)
        raise
    for fix_name, state in states.items():
        FINDER.record(fix_name, state)
    _undo = undo


def switch_off() -> None:
    """Gives every function the code back that it had before `switch_on`, and removes what was added. Idempotent."""
    global _undo
    if _undo is None:
        return
    undo, _undo = _undo, None
    _take_back(undo)
    for patches in FINDER.switchable().values():
        for fix, _ in patches:
            if FINDER.state(fix.name) == "on":
                FINDER.record(fix.name, "off")


def _take_back(undo: list[Undo]) -> None:
    while undo:
        undo.pop()()


def _plan_module(module: ModuleType, changes: list[Change]) -> bool:
    """Appends what makes `module` the mended one; True when its file is mended already and nothing is to be done."""
    path = module.__file__
    if path is None:
        raise CompatError(f"expected {module.__name__} to be loaded from a file (got {module!r}). Reinstall DGL.")
    with open(path, encoding="utf-8", newline=None) as file:
        source = file.read()
    mended_text = FINDER.mend(module.__name__, source, enabled=True)
    if mended_text is source:
        return True
    stock_text = FINDER.mend(module.__name__, source, enabled=False)
    if stock_text is not source and not FINDER.has_mended(module):
        # The mended functions would call what only the fixes made at import bring.
        raise CompatError(
            f"{path} was loaded without the fixes that are made as DGL is imported. Import dgl_hybrid before dgl, or "
            "start the program with `dgl-hybrid run` or `dgl-hybrid launch`."
        )
    stock = ast.parse(stock_text, path)
    mended = ast.parse(mended_text, path)
    file_name = f"{path} (mended by dgl_hybrid, switched on)"
    # Without a modification time: never checked against a file, so tracebacks show the mended lines.
    linecache.cache[file_name] = (len(mended_text), None, mended_text.splitlines(keepends=True), file_name)
    changes += _Planner(module, path, file_name, mended).compare(stock.body, mended.body)
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """What a function does: the part of it that a fix changes."""

    code: CodeType
    defaults: tuple[object, ...] | None
    kwdefaults: dict[str, object] | None

    @classmethod
    def of(cls, function: FunctionType) -> _Code:
        return cls(code=function.__code__, defaults=function.__defaults__, kwdefaults=function.__kwdefaults__)

    def give_to(self, function: FunctionType) -> Undo:
        before = _Code.of(function)
        function.__code__, function.__defaults__ = self.code, self.defaults
        function.__kwdefaults__ = self.kwdefaults

        def undo() -> None:
            before.give_to(function)

        return undo


class _Planner:
    """Finds how the mended text of one module differs from the stock one, as changes to the loaded module."""

    def __init__(self, module: ModuleType, path: str, file_name: str, mended: ast.Module) -> None:
        self._module = module
        self._path = path
        self._file_name = file_name
        code = compile(mended, file_name, "exec", dont_inherit=True)
        self._codes = {(c.co_qualname, c.co_firstlineno): c for c in _codes_in(code)}

    def compare(self, stock: list[ast.stmt], mended: list[ast.stmt], scope: tuple[str, ...] = ()) -> list[Change]:
        """Returns the changes for the statements of a module, or of a class whose dotted name is `scope`."""
        changes: list[Change] = []
        known = _by_name(stock)
        same = {ast.dump(statement) for statement in stock}
        if gone := known.keys() - _by_name(mended).keys():
            raise CompatError(f"{self._path}: a fix that can be switched may not remove {sorted(gone)}. Rewrite it.")
        for name, statement in _named(mended):
            if ast.dump(statement) in same:
                continue
            before = known.get(name) if name else None
            where = f"{self._path}:{statement.lineno}"
            if isinstance(statement, ast.ClassDef) and isinstance(before, ast.ClassDef):
                changes += self.compare(before.body, statement.body, (*scope, statement.name))
            elif isinstance(statement, Definition) and isinstance(before, Definition):
                if list(map(ast.dump, before.decorator_list)) != list(map(ast.dump, statement.decorator_list)):
                    raise CompatError(f"{where}: a fix that can be switched may not change decorators. Rewrite it.")
                changes.append(self._change_function(scope, before, statement))
            elif scope and isinstance(statement, Definition) and before is None and not statement.decorator_list:
                changes.append(self._add_method(scope, statement))
            elif not scope and before is None:
                changes.append(self._run(statement))
            else:
                raise CompatError(f"{where}: this statement cannot be switched on and off. Rewrite the fix.")
        return changes

    def _change_function(self, scope: tuple[str, ...], before: Definition, after: Definition) -> Change:
        function = self._find((*scope, after.name))
        code = self._code(scope, after)
        if code.co_freevars != function.__code__.co_freevars:
            raise CompatError(
                f"{self._path}:{after.lineno}: a fix that can be switched may not change what {after.name} closes "
                "over. Rewrite it."
            )
        if ast.dump(before.args) == ast.dump(after.args):
            mended = _Code(code=code, defaults=function.__defaults__, kwdefaults=function.__kwdefaults__)
        else:
            sample = self._evaluate(after)
            mended = _Code(code=code, defaults=sample.__defaults__, kwdefaults=sample.__kwdefaults__)
        return lambda: mended.give_to(function)

    def _add_method(self, scope: tuple[str, ...], added: Definition) -> Change:
        owner = self._look_up(scope)
        assert isinstance(owner, type)
        sample, code = self._evaluate(added), self._code(scope, added)
        cells = tuple(
            CellType(owner) for _ in code.co_freevars
        )  # `__class__`, for super(), is all a method closes over
        method = FunctionType(code, vars(self._module), added.name, sample.__defaults__, cells)
        method.__kwdefaults__ = sample.__kwdefaults__
        method.__qualname__ = code.co_qualname

        def change() -> Undo:
            setattr(owner, added.name, method)
            return lambda: delattr(owner, added.name)

        return change

    def _run(self, statement: ast.stmt) -> Change:
        """Runs a statement of the module that stock DGL lacks: an import, a constant, a function, a registration."""
        code = compile(ast.Module([statement], []), self._file_name, "exec", dont_inherit=True)
        names = vars(self._module)

        def change() -> Undo:
            before = dict(names)
            exec(code, names)
            bound = [name for name, value in names.items() if name not in before or before[name] is not value]

            def undo() -> None:
                for name in bound:
                    if name in before:
                        names[name] = before[name]
                    else:
                        del names[name]

            return undo

        return change

    def _find(self, dotted: tuple[str, ...]) -> FunctionType:
        """Returns the function of that name which was made from DGL's file, also from behind wrappers."""
        found = self._look_up(dotted)
        candidate: object = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        candidate = candidate.fget if isinstance(candidate, property) else candidate
        while candidate is not None:
            if (
                isinstance(candidate, FunctionType)
                and candidate.__globals__ is vars(self._module)
                and candidate.__code__.co_qualname == ".".join(dotted)
            ):
                return candidate
            candidate = getattr(candidate, "__wrapped__", None)
        raise CompatError(
            f"expected DGL's own {'.'.join(dotted)} in {self._path} (got {found!r}). Enable dgl_hybrid before other "
            "code replaces functions of DGL, or set `__wrapped__` of the replacement."
        )

    def _look_up(self, dotted: tuple[str, ...]) -> object:
        found: object = self._module
        for name in dotted:
            try:
                found = vars(found)[name]  # as it stands there: no binding, nothing inherited
            except KeyError:
                raise CompatError(
                    f"expected {'.'.join(dotted)} in {self._path} (got no {name}). Enable dgl_hybrid before other code "
                    "changes DGL's modules."
                ) from None
        return found

    def _code(self, scope: tuple[str, ...], definition: Definition) -> CodeType:
        first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
        return self._codes[".".join((*scope, definition.name)), first]

    def _evaluate(self, definition: Definition) -> FunctionType:
        """Returns a function with the defaults of `definition` and nothing to do."""
        bare = ast.FunctionDef(name=definition.name, args=definition.args, body=[ast.Pass()], decorator_list=[])
        ast.copy_location(bare, definition)
        for argument in ast.walk(bare.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        names: dict[str, object] = {}
        tree = ast.fix_missing_locations(ast.Module([bare], []))
        exec(compile(tree, self._file_name, "exec", dont_inherit=True), vars(self._module), names)
        function = names[definition.name]
        assert isinstance(function, FunctionType)
        return function


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _named(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields each statement with the name that it defines, or an empty string."""
    for statement in statements:
        name = statement.name if isinstance(statement, Definition | ast.ClassDef) else ""
        yield name, statement


def _by_name(statements: list[ast.stmt]) -> dict[str, ast.stmt]:
    return {name: statement for name, statement in _named(statements) if name}
