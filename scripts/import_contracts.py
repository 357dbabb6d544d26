"""The import-linter contract of the layers.

Owns: the check that every direct import inside the package goes to a lower layer, or sideways within one, and that
no modules import each other in a circle. The table of layers itself is data in `pyproject.toml`.
Does not own: imports guarded by `TYPE_CHECKING` (import-linter leaves them out) and the lazy names of package
`__init__` files (strings, not imports).

import-linter's own `layers` contract needs whole packages per layer. Ours are per module: `comm/config.py` is pure
data of layer 2 beside `comm/mesh.py` of layer 1.
"""

from __future__ import annotations

import fnmatch

import networkx
from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class LayerTable:
    """Table from module name to layer number (0 is the lowest).

    A row is names separated by spaces. `a.b` covers that module and all below it, the longest such name wins;
    `=a.b` is that module alone and wins over everything; a shell pattern (`a.*_config`) wins over plain names.
    """

    def __init__(self, rows: list[str], caps: list[str]) -> None:
        self._exact: dict[str, int] = {}
        self._pattern: dict[str, int] = {}
        self._prefix: dict[str, int] = {}
        for level, row in enumerate(rows):
            for name in row.split():
                table = self._exact if name.startswith("=") else self._pattern if "*" in name else self._prefix
                key = name.lstrip("=")
                if key in table:
                    raise ValueError(f"layer table names {key} twice: layers {table[key]} and {level}")
                table[key] = level
        self._caps = {name: int(level) for name, level in (cap.split() for cap in caps)}

    def level(self, module: str) -> int | None:
        """Layer of `module`, or None where no row covers it."""
        if module in self._exact:
            return self._exact[module]
        for pattern, level in self._pattern.items():
            if fnmatch.fnmatchcase(module, pattern):
                return level
        best = self._longest(module, self._prefix)
        return None if best is None else self._prefix[best]

    def highest_import(self, module: str) -> int | None:
        """Highest layer `module` may import: its own layer, or its cap."""
        cap = self._longest(module, self._caps)
        return self.level(module) if cap is None else self._caps[cap]

    @staticmethod
    def _longest(module: str, table: dict[str, int]) -> str | None:
        parts = module.split(".")
        candidates = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((name for name in candidates if name in table), None)

    def same_cap(self, module: str, other: str) -> bool:
        """True where both belong to one capped package, inside which imports are free."""
        cap = self._longest(module, self._caps)
        return cap is not None and cap == self._longest(other, self._caps)


def find_problems(graph: ImportGraph, table: LayerTable) -> list[str]:
    """Every broken rule as one line of text, sorted; empty when the contract is kept."""
    problems: list[str] = []
    imports = networkx.DiGraph()
    for importer in sorted(graph.modules):
        level = table.level(importer)
        if level is None and not graph.find_modules_directly_imported_by(importer):
            continue  # an empty package: anyone may pass through it
        if level is None:
            problems.append(f"{importer} has no layer: add it to the layer table in pyproject.toml")
            continue
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            imports.add_edge(importer, imported)
            target = table.level(imported)
            allowed = table.highest_import(importer)
            if target is None or allowed is None or target <= allowed or table.same_cap(importer, imported):
                continue
            line = graph.get_import_details(importer=importer, imported=imported)[0]["line_number"]
            where = f"{importer}:{line} (layer {level})"
            problems.append(f"{where} may import up to layer {allowed}, but imports {imported} (layer {target})")
    for circle in networkx.strongly_connected_components(imports):
        if len(circle) > 1:
            problems.append("import cycle between " + ", ".join(sorted(circle)))
    return problems


class LayerTableContract(Contract):
    """import-linter contract type `layer_table`; options `layers` and `capped` as in `pyproject.toml`."""

    type_name = "layer_table"

    layers = fields.ListField(subfield=fields.StringField())
    capped = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        problems = find_problems(graph, LayerTable(list(self.layers), list(self.capped)))  # type: ignore[call-overload]
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(problem)
