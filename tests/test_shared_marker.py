"""Tests that need the shared reference data carry the `shared` marker, so that `-m "not shared"` skips nothing."""

from __future__ import annotations

import ast
from pathlib import Path

MARK = "pytest.mark.shared"


def unmarked(source: str) -> list[str]:
    """Tests that take the `shared` fixture, without the marker on them or on their whole file."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.Assign) and MARK in ast.unparse(node.value) for node in tree.body):
        return []
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    needy = (test for test in tests if any(arg.arg == "shared" for arg in test.args.args))
    return [test.name for test in needy if MARK not in map(ast.unparse, test.decorator_list)]


def test_the_check_sees_what_it_should() -> None:
    assert unmarked("def test_a(shared): ...\n@pytest.mark.shared\ndef test_b(shared): ...") == ["test_a"]
    assert unmarked("pytestmark = pytest.mark.shared\ndef test_a(shared): ...") == []


def test_every_test_of_shared_data_is_marked(root: Path) -> None:
    files = sorted((root / "tests").rglob("test_*.py"))
    found = {str(path.relative_to(root)): unmarked(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
