"""Guards over the project itself: which module may know which, imports, documents."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "bittrain_tf"


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def imported_by(path, top_level_only=False):
    """Full names of everything a file imports."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def reaches(path, target):
    return any(name == target or name.startswith(target + ".") for name in imported_by(path))


BELOW_LAYERS = ("native", "codecs", "backward", "recipes", "ledger")
ABOVE_RECIPES = ("layers", "rewrite", "analysis", "compression", "investigation", "cli")
ARROWS = {
    # Which part of the package: what it must not know.
    "planning.py": (*BELOW_LAYERS, *ABOVE_RECIPES),
    "native": ("codecs", "backward", "recipes", *ABOVE_RECIPES),
    "codecs": ("backward", "recipes", *ABOVE_RECIPES),
    "backward": ("recipes", *ABOVE_RECIPES),
    "recipes.py": ABOVE_RECIPES,
    "layers": ("rewrite", "analysis", "compression", "investigation", "cli"),
    "rewrite.py": ("analysis", "compression", "investigation", "cli"),
    "analysis": ("compression", "investigation", "cli"),
    "compression.py": ("investigation", "cli"),
    "investigation": ("compression", "cli"),
    "private.py": ("codecs", "backward", "recipes", *ABOVE_RECIPES),
}


@pytest.mark.parametrize("part", ARROWS)
def test_knows_only_what_is_below_it(part):
    files = [path for path in modules() if path.relative_to(PACKAGE).parts[0] == part]
    assert files, f"no module in {part}"
    offences = [
        f"{path.relative_to(ROOT)} imports {forbidden}"
        for path in files
        for forbidden in ARROWS[part]
        if reaches(path, f"bittrain_tf.{forbidden}")
    ]
    assert not offences


def test_never_imports_tflite_tools():
    assert not [str(path) for path in modules() if reaches(path, "tflite_tools")]


def test_private_symbols_in_one_file_only():
    pattern = re.compile(r"keras\.src|tensorflow\.python|tf\.__internal__")
    offences = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*modules(), *sorted((ROOT / "tflite_tools").rglob("*.py")))
        if path != PACKAGE / "private.py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not offences


HEAVY = ("rich", "scipy", "matplotlib", "sklearn", "hypothesis", "pytest", "tflite_tools")


def test_import_brings_in_no_more_than_keras_does():
    code = f"""
import sys, keras, tensorflow
before = set(sys.modules)
import bittrain_tf
print(sorted(set({HEAVY}) & (set(sys.modules) - before)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_heavy_packages_are_imported_only_where_they_are_used():
    # Keras imports some of these itself where it finds them, which hides it from the test above.
    offences = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules()
        for name in imported_by(path, top_level_only=True)
        if name.split(".")[0] in HEAVY
    ]
    assert not [offence for offence in offences if "cli.py" not in offence]


def test_public_names_exist():
    import bittrain_tf

    assert all(hasattr(bittrain_tf, name) for name in bittrain_tf.__all__)


def test_readme_starts_with_demo_and_test():
    commands = re.findall(r"^\$? ?((?:make|bittrain|python|pip) .*)$", read("README.md"), re.M)
    assert [command.split("#")[0].strip() for command in commands[:2]] == ["make demo", "make test"]


def test_readme_first_screen():
    first_screen = "\n".join(read("README.md").splitlines()[:45])
    for expected in ("bt.compress(model)", "<!-- bench:start -->", "<!-- bench:end -->"):
        assert expected in first_screen
    assert "tflite_tools.export" in first_screen


def test_version_is_in_the_changelog():
    import bittrain_tf

    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.M)
    assert versions[0] == bittrain_tf.__version__


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    named = set(re.findall(r"make ([a-z-]+)", read("README.md")))
    assert named <= targets


def test_pyproject_and_makefile_ask_for_the_same_python():
    (minor,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', read("pyproject.toml"), re.M)
    assert f"(3, {minor})" in read("Makefile")


def test_license_is_complete():
    text = read("LICENSE")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/architecture.md",
        "docs/investigation.md",
        "docs/on-device.md",
        "CHANGELOG.md",
    ],
)
def test_links_lead_somewhere(document):
    base = (ROOT / document).parent
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", read(document))
    assert not [target for target in targets if not (base / target).exists()]


@pytest.mark.parametrize(
    ("document", "heading"),
    [
        ("architecture", "A new layer"),
        ("architecture", "A new codec"),
        ("architecture", "A new backward rule"),
        ("on-device", "A new rule"),
    ],
)
def test_snippets_of_the_documents_run(document, heading):
    section = read(f"docs/{document}.md").split(f"### {heading}\n")[1]
    section = re.split(r"\n##", section)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    # In a process of its own: a registered layer or codec stays registered.
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize(
    "module",
    [
        "models",
        "codec",
        "on_device",
        "peers.run",
        "peers.child",
        "peers.__main__",
        "accuracy.child",
        "accuracy.__main__",
    ],
)
def test_benchmarks_can_be_imported(module):
    """They take hours, so that no test runs them; what they import moves all the same."""
    command = [sys.executable, "-c", f"import benchmarks.{module}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def read(name):
    return (ROOT / name).read_text()
