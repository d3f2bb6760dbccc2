"""The way to AWS: whatever it refuses becomes a sentence that says what to do. Nothing here reaches a network."""

import builtins
import os

import botocore.exceptions
import pytest

from apex.cloud.cluster.aws import Aws, AwsError, named, only, open_aws
from apex.errors import ConfigError


@pytest.fixture
def nobody(monkeypatch):
    """Nobody's machine: no credentials, no region, no settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


class Client:
    """Raises `error` whatever it is asked for."""

    def __init__(self, error):
        self._error = error

    def describe_volumes(self, **arguments):
        raise self._error

    def get_paginator(self, operation):
        return self

    def paginate(self, **arguments):
        yield {"Volumes": [{"VolumeId": "vol-1"}]}
        raise self._error


def refusal(code, message="no"):
    return botocore.exceptions.ClientError({"Error": {"Code": code, "Message": message}}, "DescribeVolumes")


def sentence(error):
    with pytest.raises(AwsError) as caught:
        Aws("us-east-1", lambda service: Client(error)).call("ec2", "describe_volumes")
    return str(caught.value), caught.value.denied


@pytest.mark.parametrize(
    ("error", "words", "denied"),
    [
        (refusal("UnauthorizedOperation"), "you may not: it needs the permission ec2:DescribeVolumes (no)", True),
        (refusal("ExpiredToken", "old"), "AWS does not take these credentials (ExpiredToken: old); `aws sts", True),
        (refusal("DependencyViolation", "held"), "ec2 DescribeVolumes: held (DependencyViolation)", False),
        (
            botocore.exceptions.NoCredentialsError(),
            "no credentials: Unable to locate credentials. `aws configure",
            True,
        ),
        (
            botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
            "ec2 describe_volumes: Could not connect",
            False,
        ),
    ],
)
def test_a_refusal_says_what_to_do(error, words, denied):
    said, is_denied = sentence(error)
    assert said.startswith(words)
    assert is_denied is denied


def test_a_permission_that_is_not_called_as_its_operation_is_named_as_aws_names_it():
    error = botocore.exceptions.ClientError({"Error": {"Code": "AccessDenied"}}, "ListObjectVersions")
    with pytest.raises(AwsError, match="s3:ListBucketVersions"):
        list(Aws("us-east-1", lambda service: Client(error)).pages("s3", "list_object_versions", "Volumes"))


def test_a_page_that_is_refused_is_refused_after_those_before_it():
    pages = Aws("us-east-1", lambda service: Client(refusal("Throttling"))).pages("ec2", "describe_volumes", "Volumes")
    assert next(pages) == {"VolumeId": "vol-1"}
    with pytest.raises(AwsError, match="Throttling"):
        next(pages)


def test_without_boto3_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def absent(name, *words, **options):
        if name.startswith("boto"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *words, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"needs boto3 \(No module named 'boto3'\): .* -m pip install boto3"):
        open_aws(None)


def test_without_a_region_it_asks_for_one(nobody):
    with pytest.raises(ConfigError, match="which region"):
        open_aws(None)


def test_a_region_that_is_none_is_refused(nobody):
    with pytest.raises(ConfigError, match="got 'moon'"):
        open_aws("moon")


def test_a_profile_that_is_not_there_is_refused(nobody):
    nobody.setenv("AWS_PROFILE", "ghost")
    with pytest.raises(ConfigError, match="ghost"):
        open_aws("us-east-1")


def test_without_credentials_a_call_says_so(nobody):
    with pytest.raises(AwsError, match="no credentials"):
        open_aws("us-east-1").call("ec2", "describe_volumes")


@pytest.mark.parametrize("name", ["", "Pong", "-pong", "pong-", "a/b", "a" * 64, "*"])
def test_a_name_that_could_reach_further_than_its_cluster_is_refused(name):
    with pytest.raises(ConfigError, match="a cluster's name is of"):
        named(name)


def test_what_is_looked_for_is_ours_and_of_one_cluster():
    assert only("pong") == [
        {"Name": "tag:Project", "Values": ["apex-zeromq"]},
        {"Name": "tag:Cluster", "Values": ["pong"]},
    ]
    assert only(None) == only("pong")[:1]
