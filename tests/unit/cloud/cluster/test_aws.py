"""Calls to AWS: a refusal becomes a sentence that says what to do. Nothing here reaches a network."""

import builtins
import os

import botocore.exceptions
import pytest

from apex.cloud.cluster.aws import Aws, open_aws
from apex.errors import AwsError, UsageError


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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refusal("UnauthorizedOperation"), "AWS denies ec2:DescribeVolumes; your user or role needs this permission"),
        (refusal("ExpiredToken", "old"), "AWS refuses these credentials (ExpiredToken: old); renew them"),
        (refusal("DependencyViolation", "held"), "ec2 DescribeVolumes: held (DependencyViolation)"),
        (botocore.exceptions.NoCredentialsError(), "no credentials: Unable to locate credentials. Set them"),
        (
            botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
            "ec2 describe_volumes: Could not connect",
        ),
    ],
)
def test_a_refusal_says_what_to_do(error, words):
    with pytest.raises(AwsError) as caught:
        Aws("us-east-1", lambda service: Client(error)).call("ec2", "describe_volumes")
    assert str(caught.value).startswith(words)


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
    with pytest.raises(UsageError, match=r"needs boto3 \(No module named 'boto3'\): .* -m pip install boto3"):
        open_aws(None)


def test_without_a_region_it_asks_for_one(nobody):
    with pytest.raises(UsageError, match="no AWS region: use --region"):
        open_aws(None)


def test_a_profile_that_is_not_there_is_refused(nobody):
    nobody.setenv("AWS_PROFILE", "ghost")
    with pytest.raises(UsageError, match="ghost"):
        open_aws("us-east-1")


def test_without_credentials_a_call_says_so(nobody):
    with pytest.raises(AwsError, match="no credentials"):
        open_aws("us-east-1").call("ec2", "describe_volumes")
