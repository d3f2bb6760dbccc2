"""`apex keys` makes what a cluster needs, readable by nobody else, and never over something; a folder that lies open,
or is no folder of keys, is refused without a word of what is in it."""

from __future__ import annotations

import resource

import pytest

from apex.errors import UsageError
from apex.transport.curve.command import bundle_for, main, new_folder
from apex.transport.curve.key_store import (
    ENDPOINTS,
    PINNED,
    Keys,
    certificate,
    create_pair,
    lists_for,
    public_digits,
    read_keys,
)
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
    assert set(found) == {f"{role}.{half}" for role in Role for half in ("key", "key_secret")}
    assert set(found.values()) == {0o600}
    secrets = {Keys(folder, role).secret for role in Role}
    assert len(secrets) == len(Role)
    for role in Role:
        assert Keys(folder, role).accepted(role) == {Keys(folder, role).public: f"{role}.key"}


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
    assert set(found) == {f"{role}.key_secret", *(f"{other}.key" for other in lists_for(role))}
    assert set(found.values()) == {0o600}
    keys = Keys(out, role)
    for socket_name, (bound_by, open_to) in ENDPOINTS.items():
        if role in open_to:
            assert keys.server_key(socket_name) == Keys(folder, bound_by).public
        if role == bound_by:
            assert all(keys.accepted(other) for other in open_to)


def test_a_named_bundle_has_a_key_of_its_own_that_can_be_revoked_alone(folder, tmp_path):
    for name in ("host-1", "actor@host-2.org"):
        bundle_for(folder, "actor", tmp_path / name, name)
        assert "actor.key" not in modes(tmp_path / name)
    own = {Keys(tmp_path / name, "actor").public: f"actor.{name}.key" for name in ("host-1", "actor@host-2.org")}
    accepted = Keys(folder, "replay").accepted("actor")
    assert sorted(accepted.values()) == ["actor.actor@host-2.org.key", "actor.host-1.key", "actor.key"]
    assert {key: accepted[key] for key in own} == own
    assert set(modes(folder).values()) == {0o600, 0o700}
    with pytest.raises(UsageError, match=r"actor\.host-1\.key exists already"):
        bundle_for(folder, "actor", tmp_path / "again", "host-1")
    (folder / "actor.host-1.key").unlink()
    assert len(Keys(folder, "replay").accepted("actor")) == 2


@pytest.mark.parametrize("name", ["../x", "two words", "line\nline"])
def test_a_name_must_be_that_of_a_file(folder, tmp_path, name):
    with pytest.raises(UsageError, match="--name must be a plain word"):
        bundle_for(folder, "actor", tmp_path / "out", name)


@pytest.mark.parametrize("role", PINNED)
def test_who_is_pinned_has_one_key(folder, tmp_path, role):
    with pytest.raises(UsageError, match="--name"):
        bundle_for(folder, role, tmp_path / "out", "second")
    new_folder(tmp_path / "other")
    (folder / f"{role}.second.key").write_text((tmp_path / "other" / f"{role}.key").read_text())
    with pytest.raises(UsageError, match=f"must have exactly one public key of the {role}, but has 2"):
        Keys(folder, "actor")


def test_a_folder_of_the_older_format_is_refused_with_the_remedy(folder):
    (folder / "actor.secret").write_text("00" * 32)
    with pytest.raises(UsageError, match=r"older format .*: create new keys with apex keys new"):
        Keys(folder, "actor")


def test_a_public_key_goes_through_hexadecimal_digits(tmp_path):
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
        "another thing": lambda: (folder / "replay.key").write_text("ssh-rsa AAAA me\n"),
    }[how]()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("group may read", r"actor\.key_secret can be read by other users \(mode 0640\): run chmod 600"),
        ("others may read", r"actor\.key_secret can be read by other users \(mode 0604\)"),
        ("folder may be written", r"keys can be written by other users \(mode 0777\): run chmod 755"),
        ("list may be written", r"replay\.key can be written by other users"),
        ("no secret", r"cannot read .*actor\.key_secret: No such file"),
        ("cut short", r"actor\.key_secret is not a key certificate"),
        ("not text", r"actor\.key_secret is not a key certificate"),
        ("not Z85", r"actor\.key_secret is not a key certificate"),
        ("public only", r"actor\.key_secret contains no secret key"),
        ("no public key", "must have exactly one public key of the learner, but has 0"),
        ("another thing", r"replay\.key is not a key certificate"),
    ],
)
def test_refuses_a_folder_that_lies_open_or_is_none_and_tells_no_secret(folder, how, words):
    secret = Keys(folder, "actor").secret.decode()
    spoil(folder, how)
    with pytest.raises(UsageError, match=words) as refused:
        Keys(folder, "actor")
    assert secret[:8] not in str(refused.value)
    assert "AAAA" not in str(refused.value)


def test_without_a_folder_there_are_no_keys_and_a_folder_that_is_not_there_is_refused(tmp_path):
    assert read_keys("", "actor") is None
    with pytest.raises(UsageError, match="apex keys new"):
        read_keys(str(tmp_path / "nowhere"), "actor")


def test_no_secret_is_shown(folder):
    keys = Keys(folder, "actor")
    for shown in (repr(keys), str(keys), f"{keys}"):
        assert keys.secret.decode()[:8] not in shown


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
