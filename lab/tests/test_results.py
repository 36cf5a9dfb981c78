"""Where results are read and written."""

import shutil
import subprocess
import sys
from pathlib import Path

import onestem_lab

SCRIPT = "from onestem_lab import results; print(results.__file__); print(results.RESULTS)"


def test_an_installed_copy_has_the_results_of_the_clone_it_runs_in(tmp_path: Path) -> None:
    installed = tmp_path / "lib" / "python3" / "site-packages"
    shutil.copytree(Path(onestem_lab.__file__).parent, installed / "onestem_lab")
    clone = tmp_path / "clone"
    clone.mkdir()
    script = f"import sys; sys.path.insert(0, {str(installed)!r}); {SCRIPT}"
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=clone, capture_output=True, text=True, check=True
    )
    file, folder = map(Path, ran.stdout.split())
    assert file.is_relative_to(installed)
    assert folder == clone / "lab" / "results"
