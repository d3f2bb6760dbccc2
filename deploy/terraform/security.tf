# Who may knock where. The keys of apex keys decide who is let in; these rules keep strangers from the door.

locals {
  doors = {
    experience = { port = 51001, at = "replay", open_to = ["actor"] }
    priorities = { port = 51002, at = "replay", open_to = ["learner"] }
    receipts   = { port = 51003, at = "replay", open_to = ["actor"] }
    parameters = { port = 52001, at = "learner", open_to = ["actor", "evaluator"] }
    batches    = { port = 52002, at = "learner", open_to = ["replay"] }
    control    = { port = 52003, at = "learner", open_to = ["replay", "evaluator", "actor"] }
    metrics    = { port = 52004, at = "learner", open_to = ["replay", "evaluator", "actor"] }
  }

  passages = merge([
    for name, door in local.doors : { for from in door.open_to : "${name}-from-${from}" => merge(door, { name = name, from = from }) }
  ]...)

  admin_doors = merge([
    for cidr in var.admin_cidrs : merge(
      { for role in local.roles : "ssh-${role}-${cidr}" => { role = role, port = 22, cidr = cidr, what = "SSH" } },
      { "tensorboard-${cidr}" = { role = "evaluator", port = 6006, cidr = cidr, what = "TensorBoard" } },
    )
  ]...)
}

resource "aws_security_group" "role" {
  #checkov:skip=CKV2_AWS_5:each is its role's hosts' group; in a plan checkov does not see that through for_each
  for_each = toset(local.roles)

  name        = "${local.prefix}-${each.key}"
  description = "Ape-X ${var.name}: ${each.key}"
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${local.prefix}-${each.key}", Role = each.key }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_default_security_group" "closed" { # Nobody is in it; and who gets into it by mistake reaches nothing.
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${local.prefix}-closed", Role = "network" }
}

resource "aws_vpc_security_group_ingress_rule" "door" {
  for_each = local.passages

  security_group_id            = aws_security_group.role[each.value.at].id
  referenced_security_group_id = aws_security_group.role[each.value.from].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = "${each.value.name}, from ${each.value.from}"
  tags                         = { Name = each.key, Role = each.value.at }
}

resource "aws_vpc_security_group_egress_rule" "door" {
  for_each = local.passages

  security_group_id            = aws_security_group.role[each.value.from].id
  referenced_security_group_id = aws_security_group.role[each.value.at].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = "${each.value.name}, to ${each.value.at}"
  tags                         = { Name = each.key, Role = each.value.from }
}

resource "aws_vpc_security_group_ingress_rule" "admin" {
  for_each = local.admin_doors

  security_group_id = aws_security_group.role[each.value.role].id
  cidr_ipv4         = each.value.cidr
  ip_protocol       = "tcp"
  from_port         = each.value.port
  to_port           = each.value.port
  description       = "${each.value.what} for those who run the cluster"
  tags              = { Name = each.key, Role = each.value.role }
}

resource "aws_vpc_security_group_egress_rule" "aws" { # S3, SSM, CloudWatch and auto-scaling have no fixed addresses.
  for_each = toset(local.roles)

  security_group_id = aws_security_group.role[each.key].id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "AWS's own interfaces, over TLS"
  tags              = { Name = "${local.prefix}-${each.key}-aws", Role = each.key }
}
