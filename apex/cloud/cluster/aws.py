"""Calls to AWS: the only module of `apex cluster` that uses boto3. It puts AWS's refusals into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from apex.errors import ApexError, ConfigError, require
from apex.runtime.optional_imports import remedy

PROJECT = "apex-zeromq"  # the tag Project of everything that deploy/terraform makes; Cluster and Role stand beside it
OURS = [{"Name": "tag:Project", "Values": [PROJECT]}]  # a filter

Item = dict[str, Any]  # as AWS describes a resource

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"}
_UNKNOWN_CALLER = {
    *("AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "SignatureDoesNotMatch"),
    *("InvalidAccessKeyId", "UnrecognizedClientException", "RequestExpired"),
}


class AwsError(ApexError, RuntimeError):
    """AWS refused or did not answer. `code` is AWS's own name of the error, "" where it gave none."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code


class Aws:
    """AWS in one region. A call is named by service and operation, as its permission is."""

    def __init__(self, region: str, client: Callable[[str], Any]) -> None:
        """`client` makes the boto3 client of a service."""
        self.region = region
        self._make = client
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **arguments: Any) -> Item:
        """One call; raises AwsError."""
        answer: Item = _translate(service, operation, lambda: getattr(self._client(service), operation)(**arguments))
        return answer

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Item]:
        """The entries under `key` in all pages of an answer; raises AwsError."""
        paginator = _translate(service, operation, lambda: self._client(service).get_paginator(operation))
        pages = iter(paginator.paginate(**arguments))
        while (page := _translate(service, operation, lambda: next(pages, None))) is not None:
            yield from page.get(key, [])

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._make(service)
        return self._clients[service]


def open_aws(region: str | None) -> Aws:
    """Takes credentials, region and endpoint from where AWS's own tools take them; `region` overrides theirs.

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
    except BotoCoreError as error:  # such as a profile that does not exist
        raise ConfigError(str(error)) from error
    name = session.region_name
    require(bool(name), "no region: use --region us-east-1, AWS_DEFAULT_REGION, or `aws configure`")
    require(bool(_REGION.fullmatch(name)), f"--region must be an AWS region, as in us-east-1; got {name!r}")
    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})
    return Aws(name, lambda service: session.client(service, config=config))


def tags(item: Mapping[str, Any]) -> dict[str, str]:
    """A resource's tags, by key."""
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags") or []}


def _translate(service: str, operation: str, call: Callable[[], Any]) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        text = str(error.response.get("Error", {}).get("Message", "")) or code
        sentence = f"{service} {error.operation_name}: {text} ({code})"
        if code in _DENIED:
            sentence = f"AWS denies {service}:{error.operation_name}; your user or role needs this permission ({text})"
        elif code in _UNKNOWN_CALLER:
            sentence = (
                f"AWS refuses these credentials ({code}: {text}); renew them with `aws sso login` or `aws configure`"
            )
        raise AwsError(sentence, code) from error
    except BotoCoreError as error:
        kind = type(error).__name__
        sentence = f"{service} {operation}: {error}"
        if "Credential" in kind or "Token" in kind or "SSO" in kind:
            sentence = f"no credentials: {error}. Set them with `aws configure sso`, AWS_PROFILE or AWS_ACCESS_KEY_ID"
        raise AwsError(sentence, kind) from error
