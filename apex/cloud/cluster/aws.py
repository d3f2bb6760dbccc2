"""Calls AWS for `apex cluster` and makes AWS's errors readable. The only module of this package that uses boto3."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from apex.errors import AwsError
from apex.runtime.optional_imports import remedy
from apexreplay.errors import UsageError, require

PROJECT = "apex-zeromq"  # value of the tag Project of all resources in deploy/terraform; other tags: Cluster, Role
OURS = [{"Name": "tag:Project", "Values": [PROJECT]}, {"Name": "tag-key", "Values": ["Cluster"]}]  # filter by tags

Item = dict[str, Any]  # as AWS describes a resource

_UNKNOWN_CALLER = ("AuthFailure", "Token", "Signature", "AccessKeyId", "UnrecognizedClient", "RequestExpired")


class Aws:
    """AWS in one region. Calls are named by service and operation, as in IAM permissions."""

    def __init__(self, region: str, client: Callable[[str], Any]) -> None:
        """`client` creates the boto3 client of a service."""
        self.region = region
        self._client = cache(client)

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Item]:
        """Yields the entries under `key` in all pages of an answer. Raises AwsError."""
        pages = iter(self._client(service).get_paginator(operation).paginate(**arguments))
        while (page := _translate(service, operation, lambda: next(pages, None))) is not None:
            yield from page.get(key, [])


def open_aws(region: str | None) -> Aws:
    """Opens AWS with the credentials, region and endpoint that the AWS CLI would use; `region` overrides its region.

    Raises UsageError if boto3 is not installed or no region is configured.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError(f"apex cluster needs boto3 ({error})", remedy("aws")) from error
    try:
        session = boto3.Session(region_name=region)
    except BotoCoreError as error:  # such as a profile that does not exist
        raise UsageError(str(error)) from error
    choose = "use --region us-east-1, AWS_DEFAULT_REGION, or `aws configure`"
    require(bool(session.region_name), "no AWS region", remedy=choose)
    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})
    return Aws(session.region_name, lambda service: session.client(service, config=config))


def tags(item: Mapping[str, Any]) -> dict[str, str]:
    """Returns a resource's tags by key."""
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}


def _translate(service: str, operation: str, call: Callable[[], Any]) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        code, text = (str(error.response.get("Error", {}).get(key, "")) for key in ("Code", "Message"))
        sentence = f"{service} {error.operation_name}: {text} ({code})"
        if code.startswith(("AccessDenied", "UnauthorizedOperation", "AuthorizationError")):
            sentence = f"AWS denies {service}:{error.operation_name}; your user or role needs this permission ({text})"
        elif any(word in code for word in _UNKNOWN_CALLER):
            sentence = f"AWS refuses these credentials ({code}: {text}); renew them, for example with `aws sso login`"
        raise AwsError(sentence) from error
    except BotoCoreError as error:
        kind, sentence = type(error).__name__, f"{service} {operation}: {error}"
        if any(word in kind for word in ("Credential", "Token", "SSO")):
            sentence = f"no credentials: {error}. Set them with `aws configure sso`, AWS_PROFILE or AWS_ACCESS_KEY_ID"
        raise AwsError(sentence) from error
