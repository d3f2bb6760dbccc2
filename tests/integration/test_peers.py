"""Peers in JavaScript, written from docs/protocol.md, with a server of tables and with a run."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.programs import TINY, offset, programs
from support.waiting import until

from apex.algorithms.parameters import describe, flatten_parameters
from apex.config import NetworkConfig
from apex.dqn.networks import make_network, q_values
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.schema import Schema
from apexreplay import TableSettings, serve, table

PEERS = Path(__file__).parents[1] / "peers"
DEADLINE = 120.0
__all__ = ["offset", "programs"]  # fixtures
STEPS = table(
    "steps",
    {"image": ("uint8", (8, 8), "lz4"), "x": ("float32", (3,)), "number": "int64"},
    values={"score": "int32", "mark": "float64"},
    kept=("mark",),
    description="Größe",  # Its hash needs JSON's escapes.
)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """A folder with the peers and the package zeromq of npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed")
    folder = tmp_path_factory.mktemp("peers")
    for path in PEERS.iterdir():
        shutil.copy(path, folder)
    command = [
        "npm",
        "install",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--fetch-retries=0",
        "--fetch-timeout=20000",
    ]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, timeout=300.0, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install zeromq: {error}")
    return folder


def run(folder, *arguments):
    command = ["node", *map(str, arguments)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("path", sorted(path.name for path in PEERS.glob("*.js")))
def test_a_peer_has_at_most_100_lines(path):
    assert (PEERS / path).read_text().count("\n") <= 100


def test_a_writer_and_a_sampler_in_javascript_speak_with_the_server(peers):
    settings = TableSettings(table=STEPS, capacity=1_000, segment_length=50, priority_exponent=1.0)
    with serve([settings]) as server, server.client() as client:
        run(peers, "writer.js", "127.0.0.1", server.port, "steps", 330)
        with client.sampler("steps", 1_000) as sampler:
            batch = sampler.sample(DEADLINE)
        number = batch["number"]
        assert batch.num_items == 330
        np.testing.assert_array_equal(batch.keys, number)  # Each was stored once, in order.
        np.testing.assert_array_equal(batch["image"].reshape(-1, 64), (number[:, None] + np.arange(64)) % 251)
        np.testing.assert_array_equal(batch["x"], np.stack([number / 2, -number, np.full(1_000, 0.25)], axis=1))
        np.testing.assert_array_equal(batch["score"], -number)
        np.testing.assert_allclose(batch.probabilities, (1 + number % 5) / (66 * 15))

        lines = run(peers, "sampler.js", "127.0.0.1", server.port, "steps", 64, 30).splitlines()
        assert len(lines) == 30
        drawn = [item for line in lines for item in json.loads(line)["items"]]
        assert len(drawn) == 30 * 64
        for item in drawn:
            (number,) = item["number"]
            assert item["key"] == [number]
            assert item["image"] == [(number + at) % 251 for at in range(64)]
            assert item["x"] == [number / 2, -number, 0.25]
            assert item["score"] == [-number]

        def doubled():
            """Whether the priorities of drawn items have arrived."""
            with client.sampler("steps", 1_000) as sampler:
                batch = sampler.sample(DEADLINE)
            share = batch.probabilities / (1 + batch["number"] % 5)
            return len(np.unique(share.round(9))) == 2 and share.max() == pytest.approx(2 * share.min())

        until(doubled, "priorities")
        status = client.status()
        assert status.tables["steps"].replay.refusals == {}
        assert status.refusals == status.refused_connections == {}


def test_an_actor_in_javascript_is_the_only_one_of_a_run(peers, programs):
    """Its transitions train, its games are counted, and it acts with newer parameters."""
    options = ["--head", "--run.no-tensorboard", "--evaluator.final-seconds", "0", "--max-updates", "300"]
    programs.start("train", "train", *TINY, *programs.offset, *options)
    until(lambda: programs.observer() is not None, "keys")
    (keys,) = programs.folder.glob("runs/*/keys")
    port = programs.endpoint.rpartition(":")[2]
    told = json.loads(run(peers, "actor.js", "127.0.0.1", port, 4, keys))
    assert programs.wait("train") == 0, programs.output("train")
    assert told["streams"] == 4
    assert 0 < told["version"] <= 300
    (folder,) = map(RunFolder.open, programs.folder.glob("runs/*"))
    assert (folder.end.kind, folder.end.value) == ("updates", 300)
    scores = [row["scalars"] for row in read_curve(folder.curves / "actor.jsonl")]
    assert any(5 < row.get("actors/mean_score", 0) <= 500 for row in scores), scores


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
@pytest.mark.parametrize("dueling", [True, False])
def test_the_network_in_javascript_computes_the_q_values(dueling):
    """From the names, shapes and values that the learner publishes."""
    schema = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=3, n_step=1, codec="raw")
    network = make_network(NetworkConfig(hidden=5, body_hidden=6, dueling=dueling), schema, seed=1)
    observation = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
    facts = [describe(network), flatten_parameters(network).tolist(), observation.tolist()]
    script = """
      import { Network } from "./network.js";
      const [parameters, values, observation] = JSON.parse(process.argv[1]);
      const network = new Network(parameters);
      network.load({ number: 7n, body: Buffer.from(Float32Array.from(values).buffer) });
      console.log(JSON.stringify([...network.q(observation)]));
    """
    printed = run(PEERS, "--input-type=module", "--eval", script, json.dumps(facts))
    np.testing.assert_allclose(json.loads(printed), q_values(network, observation[None, None])[0], rtol=1e-5, atol=1e-6)
