"""The rules of the house that no linter checks, read off the sources of the Python layer and of the map."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "offbeat"

# What only hooks.py may touch.
AUTOGRAD = re.compile(r"_execution_engine|\.register_\w*hook\(")


def uses(source, modules):
    """The modules of the package that a module imports: anywhere in it, and for types too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {name.name for name in node.names}
    return found & modules


def circle(graph):
    """What is left of a graph of imports when all that depends on nothing is taken away, again and again."""
    left = {module: set(others) for module, others in graph.items()}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    return left


def test_modules_of_python_depend_in_one_direction():
    sources = {path.stem: path.read_text() for path in PACKAGE.glob("*.py")}
    assert len(sources) > 40
    assert not circle({module: uses(source, sources.keys()) for module, source in sources.items()})


def test_only_one_module_hooks_into_autograd():
    touching = {path.name for path in PACKAGE.glob("*.py") if AUTOGRAD.search(path.read_text())}
    assert touching == {"hooks.py"}


def test_the_map_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {part for word in re.findall(r"`([^`\n]+)`", text) for part in (word, word.rpartition("/")[2])}
    for folder in ("rust/transport/src", "rust/core/src", "rust/cuda/src", "rust/python/src", "python/offbeat"):
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".rs", ".py")]
        assert len(files) > 5
        # what is said of the whole stands above the tables
        lost = {path.name for path in files} - named - {"lib.rs", "mod.rs", "__init__.py", "__main__.py"}
        assert not lost, f"{folder}: ARCHITECTURE.md does not name {sorted(lost)}"


def test_every_rule_finds_its_offender():
    modules = {"a", "b", "c"}
    assert uses("from . import a, x\nfrom .b import y\nif T:\n    from .c import Z\nimport os", modules) == modules
    assert uses("def f():\n    from .a import g", modules) == {"a"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == {}
    assert circle({"a": {"b"}, "b": {"a"}, "c": {"a"}}).keys() == modules
    assert AUTOGRAD.search("parameter.register_post_accumulate_grad_hook(hook)")
    assert not AUTOGRAD.search("with torch.no_grad():")
