# Which hosts may connect to which ports. The programs authenticate each other by keys; these rules also close the ports
# to all other hosts.

locals {
  sockets = {
    experience = { port = 21001, at = "replay", open_to = ["actor"] }
    priorities = { port = 21002, at = "replay", open_to = ["learner"] }
    receipts   = { port = 21003, at = "replay", open_to = ["actor"] }
    batches    = { port = 21004, last = 21634, at = "replay", open_to = ["learner"] } # the port of each further sampler is 10 higher
    parameters = { port = 22001, at = "learner", open_to = ["actor", "evaluator"] }
    control    = { port = 22003, at = "learner", open_to = ["replay", "evaluator", "actor"] }
  }

  kind_of = merge([for kind, host in local.hosts : { for role in host.roles : role => kind }]...)

  passages = merge([
    for name, socket in local.sockets : {
      for role in socket.open_to :
      "${name}-from-${role}" => merge({ last = socket.port }, socket, { name = name, at = local.kind_of[socket.at], from = local.kind_of[role] })
      if local.kind_of[role] != local.kind_of[socket.at] # Connections inside a host need no rule.
    }
  ]...)

  admin_ports = merge([
    for cidr in var.admin_cidrs : merge(
      { "tensorboard-${cidr}" = { kind = "learner", port = 6006, cidr = cidr, what = "TensorBoard" } },
      {
        for kind in keys(local.hosts) : "ssh-${kind}-${cidr}" => { kind = kind, port = 22, cidr = cidr, what = "SSH" }
        if var.ssh_key_name != null
      },
    )
  ]...)
}

resource "aws_security_group" "host" {
  #checkov:skip=CKV2_AWS_5:every group is attached to a kind of host; checkov does not see this through for_each
  for_each = local.hosts

  name        = "${local.prefix}-${each.key}"
  description = "Ape-X ${var.name}: ${each.key}"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${local.prefix}-${each.key}", Role = each.key })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_default_security_group" "closed" { # unused; has no rules, so that it permits nothing
  count = local.own_network

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.prefix}-closed", Role = "network" })
}

resource "aws_vpc_security_group_ingress_rule" "socket" {
  for_each = local.passages

  security_group_id            = aws_security_group.host[each.value.at].id
  referenced_security_group_id = aws_security_group.host[each.value.from].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.last
  description                  = "${each.value.name}, from ${each.value.from}"
  tags                         = merge(local.tags, { Name = each.key, Role = each.value.at })
}

resource "aws_vpc_security_group_egress_rule" "socket" {
  for_each = local.passages

  security_group_id            = aws_security_group.host[each.value.from].id
  referenced_security_group_id = aws_security_group.host[each.value.at].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.last
  description                  = "${each.value.name}, to ${each.value.at}"
  tags                         = merge(local.tags, { Name = each.key, Role = each.value.from })
}

resource "aws_vpc_security_group_ingress_rule" "admin" {
  for_each = local.admin_ports

  security_group_id = aws_security_group.host[each.value.kind].id
  cidr_ipv4         = each.value.cidr
  ip_protocol       = "tcp"
  from_port         = each.value.port
  to_port           = each.value.port
  description       = "${each.value.what} for admin_cidrs"
  tags              = merge(local.tags, { Name = each.key, Role = each.value.kind })
}

resource "aws_vpc_security_group_egress_rule" "aws" { # S3, SSM, CloudWatch and auto-scaling have no fixed addresses.
  for_each = local.hosts

  security_group_id = aws_security_group.host[each.key].id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "AWS APIs, over TLS"
  tags              = merge(local.tags, { Name = "${local.prefix}-${each.key}-aws", Role = each.key })
}
