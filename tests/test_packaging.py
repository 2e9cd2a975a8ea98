"""What goes into the wheel is what is in the folders, and importing the package is cheap."""

import subprocess
import sys
import tomllib
from pathlib import Path

import specgen

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAPPED = {"specgen.cli": "cli", "specgen.kernels": "kernels"}


def test_every_folder_with_code_is_listed_as_a_package() -> None:
    folders = {path.parent for name in ("specgen", *MAPPED.values()) for path in (ROOT / name).rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    by_folder = {folder: package for package, folder in MAPPED.items()}
    assert {by_folder.get(name, name) for name in found} == set(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"specgen": "specgen", **MAPPED}
    for folder in folders:
        assert (folder / "__init__.py").is_file(), folder


def test_all_assets_are_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["specgen"]
    matched = {path for pattern in patterns for path in (ROOT / "specgen").glob(pattern) if path.is_file()}
    assets = {path for path in (ROOT / "specgen" / "assets").rglob("*") if path.is_file()}
    assert assets <= matched
    assert (ROOT / "specgen" / "py.typed") in matched


def test_the_bundled_prompts_are_those_of_the_quickstart() -> None:
    shipped = (ROOT / "recipes" / "prompts" / "stories.jsonl").read_bytes()
    assert shipped == (ROOT / "specgen" / "assets" / "prompts" / "stories.jsonl").read_bytes()
    assert shipped.count(b"\n") == 64


def test_no_module_of_ours_has_a_top_level_name_of_somebody_else() -> None:
    # Hugging Face has a package called `kernels`; ours must never be found under that name.
    code = "import importlib.util as u; print([n for n in ('cli', 'kernels') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom specgen.cli.main import main\n"
        "codes = [main(['--help']), main(['run', '--help']), main(['bench', '--help']), main(['--version'])]\n"
        "heavy = {'torch', 'transformers', 'triton', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert codes == [0, 0, 0, 0] and not heavy, (codes, heavy)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"specgen {specgen.__version__}" in done.stdout
