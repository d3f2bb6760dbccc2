"""The completion script completes commands, options with settings, presets and runs, in a real bash."""

import shutil
import subprocess

import pytest

from apex.completion import SHELLS, main, make_script


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "apex.bash"
    path.write_text(make_script())
    return path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["ev"], "evaluate evaluator"),
        (["train", "--preset", "cart"], "cartpole"),
        (["train", "--learner.batch"], "--learner.batch-size"),
        (["evaluate", "--vid"], "--video --video-steps"),
        (["evaluate", "my-"], "my-run"),
        (["plot", "my-run", "spa"], r"spa\ ce"),
        (["evaluate", "'$'"], r"\$\(touch\ planted\)"),
        (["status", "--learner.batch"], ""),
    ],
)
def test_the_script_completes(script, tmp_path, typed, completed):
    for name in ("my-run", "spa ce", "$(touch planted)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    command = (
        f"source {script}; COMP_WORDS=(apex {' '.join(typed)}); COMP_CWORD={len(typed)}; _apex; echo ${{COMPREPLY[*]}}"
    )
    answer = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (answer.stdout.strip(), answer.stderr) == (completed, "")
    assert not (tmp_path / "planted").exists()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "completed"), [(["ev"], "evaluate evaluator"), (["train", "--preset", "cart"], "cartpole")]
)
def test_the_script_completes_in_zsh(tmp_path, typed, completed):
    """As bashcompinit calls it, which itself chooses from what `compgen -W` returns. There is no run."""
    path = tmp_path / "apex.zsh"
    path.write_text(SHELLS["zsh"] + make_script())
    words = f"COMP_WORDS=(apex {' '.join(typed)}); COMP_CWORD={len(typed)}"
    command = f"source {path}; emulate sh; setopt kshglob noshglob; {words}; _apex; echo ${{COMPREPLY[*]}}"
    answer = subprocess.run(["zsh", "-fc", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert set(completed.split()) <= set(answer.stdout.split())
    assert answer.stderr == ""


def test_an_unknown_shell_is_refused(capsys):
    assert main(["fish"]) == 2
    assert "fish" in capsys.readouterr().err
