"""The rules for every plan; returns a sentence for each violation."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from terraform_program import Plan, resources

from apex.config import TransportConfig
from apex.config.addresses import MOST_SAMPLERS
from apex.transport.curve.key_store import ENDPOINTS
from apex.types import Role

PROJECT = "apex-zeromq"
ADMIN_PORTS = {22, 6006}

# Who connects to whom: hosts of the roles whose keys open the socket. Observers have no host.
MAY_REACH = {name: set(socket.open_to) - {Role.OBSERVER} for name, socket in ENDPOINTS.items()}
BOUND_BY = {name: socket.bound_by for name, socket in ENDPOINTS.items()}

# words that indicate a secret, and formats of keys: 64 hexadecimal digits of CURVE, AWS's own, PEM
SECRETS = re.compile(
    r"secret|password|passwd|token|credential|private.key|BEGIN [A-Z ]*KEY"
    r"|\b[0-9a-f]{64}\b|\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    re.IGNORECASE,
)
BEST_POLICY = "checkpoints/best.safetensors"
UNTAGGED = {  # AWS has no tags for these.
    "aws_autoscaling_schedule",
    "aws_iam_role_policy",
    "aws_route",
    "aws_route_table_association",
    "terraform_data",
}


def violations(plan: Plan, admin_cidrs: set[str]) -> list[str]:
    """Returns one sentence for each violation in the planned state."""
    found = resources(plan["planned_values"])
    checks = (_ports, _templates, _tags, _ends)
    name = plan["variables"]["name"]["value"]
    given = (*_admin(found, admin_cidrs), *_policies(found, name))
    return [*given, *(violation for check in checks for violation in check(found))]


def user_data(found: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the user data of each kind of host."""
    templates = _of(found, "aws_launch_template")
    return {item["index"]: base64.b64decode(item["values"]["user_data"]).decode() for item in templates}


def _ports(found: list[dict[str, Any]]) -> Iterator[str]:
    transport = TransportConfig()
    kinds = {item["index"] for item in _of(found, "aws_security_group")}
    last = {transport.port("batches"): transport.port("batches", MOST_SAMPLERS - 1)}
    expected = {
        (transport.port(name), at, kind)
        for name, roles in MAY_REACH.items()
        for role in roles
        if (at := kind_of(BOUND_BY[name], kinds)) != (kind := kind_of(role, kinds))
    }
    groups = {item["values"]["id"]: item["index"] for item in found if item["type"] == "aws_security_group"}
    for direction, order in (("ingress", 1), ("egress", -1)):
        actual = set()
        for item in _of(found, f"aws_vpc_security_group_{direction}_rule"):
            values = item["values"]
            if values.get("referenced_security_group_id"):
                first = values["from_port"]
                if values["to_port"] != last.get(first, first) or values["ip_protocol"] != "tcp":
                    yield f"{item['address']} opens more than its port"
                ends = [groups[values[f"{side}security_group_id"]] for side in ("", "referenced_")]
                actual.add((values["from_port"], *ends[::order]))
        for port, at, kind in sorted(actual - expected):
            yield f"{direction}: {kind} may reach {at}'s port {port}, and should not"
        for port, at, kind in sorted(expected - actual):
            yield f"{direction}: {kind} cannot reach {at}'s port {port}"
    for item in _of(found, "aws_vpc_security_group_egress_rule"):
        values = item["values"]
        if not values.get("referenced_security_group_id") and (values["from_port"], values["to_port"]) != (443, 443):
            yield f"{item['address']} allows other requests than HTTPS"
    # The provider also reads the rules that are resources from a group: these have descriptions.
    rules = [item["values"] for item in found if item["type"].startswith("aws_vpc_security_group_")]
    described = {values["description"] for values in rules}
    for kind, separate in (("aws_security_group", described), ("aws_default_security_group", set())):
        for item in _of(found, kind):
            for rule in [*(item["values"].get("ingress") or []), *(item["values"].get("egress") or [])]:
                if rule.get("description") not in separate:
                    yield f"{item['address']} has an inline rule: {rule}"


def kind_of(role: str, kinds: set[str]) -> str:
    """Returns the kind of host on which a role runs: a replay server is on the learner's host unless it has its own."""
    return role if role in kinds else "learner"


def _admin(found: list[dict[str, Any]], admin_cidrs: set[str]) -> Iterator[str]:
    for item in _of(found, "aws_vpc_security_group_ingress_rule"):
        values = item["values"]
        cidr = values.get("cidr_ipv4") or values.get("cidr_ipv6")
        if cidr is None:
            continue
        if cidr not in admin_cidrs or ipaddress.ip_network(cidr, strict=False).prefixlen == 0:
            yield f"{item['address']} lets {cidr} in"
        if values["from_port"] != values["to_port"] or values["from_port"] not in ADMIN_PORTS:
            yield f"{item['address']} opens {values['from_port']} to {values['to_port']} to administrators"


def _templates(found: list[dict[str, Any]]) -> Iterator[str]:
    for item in _of(found, "aws_launch_template"):
        address, values = item["address"], item["values"]
        disks = [disk for device in values["block_device_mappings"] for disk in device["ebs"]]
        if not disks or any(str(disk.get("encrypted")).lower() != "true" for disk in disks):
            yield f"{address} has a disk that is not encrypted"
        if any(str(disk.get("delete_on_termination")).lower() != "true" for disk in disks):
            yield f"{address} keeps its disk after its termination"
        if any(options.get("http_tokens") != "required" for options in values["metadata_options"] or [{}]):
            yield f"{address} answers IMDSv1"
        is_learner = item["index"] == "learner"
        if values["instance_initiated_shutdown_behavior"] != ("stop" if is_learner else "terminate"):
            yield f"{address} {'loses its uploads' if is_learner else 'costs money for its disk'} when it is off"
    for role, text in user_data(found).items():
        for match in SECRETS.finditer(text):
            yield f"user data of {role} has {match.group()!r}"


def _policies(found: list[dict[str, Any]], name: str) -> Iterator[str]:
    for item in _of(found, "aws_iam_role_policy"):
        for statement in json.loads(item["values"]["policy"])["Statement"]:
            for key in ("Resource", "Action"):
                entries = statement[key] if isinstance(statement[key], list) else [statement[key]]
                for entry in entries:
                    anybodys = key == "Resource" and name not in entry and not statement.get("Condition")
                    if entry == "*" or (key == "Action" and "*" in entry) or anybodys:
                        yield f"{item['address']}: {statement['Sid']} has {key} {entry}"
            for resource in statement["Resource"] if "s3:PutObjectTagging" in statement["Action"] else ():
                if fnmatch(BEST_POLICY, resource.partition(f"/{name}/")[2]):
                    yield f"{item['address']}: {statement['Sid']} can let {BEST_POLICY} expire"
        if "NotResource" in item["values"]["policy"] or "NotAction" in item["values"]["policy"]:
            yield f"{item['address']} uses NotResource or NotAction"


def _tags(found: list[dict[str, Any]]) -> Iterator[str]:
    for item in found:
        if item["type"] in UNTAGGED:
            continue
        values = item["values"]
        if item["type"] == "aws_autoscaling_group":
            tags = {tag["key"]: tag["value"] for tag in values["tag"] if tag["propagate_at_launch"]}
        else:
            tags = values.get("tags_all") or {}
        if tags.get("Project") != PROJECT or not tags.get("Cluster") or not tags.get("Role"):
            yield f"{item['address']} is not tagged Project, Cluster and Role: {tags}"


def _ends(found: list[dict[str, Any]]) -> Iterator[str]:
    ending = {item["index"] for item in _of(found, "aws_autoscaling_schedule")}
    for item in _of(found, "aws_autoscaling_group"):
        if item["values"]["min_size"] != 0:
            yield f"{item['address']} cannot be set to 0 when the run ends"
        if item["index"] not in ending:
            yield f"{item['address']} does not end after max_hours"


def _of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in found if item["type"] == kind]
