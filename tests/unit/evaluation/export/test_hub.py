"""`apex export --push-to-hub`: one commit on a local server in the place of the Hub, and clear refusals."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.policy_runs import make_run

from apex.evaluation.export.command import main

hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub, which dev has")

TOKEN = "hf_secret"


class Server(ThreadingHTTPServer):
    """Keeps what was uploaded. `status`: of every answer; `private`: visibility of the model."""

    def __init__(self, status=200, private=True, files=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.private, self.files = status, private, files
        self.requests, self.commits = [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        answer = {"url": f"{self.server.url}/me/pole", "name": "me/pole"}
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        if "/commit/" in self.path:
            self.server.commits.append([json.loads(line) for line in body.splitlines()])
            answer = {
                "success": True,
                "commitOid": "a" * 40,
                "commitUrl": f"{self.server.url}/me/pole/commit/{'a' * 40}",
            }
        self.answer(answer)

    def do_GET(self):
        files = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in self.server.files]
        model = {"id": "me/pole", "private": self.server.private, "siblings": [{"rfilename": f["path"]} for f in files]}
        self.answer(files if "/tree/" in self.path else model)

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts a server with the given options in the place of the Hub."""
    servers = []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))

    def start(**options):
        servers.append(Server(**options))
        threading.Thread(target=servers[0].serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", servers[0].url)
        return servers[0]

    yield start
    hub.close_session()
    for server in servers:
        server.shutdown()
        server.server_close()


def push(tmp_path, *options):
    run = make_run(tmp_path, best=70)
    return main([str(run.path), "--push-to-hub", "me/pole", *options]), run.path / "export"


def test_the_files_are_uploaded_in_one_commit(serve, tmp_path, capsys):
    server = serve(files=["model.onnx", "model.safetensors", "notes.txt"])
    status, folder = push(tmp_path, "--private")
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.splitlines()[-1] == f"{server.url}/me/pole/commit/{'a' * 40}"
    (commit,) = server.commits
    sent = {each["value"]["path"]: each["value"] for each in commit if each["key"] == "file"}
    assert set(sent) == {"README.md", "config.json", "model.safetensors"}
    assert all(base64.b64decode(each["content"]) == (folder / path).read_bytes() for path, each in sent.items())
    assert [each["value"]["path"] for each in commit if each["key"] == "deletedFile"] == ["model.onnx"]
    created = json.loads(next(body for path, _, body in server.requests if path == "/api/repos/create"))
    assert (created["organization"], created["name"]) == ("me", "pole")
    assert created.get("visibility") == "private" or created.get("private") is True
    assert {token for _, token, _ in server.requests} == {f"Bearer {TOKEN}"}
    assert TOKEN not in out + err


def test_the_card_has_the_score_in_the_form_of_the_hub(tmp_path):
    run = make_run(tmp_path, best=70)
    assert main([str(run.path)]) == 0
    data = hub.ModelCard((run.path / "export/README.md").read_text()).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("pytorch", "reinforcement-learning", "mit")
    assert {"reinforcement-learning", "CartPole-v1"} <= set(data.tags)
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_name) == ("reinforcement-learning", "CartPole-v1")
    assert (result.metric_type, result.metric_value) == ("mean_reward", 9.0)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "accept the token"),
        (403, "write to me/pole"),
        (404, "write to me/pole"),
        (418, "status 418"),
    ],
)
def test_a_refusal_of_the_hub_is_named(serve, tmp_path, capsys, status, words):
    serve(status=status)
    assert push(tmp_path)[0] == 2
    error = capsys.readouterr().err
    assert words in error
    assert f"files are in {tmp_path}" in error
    assert TOKEN not in error
    assert error.count("\n") == 1


def test_an_unreachable_hub_is_named(serve, tmp_path, capsys, monkeypatch):
    serve()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    assert push(tmp_path)[0] == 2
    assert "check the network" in capsys.readouterr().err


def test_a_public_model_is_not_used_for_private_weights(serve, tmp_path, capsys):
    server = serve(private=False)
    assert push(tmp_path, "--private")[0] == 2
    assert "is public" in capsys.readouterr().err
    assert server.commits == []


def test_mistakes_are_refused_before_the_export(serve, tmp_path, capsys, monkeypatch):
    serve()
    run = make_run(tmp_path, best=70)
    for options, words in [
        (["--push-to-hub", "pole"], "USER/NAME, got 'pole'"),
        (["--private"], "--private needs --push-to-hub"),
    ]:
        assert main([str(run.path), *options]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    assert main([str(run.path), "--push-to-hub", "me/pole"]) == 2
    assert "no token" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main([str(run.path), "--push-to-hub", "me/pole"]) == 2
    assert "-m pip install huggingface_hub" in capsys.readouterr().err
    assert not (run.path / "export").exists()


def test_the_example_of_the_page_runs(serve, tmp_path):
    server, page = serve(), (Path(__file__).parents[4] / "docs/guide/hub.md").read_text()
    command = re.search(r"^apex (.+)$", page, re.MULTILINE)[1].split()
    make_run(tmp_path / "runs", name="RUN", best=70)
    home = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    command = [part for part in command if part not in ("--onnx", "--episodes", "30")]
    subprocess.run(
        [sys.executable, "-m", "apex", *command], cwd=tmp_path, env={**os.environ, **home}, check=True, timeout=100
    )
    assert len(server.commits) == 1
