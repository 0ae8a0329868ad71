"""Imports point downward only, and importing the package costs nothing that a user did not ask for.

The direction is read off the syntax trees, so nothing has to be executed and an import inside a function is
lazy; what an import does to the process is measured in fresh interpreters.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("streamattn", "patches")

# The first pattern that matches a module names everything of ours that it may import at module level.
MAY_IMPORT = {
    "streamattn.pattern": (),
    "streamattn.kernels.tiles": (),
    "streamattn.kernels.primitives": ("streamattn.pattern",),
    "streamattn.kernels": (),
    "streamattn.kernels.launch": ("streamattn.kernels.tiles", "streamattn.pattern"),
    "streamattn.kernels.hopper_primitives": ("streamattn.kernels.primitives",),
    "streamattn.kernels.hopper_producer": (
        "streamattn.kernels.hopper_primitives",
        "streamattn.kernels.primitives",
    ),
    "streamattn.kernels.hopper_launch": ("streamattn.kernels.launch", "streamattn.pattern"),
    "streamattn.kernels.hopper_backward_warps": (
        "streamattn.kernels.hopper_primitives",
        "streamattn.kernels.hopper_producer",
        "streamattn.kernels.primitives",
    ),
    "streamattn.kernels.hopper_backward_order": (
        "streamattn.kernels.hopper_primitives",
        "streamattn.kernels.hopper_backward_warps",
        "streamattn.kernels.primitives",
        "streamattn.kernels.launch",
    ),
    "streamattn.kernels.hopper_backward_shared": (
        "streamattn.kernels.hopper_backward_warps",
        "streamattn.kernels.hopper_primitives",
        "streamattn.kernels.hopper_producer",
        "streamattn.kernels.launch",
        "streamattn.kernels.primitives",
    ),
    "streamattn.kernels.hopper_backward": (
        "streamattn.kernels.hopper_backward_order",
        "streamattn.kernels.hopper_backward_shared",
        "streamattn.kernels.hopper_backward_warps",
        "streamattn.kernels.hopper_launch",
        "streamattn.kernels.primitives",
        "streamattn.kernels.launch",
        "streamattn.kernels.tiles",
        "streamattn.pattern",
    ),
    "streamattn.kernels.hopper_forward": (
        "streamattn.kernels.hopper_launch",
        "streamattn.kernels.hopper_primitives",
        "streamattn.kernels.hopper_producer",
        "streamattn.kernels.primitives",
        "streamattn.kernels.segments",
        "streamattn.kernels.launch",
        "streamattn.kernels.tiles",
        "streamattn.pattern",
    ),
    "streamattn.kernels.hopper_repeat": (
        "streamattn.kernels.hopper_backward",
        "streamattn.kernels.hopper_backward_warps",
        "streamattn.kernels.hopper_forward",
        "streamattn.kernels.hopper_launch",
        "streamattn.kernels.launch",
        "streamattn.kernels.tiles",
        "streamattn.pattern",
    ),
    "streamattn.kernels.wide_primitives": ("streamattn.kernels.primitives",),
    "streamattn.kernels.wide_launch": ("streamattn.kernels.launch", "streamattn.kernels.tiles"),
    **dict.fromkeys(
        ("streamattn.kernels.wide", "streamattn.kernels.wide_short", "streamattn.kernels.wide_backward"),
        (
            "streamattn.kernels.wide_short",
            "streamattn.kernels.wide_launch",
            "streamattn.kernels.wide_primitives",
            "streamattn.kernels.primitives",
            "streamattn.kernels.launch",
            "streamattn.kernels.tiles",
            "streamattn.pattern",
        ),
    ),
    "streamattn.kernels.*": (
        "streamattn.kernels.primitives",
        "streamattn.kernels.launch",
        "streamattn.kernels.tiles",
        "streamattn.pattern",
    ),
    "streamattn.reference": ("streamattn.pattern",),
    "streamattn.dispatch": ("streamattn.pattern", "streamattn.kernels.tiles"),
    "streamattn.kinds": ("streamattn.dispatch", "streamattn.pattern"),
    "streamattn.ops": ("streamattn.dispatch", "streamattn.kinds", "streamattn.pattern"),
    "streamattn.functional": (
        "streamattn.dispatch",
        "streamattn.kinds",
        "streamattn.ops",
        "streamattn.pattern",
    ),
    "streamattn.prologue": ("streamattn.dispatch", "streamattn.kinds", "streamattn.ops"),
    "streamattn.packed": ("streamattn.functional", "streamattn.kinds", "streamattn.ops"),
    "streamattn.weights": ("streamattn.pattern",),
    "streamattn.module": (
        "streamattn.functional",
        "streamattn.packed",
        "streamattn.parallel.sharing",
        "streamattn.pattern",
        "streamattn.weights",
    ),
    "streamattn.compat_checks": (),
    "streamattn.compat": ("streamattn.compat_checks", "streamattn.functional", "streamattn.packed"),
    "streamattn.parallel": (
        "streamattn.parallel.functional",
        "streamattn.parallel.layout",
        "streamattn.parallel.sharing",
    ),
    "streamattn.parallel.__main__": (
        "streamattn",
        "streamattn.doctor",
        "streamattn.parallel",
        "streamattn.parallel.functional",
    ),
    "streamattn.parallel.collectives": (),
    "streamattn.parallel.sharing": (),
    "streamattn.parallel.layout": ("streamattn.parallel.collectives", "streamattn.pattern"),
    "streamattn.parallel.call": ("streamattn.parallel.layout",),
    "streamattn.parallel.*": (
        "streamattn.parallel*",
        "streamattn.functional",
        "streamattn.pattern",
        "streamattn.reference",
    ),
    "patches*": (
        "patches*",
        "streamattn.module",
        "streamattn.functional",
        "streamattn.packed",
        "streamattn.parallel",
        "streamattn.prologue",
        "streamattn.weights",
    ),
    "streamattn.doctor": (),
    "streamattn.info": ("streamattn.dispatch", "streamattn.doctor"),
    "streamattn.step": ("patches",),
    "streamattn.speeds": ("streamattn.pattern", "streamattn.step"),
    "streamattn.plan": (
        "streamattn.job",
        "streamattn.parallel.*",
        "streamattn.pattern",
        "streamattn.speeds",
        "streamattn.step",
    ),
    "streamattn.data": (),
    "streamattn.job": ("streamattn.data",),
    "streamattn.processes": ("streamattn.doctor", "streamattn.job"),
    "streamattn.checkpoints": ("streamattn.job",),
    "streamattn.run_folder": ("streamattn.checkpoints", "streamattn.job"),
    "streamattn.shared_trainer": ("streamattn.checkpoints", "streamattn.parallel"),
    "streamattn.summary": ("streamattn.data", "streamattn.shared_trainer"),
    "streamattn.finetune": (
        "patches*",
        "streamattn.checkpoints",
        "streamattn.data",
        "streamattn.job",
        "streamattn.processes",
        "streamattn.run_folder",
        "streamattn.shared_trainer",
        "streamattn.summary",
    ),
    "streamattn.bench.decode_layer": (
        "patches*",
        "streamattn.bench.arguments",
        "streamattn.bench.machine",
        "streamattn.bench.resume",
        "streamattn.functional",
    ),
    "streamattn.bench.contestants": ("patches*", "streamattn.bench.providers", "streamattn.job"),
    "streamattn.bench.providers": (
        "streamattn",
        "streamattn.bench.cases",
        "streamattn.dispatch",
        "streamattn.functional",
        "streamattn.pattern",
    ),
    "streamattn.bench.resume": ("streamattn.bench.machine",),
    "streamattn.bench.plots": ("streamattn.bench.resume",),
    "streamattn.bench": (),
    "streamattn.bench.arguments": (),
    "streamattn.bench.backends": ("streamattn.bench.providers",),
    "streamattn.bench.cases": ("streamattn.pattern",),
    "streamattn.bench.machine": (),
    "streamattn.bench.tables": ("streamattn.bench.cases", "streamattn.bench.resume"),
    "streamattn.bench.timers": (),
    "streamattn.bench.parallel": (
        "streamattn.bench.*",
        "streamattn.parallel.__main__",
        "streamattn.parallel.functional",
    ),
    "streamattn.bench.tile_sweep": ("streamattn.bench.*", "streamattn.kernels.tiles"),
    "streamattn.bench.*": (
        "streamattn.bench.*",
        "streamattn.functional",
        "streamattn.dispatch",
        "streamattn.pattern",
    ),
    "streamattn.cli": (),
    "streamattn.__main__": ("streamattn.cli",),
    "streamattn": ("streamattn.functional", "streamattn.module", "streamattn.prologue"),
}

# What may be imported inside functions on top of that.
MAY_IMPORT_LAZILY = {
    "streamattn": ("patches",),
    "streamattn.ops": ("streamattn.reference", "streamattn.kernels.*"),
    "streamattn.prologue": ("streamattn.kernels.qk_prologue",),
    "streamattn.cli": ("streamattn", "streamattn.*"),
    "streamattn.info": ("streamattn.plan",),
    "streamattn.bench": ("streamattn.bench.*",),
    "streamattn.bench.readme": ("streamattn.bench",),
    "streamattn.bench.tile_sweep": ("streamattn.kernels.launch",),
}

STANDARD_LIBRARY_ONLY = ("streamattn.pattern", "streamattn.kernels.tiles")


class Import(NamedTuple):
    """One imported module by its full dotted name; lazy if a function must be called to run the import."""

    name: str
    lazy: bool
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imports_of(module: str, source: str, is_package: bool = False) -> Iterator[Import]:
    """All imports of one file; a name imported from a package counts as the submodule where there is one."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, lazy, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in SOURCES else base, lazy, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            (first, *_) = node.args
            # An f-string's leading constant stands for all modules it can name.
            pattern = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "*"
                for part in (first.values if isinstance(first, ast.JoinedStr) else [first])
            )
            yield Import(pattern, lazy, node.lineno)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            inside = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), lazy=False)


def file_imports(module: str) -> list[Import]:
    path = SOURCES[module]
    return list(imports_of(module, path.read_text(encoding="utf-8"), path.name == "__init__.py"))


def allowed(module: str, imported: Import) -> bool:
    rule = next((names for pattern, names in MAY_IMPORT.items() if fnmatch(module, pattern)), None)
    assert rule is not None, f"{module} is in no line of MAY_IMPORT: say what it may import"
    names = rule + (MAY_IMPORT_LAZILY.get(module, ()) if imported.lazy else ())
    return any(fnmatch(imported.name, pattern) for pattern in names)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_downward(module: str) -> None:
    ours = [i for i in file_imports(module) if i.name.split(".")[0] in PACKAGES]
    wrong = [f"line {i.line}: {i.name}" for i in ours if not allowed(module, i)]
    assert not wrong, f"{module} imports against the direction: {wrong}"


def test_the_direction_itself_has_no_cycle() -> None:
    reached: dict[str, set[str]] = {}

    def below(module: str, path: tuple[str, ...] = ()) -> set[str]:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in reached:
            eager = {i.name for i in file_imports(module) if not i.lazy and i.name in SOURCES}
            reached[module] = eager.union(*(below(name, (*path, module)) for name in eager - {module}))
        return reached[module]

    for module in SOURCES:
        below(module)


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_rule_and_tiles_need_the_standard_library_only(module: str) -> None:
    foreign = [i for i in file_imports(module) if i.name.split(".")[0] not in sys.stdlib_module_names]
    assert not foreign, f"{module} must stay importable everywhere: {foreign}"


def test_only_kernels_import_triton_at_module_level() -> None:
    wrong = [
        f"{module}:{i.line}"
        for module in SOURCES
        if not module.startswith("streamattn.kernels.")
        for i in file_imports(module)
        if i.name.split(".")[0] == "triton" and not i.lazy
    ]
    assert not wrong, f"Triton at module level outside kernels/: {wrong}"


def test_what_is_imported_is_declared() -> None:
    """Nothing is left to what another package happens to bring; Triton alone comes with torch for CUDA."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = pyproject.split("\ndependencies = [")[1].split("\n]")[0]
    declared = set(re.findall(r'^    "([\w-]+)', dependencies, re.MULTILINE))
    distributions = {"yaml": "pyyaml"}
    imported = {i.name.split(".")[0] for module in SOURCES for i in file_imports(module)}
    foreign = imported - set(sys.stdlib_module_names) - set(PACKAGES) - {"triton", "*"}
    assert {distributions.get(name, name) for name in foreign} <= declared


def test_einops_stays_off_the_path_of_attention() -> None:
    users = {m for m in SOURCES if any(i.name.split(".")[0] == "einops" for i in file_imports(m))}
    assert users <= {"streamattn.module", "streamattn.reference"}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("streamattn.reference", "from streamattn.kernels import forward", ["streamattn.kernels.forward"]),
        ("streamattn.reference", "from .kernels.forward import launch", ["streamattn.kernels.forward"]),
        ("streamattn.pattern", "import torch", ["torch"]),
        ("streamattn.ops", "def f():\n    from streamattn.kernels import forward", []),
        ("streamattn.ops", "class A:\n    import triton", ["triton"]),
        ("streamattn.ops", "import_module(f'streamattn.kernels.{name}')", ["streamattn.kernels.*"]),
        ("patches.gpt2", "if TYPE_CHECKING:\n    import transformers", []),
    ],
)
def test_the_reader_of_imports_sees_each_kind(module: str, source: str, expected: list[str]) -> None:
    """The tests above are only as good as this: relative, nested, dynamic and lazy imports are told apart."""
    assert [i.name for i in imports_of(module, source) if not i.lazy] == expected


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter from the repository's root; returns its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    """No CUDA context at import, so that a forked worker may initialise CUDA (pytorch/pytorch#77159)."""
    heavy = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import streamattn\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'transformers', 'triton', 'accelerate', 'datasets', 'patches', 'rich'}))\n"
        "print(torch.cuda.is_initialized())\n"
    )
    assert heavy.splitlines() == ["[]", "False"]


def test_patch_model_is_reached_lazily() -> None:
    assert (
        run_python(
            "import sys, streamattn\n"
            "assert 'patch_model' in streamattn.__all__\n"
            "assert 'patches' not in sys.modules\n"
            "from streamattn import patch_model, patch_report, unpatch_model\n"
            "import patches\n"
            "print(patch_model is patches.patch_model)\n"
        )
        == "True"
    )


def test_works_without_triton() -> None:
    """A CPU build of torch brings no Triton: forward, backward and the list of backends must not miss it."""
    assert (
        run_python(
            "import sys\n"
            "sys.modules['triton'] = None\n"  # importing it now raises ImportError
            "import torch, streamattn\n"
            "q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))\n"
            "for backend in ('auto', 'reference'):\n"
            "    streamattn.attention(q, k, v, causal=True, backend=backend).sum().backward()\n"
            "try:\n"
            "    streamattn.attention(q, k, v, backend='triton')\n"
            "except (TypeError, ValueError) as error:\n"
            "    print('triton' in str(error).lower())\n"
        )
        == "True"
    )


def readme_tree() -> set[str]:
    """Paths in README's tree: one file a line, two spaces a level, a folder's name ends with a slash."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## What is where")[1]
    folders: list[str] = []
    paths = set()
    for line in section.split("```text\n")[1].split("```")[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        paths.add("/".join([*folders, name]))
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return paths


def test_every_file_stands_in_the_readme() -> None:
    files = {str(path.relative_to(ROOT)) for path in SOURCES.values()}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml")}
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    missing = files - readme_tree()
    assert not missing, f"add to the tree in README.md: {sorted(missing)}"


def test_the_readme_lists_nothing_else() -> None:
    gone = {name for name in readme_tree() if not (ROOT / name).exists()}
    assert not gone, f"in README.md's tree, not on disk: {sorted(gone)}"


def test_another_module_named_patches_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "patches.py").write_text("", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", "import streamattn; streamattn.patch_model"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: `import patches` finds ")
    assert str(tmp_path / "patches.py") in last
