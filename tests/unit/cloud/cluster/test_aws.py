"""Calls to AWS: a refusal becomes an error with code and remedy. No test reaches a network."""

import builtins
import os

import botocore.exceptions
import pytest

from apex.cloud.cluster.aws import Aws, open_aws
from apex.errors import AwsError
from apexreplay.errors import UsageError


@pytest.fixture
def no_account(monkeypatch):
    """An environment without credentials, region and settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


class Client:
    """Raises `error` for every request."""

    def __init__(self, error):
        self._error = error

    def get_paginator(self, operation):
        return self

    def paginate(self, **arguments):
        yield {"Volumes": [{"VolumeId": "vol-1"}]}
        raise self._error


def refusal(code, message="no"):
    return botocore.exceptions.ClientError({"Error": {"Code": code, "Message": message}}, "DescribeVolumes")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (refusal("UnauthorizedOperation"), "ec2:DescribeVolumes"),
        (refusal("ExpiredToken", "old"), r"refuses these credentials \(ExpiredToken: old\)"),
        (refusal("DependencyViolation", "held"), r"held \(DependencyViolation\)"),
        (botocore.exceptions.NoCredentialsError(), "no credentials"),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), "http://x"),
    ],
)
def test_a_refusal_names_its_code_and_its_subject(error, named):
    with pytest.raises(AwsError, match=named):
        list(Aws("us-east-1", lambda service: Client(error)).pages("ec2", "describe_volumes", "Volumes"))


def test_a_refused_page_follows_the_pages_before_it():
    pages = Aws("us-east-1", lambda service: Client(refusal("Throttling"))).pages("ec2", "describe_volumes", "Volumes")
    assert next(pages) == {"VolumeId": "vol-1"}
    with pytest.raises(AwsError, match="Throttling"):
        next(pages)


def test_missing_boto3_is_refused_with_the_command_to_install_it(monkeypatch):
    real = builtins.__import__

    def absent(name, *arguments, **options):
        if name.startswith("boto"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"-m pip install boto3"):
        open_aws(None)


def test_a_missing_region_is_refused(no_account):
    with pytest.raises(UsageError, match="--region"):
        open_aws(None)


def test_an_unknown_profile_is_refused(no_account):
    no_account.setenv("AWS_PROFILE", "ghost")
    with pytest.raises(UsageError, match="ghost"):
        open_aws("us-east-1")


def test_calls_without_credentials_are_refused(no_account):
    with pytest.raises(AwsError, match="credentials"):
        list(open_aws("us-east-1").pages("ec2", "describe_volumes", "Volumes"))
