"""The directory is the architecture: what stands where, and that imports point down."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALGORITHMS = ["r3", "attnrl"]
# from the top to the bottom; a module imports only modules of lines below its own
LAYERS = """
attnrl
r3
runtime.run
runtime.memory runtime.optimizer
plot
eval
scores.answers scores.tables verify rollout runtime.checkpoint runtime.signals
runtime.sharding runtime.stepattention
runtime.model sampling.decoder grader.worker replay runtime.bufferfile runtime.carried
grader.equality
sampling.kvcache sampling.gumbel grader.latex runtime.problems runtime.config runtime.files runtime.ranks
entropy runtime.attention
runtime.errors
"""


def imports(path: Path) -> set[str]:
    """Modules of this project that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_imports_point_down_and_every_module_has_its_place():
    level = {name: i for i, line in enumerate(LAYERS.split("\n")) for name in line.split()}
    folders = ("grader", "sampling", "runtime", "scores")
    files = [*ROOT.glob("*.py"), *(p for d in folders for p in (ROOT / d).glob("*.py"))]
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files if p.name != "__init__.py"}
    assert set(modules) == set(level)
    for name, path in modules.items():
        upward = {other for other in imports(path) & set(level) if level[other] <= level[name]}
        assert not upward, f"{name} imports {upward}"


def test_the_root_holds_what_the_paper_discusses_and_three_doors():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in listed}
    assert {n for n in top if n.endswith(".py")} == {
        f"{n}.py" for n in [*ALGORITHMS, "rollout", "entropy", "replay", "verify", "eval", "plot"]
    }
    folders = {name.split("/")[0] for name in listed if "/" in name}
    expected = ".ci bench configs data figures grader runtime sampling scores tests"
    assert folders == set(expected.split())
