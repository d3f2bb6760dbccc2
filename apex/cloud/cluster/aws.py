"""The way to AWS: the one place that knows boto3 here, and that says in words what AWS refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from apex.errors import ApexError, ConfigError, require
from apex.runtime.optional_imports import remedy

PROJECT = "apex-zeromq"  # the tag Project of all that is ours; Cluster and Role stand beside it

Item = dict[str, Any]  # as AWS describes a thing

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"}
_STRANGER = {
    *("AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "SignatureDoesNotMatch"),
    *("InvalidAccessKeyId", "UnrecognizedClientException", "RequestExpired"),
}
_PERMISSIONS = {  # where a permission is not called as its operation
    "s3:ListObjectVersions": "s3:ListBucketVersions",
    "resourcegroupstaggingapi:GetResources": "tag:GetResources",
    "budgets:DescribeBudget": "budgets:ViewBudget",
    "budgets:DeleteBudget": "budgets:ModifyBudget",
}


class AwsError(ApexError, RuntimeError):
    """AWS refused, or did not answer. The sentence says what, and what to do."""

    def __init__(self, sentence: str, code: str = "", *, denied: bool = False) -> None:
        super().__init__(sentence)
        self.code = code  # AWS's own word for it; "" where it said none
        self.denied = denied  # trying again is of no use


class NotReachedError(AwsError):
    """AWS was not reached, or does not know who asks: every other call would end in the same way."""


class Aws:
    """AWS in one region. A call is named by service and operation, as the permission for it is."""

    def __init__(self, region: str, client: Callable[[str], Any]) -> None:
        """`client` makes the boto3 client of a service."""
        self.region = region
        self._make = client
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **arguments: Any) -> Item:
        """One call; raises AwsError."""
        answer: Item = _said(service, operation, lambda: getattr(self._client(service), operation)(**arguments))
        return answer

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Item]:
        """What stands under `key` in all pages of an answer; raises AwsError."""
        paginator = _said(service, operation, lambda: self._client(service).get_paginator(operation))
        pages = iter(paginator.paginate(**arguments))
        while (page := _said(service, operation, lambda: next(pages, None))) is not None:
            yield from page.get(key, [])

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._make(service)
        return self._clients[service]


def open_aws(region: str | None) -> Aws:
    """Credentials, region and endpoint come from where AWS's own tools take them; `region` wins over those.

    Raises ConfigError where boto3 or a region is missing.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"apex cluster needs boto3 ({error}): {remedy('aws')}") from error
    try:
        session = boto3.Session(region_name=region)
    except BotoCoreError as error:  # such as a profile that is not there
        raise ConfigError(str(error)) from error
    name = session.region_name
    require(bool(name), "which region? --region us-east-1, AWS_DEFAULT_REGION, or `aws configure`")
    require(bool(_REGION.fullmatch(name)), f"--region must be one of AWS's, as in us-east-1; got {name!r}")
    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})
    return Aws(name, lambda service: session.client(service, config=config))


def named(value: str) -> str:
    """A cluster's name, checked: it becomes part of paths and prefixes. Raises ConfigError."""
    good = re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value) is not None
    require(good, f"a cluster's name is of a-z, 0-9 and -, as in pong-1; got {value!r}")
    return value


def tags(item: Mapping[str, Any]) -> dict[str, str]:
    """A thing's tags, by key."""
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}


def only(name: str | None) -> list[Item]:
    """Filters for what is ours; of the cluster `name` alone, if it is given."""
    filters = [{"Name": "tag:Project", "Values": [PROJECT]}]
    return filters + ([{"Name": "tag:Cluster", "Values": [name]}] if name else [])


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _said(service: str, operation: str, call: Callable[[], Any]) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        raise _refused(service, error) from error
    except BotoCoreError as error:
        raise _unheard(service, operation, error) from error


def _refused(service: str, error: Any) -> AwsError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    text = str(error.response.get("Error", {}).get("Message", "")) or code
    if code in _DENIED:
        name = f"{service}:{error.operation_name}"
        permission = _PERMISSIONS.get(name, name)
        return AwsError(f"you may not: it needs the permission {permission} ({text})", code, denied=True)
    if code in _STRANGER:
        return NotReachedError(
            f"AWS does not take these credentials ({code}: {text}); `aws sts get-caller-identity` shows who you are, "
            "`aws sso login` or `aws configure` renews them",
            code,
            denied=True,
        )
    return AwsError(f"{service} {error.operation_name}: {text} ({code})", code)


def _unheard(service: str, operation: str, error: Exception) -> AwsError:
    kind = type(error).__name__
    if "Credential" in kind or "Token" in kind or "SSO" in kind:
        return NotReachedError(
            f"no credentials: {error}. `aws configure sso`, AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY say who you are",
            kind,
            denied=True,
        )
    return NotReachedError(f"{service} {operation}: {error}", kind)
