import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_kill_at_every_operation_leaves_old_or_new(tmp_path: Path) -> None:
    """See `crash_driver.py`: each id is old or new, opens and verifies, and no orphan survives a sweep."""
    driver = Path(__file__).parent / "crash_driver.py"
    run = subprocess.run([sys.executable, str(driver), str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 60
