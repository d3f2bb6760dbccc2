"""The notebook of examples/, run by Jupyter's kernel in an empty folder."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/train.ipynb"


def test_the_notebook_trains_and_shows_curve_film_and_metrics(tmp_path, monkeypatch):
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        cell.source = re.sub(r'"max_minutes": [0-9.]+', '"max_updates": 300', cell.source)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=folder).execute()
    train, evaluate, curve, write, train_own, evaluate_own = (
        cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    )
    for outputs in (train, train_own):
        (line,) = (each.data["text/plain"] for each in outputs if each.output_type == "display_data")
        assert "updates 30" in line
        assert not any(" | updates " in each.text for each in outputs if each.output_type == "stream")
    assert any("<video" in each.data.get("text/html", "") for each in evaluate if "data" in each)
    assert any("image/png" in each.data for each in curve if "data" in each)
    assert (tmp_path / "my_env.py").exists()
    assert write
    assert "success: " in evaluate_own[0].text
