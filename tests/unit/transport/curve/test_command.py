"""`apex keys` creates private keys and never overwrites any. Unsafe or invalid key folders are refused without quoting
them."""

import errno
import os
import resource

import pytest

from apex.transport.curve.command import bundle_for, main, new_folder
from apex.transport.curve.key_store import ENDPOINTS, PINNED, Keys, certificate, lists_for, public_digits, read_keys
from apex.types import Role
from apexreplay.errors import UsageError
from apexreplay.transport.curve.key_store import create_pair


@pytest.fixture
def folder(tmp_path):
    new_folder(tmp_path / "keys")
    return tmp_path / "keys"


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}


def test_a_new_folder_has_a_private_key_for_every_role(folder):
    found = modes(folder)
    assert found.pop("keys") == 0o700
    assert set(found) == {f"{role}.{half}" for role in Role for half in ("key", "key_secret")}
    assert set(found.values()) == {0o600}
    secrets = {Keys(folder, role).secret for role in Role}
    assert len(secrets) == len(Role)
    for role in Role:
        assert Keys(folder, role).accepted(role) == {Keys(folder, role).public: f"{role}.key"}


def test_existing_folders_are_not_overwritten(folder, tmp_path, capsys):
    before = {path: path.read_text() for path in folder.iterdir()}
    assert main(["new", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["bundle", str(folder), "--role", "actor", str(tmp_path / "there")]) == 2
    assert {path: path.read_text() for path in folder.iterdir()} == before


@pytest.mark.parametrize("role", Role)
def test_a_bundle_has_the_keys_of_its_role_and_one_secret(folder, tmp_path, role):
    out = tmp_path / "out"
    assert main(["bundle", str(folder), "--role", role, str(out)]) == 0
    found = modes(out)
    assert found.pop("out") == 0o700
    assert set(found) == {f"{role}.key_secret", *(f"{other}.key" for other in lists_for(role))}
    assert set(found.values()) == {0o600}
    keys = Keys(out, role)
    for socket_name, (bound_by, open_to) in ENDPOINTS.items():
        if role in open_to:
            assert keys.server_key(socket_name) == Keys(folder, bound_by).public
        if role == bound_by:
            assert all(keys.accepted(other) for other in open_to)


def test_a_named_bundle_has_a_key_that_can_be_revoked_separately(folder, tmp_path):
    for name in ("host-1", "actor@host-2.org"):
        bundle_for(folder, "actor", tmp_path / name, name)
        assert "actor.key" not in modes(tmp_path / name)
    own = {Keys(tmp_path / name, "actor").public: f"actor.{name}.key" for name in ("host-1", "actor@host-2.org")}
    accepted = Keys(folder, "replay").accepted("actor")
    assert sorted(accepted.values()) == ["actor.actor@host-2.org.key", "actor.host-1.key", "actor.key"]
    assert {key: accepted[key] for key in own} == own
    assert set(modes(folder).values()) == {0o600, 0o700}
    with pytest.raises(UsageError, match=r"actor\.host-1\.key"):
        bundle_for(folder, "actor", tmp_path / "again", "host-1")
    (folder / "actor.host-1.key").unlink()
    assert len(Keys(folder, "replay").accepted("actor")) == 2


def test_keys_that_cannot_be_created_leave_no_folder(folder, tmp_path, capsys, monkeypatch):
    def fail(*where):
        raise UsageError("read-only")

    monkeypatch.setattr("apex.transport.curve.command.write_private", fail)
    assert main(["bundle", str(folder), "--role", "actor", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_of_keys_is_whole_or_missing(folder, tmp_path, capsys, monkeypatch):
    def fail(*where):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "key"))

    monkeypatch.setattr("apex.transport.curve.command.create_pair", fail)
    monkeypatch.setattr("apex.transport.curve.command.write_private", fail)
    assert main(["new", str(tmp_path / "more")]) == 1
    assert main(["bundle", str(folder), "--role", "actor", str(tmp_path / "out")]) == 1
    for line in capsys.readouterr().err.splitlines():
        assert line == f"apex keys: cannot use {tmp_path}/key: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys"]


@pytest.mark.parametrize("name", ["../x", "two words", "line\nline"])
def test_invalid_names_are_refused(folder, tmp_path, name):
    with pytest.raises(UsageError) as error:
        bundle_for(folder, "actor", tmp_path / "out", name)
    assert "--name" in error.value.problem
    assert repr(name) in error.value.problem


@pytest.mark.parametrize("role", PINNED)
def test_learner_and_replay_have_only_one_key(folder, tmp_path, role):
    with pytest.raises(UsageError, match="--name"):
        bundle_for(folder, role, tmp_path / "out", "second")
    new_folder(tmp_path / "other")
    (folder / f"{role}.second.key").write_text((tmp_path / "other" / f"{role}.key").read_text())
    with pytest.raises(UsageError, match=rf"{role}.*\b2\b"):
        Keys(folder, "actor")


def test_public_keys_survive_conversion_to_digits(tmp_path):
    create_pair(tmp_path, "actor")
    text = certificate(public_digits(tmp_path, "actor"))
    assert text.splitlines()[-1] in (tmp_path / "actor.key").read_text()


def spoil(folder, how):
    secret = folder / "actor.key_secret"
    {
        "group may read": lambda: secret.chmod(0o640),
        "others may read": lambda: secret.chmod(0o604),
        "folder may be written": lambda: folder.chmod(0o777),
        "list may be written": lambda: (folder / "replay.key").chmod(0o666),
        "no secret": secret.unlink,
        "cut short": lambda: secret.write_text(secret.read_text()[:-10]),
        "not text": lambda: secret.write_bytes(b"\xff\xfe" * 32),
        "not Z85": lambda: secret.write_text(certificate("11" * 32).replace('key = "', 'key = "~')),
        "public only": lambda: secret.write_text((folder / "actor.key").read_text()),
        "no public key": (folder / "learner.key").unlink,
        "old format": lambda: (folder / "actor.secret").write_text("00" * 32),
        "ssh key": lambda: (folder / "replay.key").write_text("ssh-rsa AAAA me\n"),
    }[how]()


@pytest.mark.parametrize(
    ("how", "file", "detail", "remedy"),
    [
        ("group may read", "actor.key_secret", "0640", "chmod 600"),
        ("others may read", "actor.key_secret", "0604", "chmod 600"),
        ("folder may be written", "keys", "0777", "chmod 755"),
        ("list may be written", "replay.key", "0666", "chmod 644"),
        ("no secret", "actor.key_secret", "No such file", "apex keys bundle"),
        ("cut short", "actor.key_secret", "", "apex keys"),
        ("not text", "actor.key_secret", "", "apex keys"),
        ("not Z85", "actor.key_secret", "", "apex keys"),
        ("public only", "actor.key_secret", "", "keys of the actor"),
        ("no public key", "keys", "learner", "apex keys bundle"),
        ("ssh key", "replay.key", "", "apex keys"),
        ("old format", "keys", "older", "apex keys bundle"),
    ],
)
def test_unsafe_and_invalid_key_folders_are_refused(folder, how, file, detail, remedy):
    secret = Keys(folder, "actor").secret.decode()
    spoil(folder, how)
    with pytest.raises(UsageError) as error:
        Keys(folder, "actor")
    assert str(folder if file == "keys" else folder / file) in error.value.problem
    assert detail in error.value.problem
    assert remedy in error.value.remedy
    assert secret[:8] not in str(error.value)
    assert "AAAA" not in str(error.value)


def test_a_missing_key_folder_is_refused_but_keys_are_optional(tmp_path):
    assert read_keys("", "actor") is None
    for role, remedy in (("learner", "apex keys new"), ("actor", "apex keys bundle")):
        with pytest.raises(UsageError) as error:
            read_keys(str(tmp_path / "nowhere"), role)
        assert "nowhere" in error.value.problem
        assert remedy in error.value.remedy


def test_secrets_are_not_shown(folder):
    keys = Keys(folder, "actor")
    for text in (repr(keys), str(keys), f"{keys}"):
        assert keys.secret.decode()[:8] not in text


def test_help_names_every_role_and_step(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in (*Role, "bundle", "revoke", "scp"))


def test_reading_a_secret_disables_core_files(folder):
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        assert read_keys("", "actor") is None
        assert resource.getrlimit(resource.RLIMIT_CORE) == (before[1], before[1])  # unchanged without keys
        read_keys(str(folder), "actor")
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
