"""`apex keys` makes what a cluster needs, readable by nobody else, and never over something; a folder that lies open,
or is no folder of keys, is refused without a word of what is in it."""

from __future__ import annotations

import resource

import pytest

from apex.errors import ConfigError
from apex.transport.curve.command import bundle_for, main, new_folder
from apex.transport.curve.key_store import ENDPOINTS, PINNED, Keys, lists_for, read_keys
from apex.transport.sockets import new_key_pair, public_key
from apex.types import Role


@pytest.fixture
def folder(tmp_path):
    new_folder(tmp_path / "keys")
    return tmp_path / "keys"


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}


def test_a_new_folder_has_a_key_of_every_role_that_nobody_else_can_read(folder):
    found = modes(folder)
    assert found.pop("keys") == 0o700
    assert set(found) == {f"{role}.{half}" for role in Role for half in ("secret", "public")}
    assert set(found.values()) == {0o600}
    secrets = {Keys(folder, role).secret for role in Role}
    assert len(secrets) == len(Role)
    for role in Role:
        assert list(Keys(folder, role).believed(role)) == [public_key(Keys(folder, role).secret)]


def test_nothing_is_made_over_what_is_there(folder, tmp_path, capsys):
    before = {path: path.read_text() for path in folder.iterdir()}
    assert main(["new", str(folder)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["bundle", str(folder), "--role", "actor", str(tmp_path / "there")]) == 2
    assert {path: path.read_text() for path in folder.iterdir()} == before


@pytest.mark.parametrize("role", Role)
def test_a_bundle_has_what_its_role_needs_and_one_secret_only(folder, tmp_path, role):
    out = tmp_path / "out"
    assert main(["bundle", str(folder), "--role", role, str(out)]) == 0
    found = modes(out)
    assert found.pop("out") == 0o700
    assert set(found) == {f"{role}.secret", *(f"{other}.public" for other in lists_for(role))}
    assert set(found.values()) == {0o600}
    keys = Keys(out, role)
    for door, (bound_by, open_to) in ENDPOINTS.items():
        if role in open_to:
            assert keys.server_key(door) == public_key(Keys(folder, bound_by).secret)
        if role == bound_by:
            assert all(keys.believed(other) for other in open_to)


def test_a_named_bundle_has_a_key_of_its_own_that_can_be_revoked_alone(folder, tmp_path):
    for name in ("host-1", "host-2"):
        bundle_for(folder, "actor", tmp_path / name, name)
    own = {public_key(Keys(tmp_path / name, "actor").secret): name for name in ("host-1", "host-2")}
    believed = Keys(folder, "replay").believed("actor")
    assert sorted(believed.values()) == ["actor", "host-1", "host-2"]
    assert {key: believed[key] for key in own} == own
    with pytest.raises(ConfigError, match="has one of this name"):
        bundle_for(folder, "actor", tmp_path / "again", "host-1")


@pytest.mark.parametrize("role", PINNED)
def test_who_is_pinned_has_one_key(folder, tmp_path, role):
    with pytest.raises(ConfigError, match="--name"):
        bundle_for(folder, role, tmp_path / "out", "second")
    public = folder / f"{role}.public"
    public.write_text(2 * public.read_text() + f"{new_key_pair().public.hex()} second\n")
    with pytest.raises(ConfigError, match=f"{role}.public must list one key"):
        Keys(folder, "actor")


def test_lines_that_are_empty_or_begin_with_a_hash_are_no_keys(folder):
    public = folder / "actor.public"
    (digits, name) = public.read_text().split()
    public.write_text(f"# {new_key_pair().public.hex()} was taken out\n\n   {digits}   the only one \n")
    assert Keys(folder, "replay").believed("actor") == {bytes.fromhex(digits): "the only one"}
    assert name == "actor"


def spoil(folder, how):
    secret = folder / "actor.secret"
    {
        "group may read": lambda: secret.chmod(0o640),
        "others may read": lambda: secret.chmod(0o604),
        "folder may be written": lambda: folder.chmod(0o777),
        "list may be written": lambda: (folder / "replay.public").chmod(0o666),
        "no secret": secret.unlink,
        "cut short": lambda: secret.write_text(secret.read_text()[:50]),
        "not text": lambda: secret.write_bytes(b"\xff\xfe" * 32),
        "spaces inside": lambda: secret.write_text("  ".join(secret.read_text()[i : i + 2] for i in range(0, 62, 2))),
        "no list": (folder / "learner.public").unlink,
        "list of another thing": lambda: (folder / "replay.public").write_text("ssh-rsa AAAA me\n"),
    }[how]()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("group may read", r"actor\.secret can be read by others \(mode 0640\): chmod 600"),
        ("others may read", r"actor\.secret can be read by others \(mode 0604\)"),
        ("folder may be written", r"keys can be written by others \(mode 0777\): chmod 755"),
        ("list may be written", r"replay\.public can be written by others"),
        ("no secret", "apex keys bundle --role actor"),
        ("cut short", r"actor\.secret: a key is 64 hexadecimal digits"),
        ("not text", r"actor\.secret"),
        ("spaces inside", r"actor\.secret: a key is 64"),
        ("no list", r"learner\.public"),
        ("list of another thing", r"replay\.public, line 1: a key is 64"),
    ],
)
def test_refuses_a_folder_that_lies_open_or_is_none_and_tells_no_secret(folder, how, words):
    text = (folder / "actor.secret").read_text().strip()
    spoil(folder, how)
    with pytest.raises(ConfigError, match=words) as refused:
        Keys(folder, "actor")
    assert text[:8] not in str(refused.value)
    assert "AAAA" not in str(refused.value)


def test_without_a_folder_there_are_no_keys_and_a_folder_that_is_not_there_is_refused(tmp_path):
    assert read_keys("", "actor") is None
    with pytest.raises(ConfigError, match="apex keys new"):
        read_keys(str(tmp_path / "nowhere"), "actor")


def test_no_secret_is_shown(folder):
    keys, pair = Keys(folder, "actor"), new_key_pair()
    for shown in (repr(keys), str(keys), repr(pair), str(pair), f"{pair}"):
        assert keys.secret.hex()[:8] not in shown
        assert pair.secret.hex()[:8] not in shown
        assert repr(pair.secret) not in shown


def test_help_says_what_goes_where(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for word in (*Role, "bundle", "revoke", "scp"):
        assert word in said


def test_who_has_read_a_secret_leaves_no_core_with_it(folder):
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert read_keys("", "actor") is None
        assert resource.getrlimit(resource.RLIMIT_CORE) == (before[1], before[1])  # Without keys it may be wanted.
        read_keys(str(folder), "actor")
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
