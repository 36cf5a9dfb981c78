"""Where results are read and written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import onestem_lab
from onestem_lab.results import write

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


def test_a_command_names_no_folders_of_a_machine(tmp_path: Path) -> None:
    command = "python -m x --work /tmp/a/work --log=/root/b/log.txt --set a=1,b=2 -- models/m"
    write(tmp_path / "r.json", {"command": command, "ratio": 2})
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["command"] == "python -m x --work work --log=log.txt --set a=1,b=2 -- models/m"
    assert list(found) == ["command", "date", "commit", "ratio"]
